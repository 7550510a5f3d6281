"""Drafters whose draft model has another tokenizer than the target."""
