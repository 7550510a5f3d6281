"""Benchmarks of models with canvases: texts to train and test them on, and figures of their ways to decode."""
