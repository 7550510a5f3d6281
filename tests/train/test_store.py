"""Batches are reproducible, and labels are the next tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parlay.train.lm_data import Batches, TokenStream, make_stream, train_tokenizer, write_stream

TEXTS = [f"Document number {n} has words of its own. " * (3 + n % 5) for n in range(60)]
TOKENIZER = train_tokenizer(TEXTS, 320)
STREAM = make_stream(TEXTS, TOKENIZER)
BATCHES = Batches(STREAM, seed=3)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    """A resumed run sees the rows that an uninterrupted one would have seen."""
    first, again, other = (BATCHES.draw(step, 6, 64)[0] for step in (5, 5, 6))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_labels_are_the_next_tokens() -> None:
    ids, labels = BATCHES.draw(0, 4, 64)
    assert ids.shape == labels.shape == (4, 64)
    assert np.array_equal(ids[:, 1:], labels[:, :-1])


def test_a_stream_survives_the_disk(tmp_path: Path) -> None:
    assert write_stream(tmp_path, "x", TEXTS, TOKENIZER) == len(STREAM.tokens)
    loaded = TokenStream.load(tmp_path, "x")
    text = TOKENIZER.decode(loaded.tokens.tolist(), skip_special_tokens=False)
    assert text == "".join(f"{each}<|endoftext|>" for each in TEXTS)
