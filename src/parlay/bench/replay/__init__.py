"""Replays recorded answers, to measure drafts on texts of models that need not run here."""
