"""Tools for tests, Parlay's own and those of other packages: toy models and drafters, tiny checkpoints, the conformance
kit."""
