"""Benchmarks of canvas models: make texts to train and test them on, and measure their ways of decoding."""
