"""Chat for all protocols: makes prompts and forms, and reads text, reasoning and calls out of answers."""
