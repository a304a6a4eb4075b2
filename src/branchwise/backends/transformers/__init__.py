"""Any decoder of transformers as a target."""
