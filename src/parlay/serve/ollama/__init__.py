"""Ollama's API."""

LAST_FIELD = "done"
"""The field of each line of a stream that is true in the last one."""
