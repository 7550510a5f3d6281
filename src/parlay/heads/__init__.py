"""Draft heads: pure modules from a target's features and token ids to logits, used by trainers and drafters alike."""
