"""A draft model with several exits; the layers up to each exit are a smaller model (S2D)."""
