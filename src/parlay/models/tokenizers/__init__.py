"""Tokenizers from the files of a folder."""
