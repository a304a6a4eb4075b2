"""Decoder layers of a model in other forms: a few kernels of our own, or compiled."""
