"""Replay: a target that emits recorded answers, to measure drafts on the texts of models that are not at hand."""
