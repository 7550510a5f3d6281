"""A conversation, whatever the protocol: prompt and form go in, text, reasoning and calls come out."""
