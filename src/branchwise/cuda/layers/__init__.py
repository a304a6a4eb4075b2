"""Decoder layers of a model as a few kernels."""
