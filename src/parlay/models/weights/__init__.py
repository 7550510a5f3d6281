"""Weights as files store them, and as decoders read them."""
