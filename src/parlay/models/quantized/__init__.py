"""Quantized checkpoints from the Hub (AWQ, GPTQ and others), read without changing any value."""
