"""Checkpoints of the Hub whose matrices are rounded to few bits: AWQ, GPTQ and others. No value changes."""
