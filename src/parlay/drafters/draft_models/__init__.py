"""Drafters that use a smaller model."""
