"""Kernels of trained heads."""
