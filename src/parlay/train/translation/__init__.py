"""Translators: one that writes token by token, and those that fill a canvas with the whole answer."""
