"""Drafters that copy from the prompt, the output, references or a predicted text."""
