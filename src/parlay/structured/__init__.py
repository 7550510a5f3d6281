"""Structured output: text that follows a JSON schema, a regular expression, a list of choices, or a grammar."""
