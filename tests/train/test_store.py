"""Batches: reproducible, and shaped as each kind needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parlay.train.store import IGNORE, Batches, Stream, make_stream, stratified, write_stream
from parlay.train.tokenizer import train_tokenizer

TEXTS = [f"Document number {n} has words of its own. " * (3 + n % 5) for n in range(60)]
TOKENIZER = train_tokenizer(TEXTS, 320)
STREAM = make_stream(TEXTS, TOKENIZER)
KINDS = ("prose", "code", "calls", "speech", "technical", "maths", "tasks")
BATCHES = Batches(dict.fromkeys(KINDS, STREAM), 320, seed=3)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    """A resumed run sees the rows that an uninterrupted one would have seen."""
    mix = {"prose": 0.5, "tasks": 0.3, "noise": 0.2}
    first, again, other = (BATCHES.draw(step, 6, 64, mix)[0] for step in (5, 5, 6))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("kind", ["prose", "tasks", "repeat"])
def test_labels_are_the_next_tokens(kind: str) -> None:
    ids, labels = BATCHES.draw(0, 4, 64, {kind: 1.0})
    assert np.array_equal(ids[:, 1:], labels[:, :-1])


def test_short_documents_start_rows() -> None:
    ids, _ = BATCHES.draw(0, 8, 200, {"tasks": 1.0})
    starts = {tuple(STREAM.document(index)[:6]) for index in range(STREAM.documents)}
    assert all(tuple(row[1:7]) in starts for row in ids)
    assert all(row[0] == BATCHES.start for row in ids)


def test_noise_asks_only_for_what_was_seen_before() -> None:
    """A label in a row of random tokens repeats what followed the same token earlier."""
    ids, labels = BATCHES.draw(0, 8, 256, {"noise": 1.0})
    for row, wanted in zip(ids, labels, strict=True):
        asked = np.flatnonzero(wanted != IGNORE)
        assert 0 < len(asked) < len(row)
        assert all(wanted[at] in row[: at + 1] for at in asked)


def test_repeated_rows_hold_long_repeats() -> None:
    ids, _ = BATCHES.draw(0, 4, 400, {"repeat": 1.0})
    for row in ids.tolist():
        windows = [tuple(row[at : at + 16]) for at in range(len(row) - 16)]
        assert len(set(windows)) < len(windows)


def test_shares_are_kept_within_one_row() -> None:
    kinds = stratified(np.random.default_rng(0), ["a", "b", "c"], np.array([0.5, 0.3, 0.2]), 20)
    assert [abs(kinds.count(kind) - wanted) <= 1 for kind, wanted in (("a", 10), ("b", 6), ("c", 4))] == [True] * 3


def test_a_stream_survives_the_disk(tmp_path: Path) -> None:
    assert write_stream(tmp_path, "x", TEXTS, TOKENIZER) == len(STREAM.tokens)
    loaded = Stream.load(tmp_path, "x")
    assert TOKENIZER.decode(loaded.document(7).tolist()) == TEXTS[7]
