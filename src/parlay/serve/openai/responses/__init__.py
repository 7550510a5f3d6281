"""OpenAI's responses."""

LAST_EVENTS = {word: f"response.{word}" for word in ("completed", "incomplete", "failed")}
"""The type of a stream's last event, by the status of the response."""
