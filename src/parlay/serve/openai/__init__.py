"""OpenAI's API: chat, completions and responses."""
