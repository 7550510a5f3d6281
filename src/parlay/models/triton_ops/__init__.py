"""The native decoder's Triton kernels, for CUDA devices and for Triton's interpreter."""
