"""A draft model with several exits, each a smaller model of its own (S2D)."""
