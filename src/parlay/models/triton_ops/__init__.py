"""The native decoder's kernels in Triton, for CUDA devices and for Triton's interpreter."""
