"""What drafters without a model cost: `python -m benchmarks.drafters.propose --help`."""
