"""Drafters that remember outputs of other requests, or search a corpus."""
