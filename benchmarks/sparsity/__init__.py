"""Measures how many accepted drafts zeros in weights cost, and how much time they could save."""
