"""Loads tokenizers from the files of a folder."""
