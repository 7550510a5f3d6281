"""Measures the figures that the README states, on this machine: `python -m benchmarks.figures --help`."""
