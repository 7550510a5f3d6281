"""Drafters that let the target correct guesses until they no longer change."""
