"""Errors that say which fields their message names."""

from __future__ import annotations

import pickle

from parlay.types import FieldError


def test_an_error_keeps_its_message_and_fields_in_another_process() -> None:
    """Ray shows an error of a replica in the process that started it."""
    error = FieldError("top_p", "must be below min_p", "min_p")
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == "top_p must be below min_p"
    assert copied.named({"top_p": "--top-p", "min_p": "--min-p"}.get) == "--top-p must be below --min-p"
