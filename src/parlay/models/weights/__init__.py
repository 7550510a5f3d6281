"""Weights as files hold them, and as decoders take them."""
