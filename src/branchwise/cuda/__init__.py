"""CUDA graphs and Triton kernels; no other folder records graphs."""
