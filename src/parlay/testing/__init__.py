"""For tests, ours and other people's: toy models and drafters, tiny checkpoints, and the conformance kit."""
