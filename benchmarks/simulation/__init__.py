"""Measures how far `parlay simulate` is from the engine."""
