"""Drafters with heads that were trained on the target's hidden states."""
