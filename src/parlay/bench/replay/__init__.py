"""Replay: a target that emits recorded answers, so that drafts can be judged on the text of models that aren't here."""
