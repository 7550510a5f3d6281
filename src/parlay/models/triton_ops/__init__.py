"""What of the native decoder runs as Triton kernels, on CUDA devices and in Triton's interpreter."""
