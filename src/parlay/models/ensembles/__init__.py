"""Runners whose logits are made of several models' logits, or of one model's for two prompts."""
