"""CUDA graphs and kernels; the only folder that knows how a device is recorded."""
