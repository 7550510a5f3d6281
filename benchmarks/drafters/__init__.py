"""The cost of drafters without a model: `python -m benchmarks.drafters.propose --help`."""
