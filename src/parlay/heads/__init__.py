"""Draft heads: pure modules that map a target's features and token ids to logits, used by trainers and drafters."""
