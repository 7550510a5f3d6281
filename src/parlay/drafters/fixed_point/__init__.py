"""Drafters that let the target correct guesses until they stand."""
