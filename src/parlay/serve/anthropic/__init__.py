"""Anthropic's messages API."""

LAST_EVENT = "message_stop"
"""The type of the event that ends a stream."""
