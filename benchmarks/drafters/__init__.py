"""Benchmarks of trained draft heads: `python -m benchmarks.drafters.modelled --help`."""
