"""A smaller model as the drafter."""
