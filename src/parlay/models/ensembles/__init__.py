"""Runners whose logits are combined from several models, or from one model with two prompts."""
