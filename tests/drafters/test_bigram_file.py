"""A corpus's bigrams: counted exactly, kept in a file that is refused when it is not what it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from parlay.drafters.counting import bigram_file
from parlay.drafters.counting.bigram_file import WIDEST
from parlay.options import UsageError

VOCAB = 4
TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2]


@given(texts=st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), max_size=3))
def test_it_counts_what_follows_each_pair_within_a_text(texts: list[list[int]]) -> None:
    bigrams = bigram_file.build(texts, VOCAB)
    for first in range(VOCAB):
        for second in range(VOCAB):
            expected = Counter(
                text[at] for text in texts for at in range(2, len(text)) if text[at - 2 : at] == [first, second]
            )
            total, followers = bigrams.followers(first, second)
            assert (total, followers) == (expected.total(), expected)
            assert list(followers.values()) == sorted(followers.values(), reverse=True)


def test_of_a_pair_with_many_followers_the_most_frequent_are_kept_and_all_are_counted() -> None:
    texts = [[0, 0, token] for token in range(1, 100)] + [[0, 0, 77]]
    total, followers = bigram_file.build(texts, 100).followers(0, 0)
    assert total == 100
    assert len(followers) == WIDEST
    assert next(iter(followers.items())) == (77, 2)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bigrams"
    bigram_file.write(path, bigram_file.build([TEXT], VOCAB))
    assert bigram_file.read(path, VOCAB).followers(0, 1) == (3, {2: 2, 3: 1})
    bigram_file.write(path, bigram_file.build([], VOCAB))
    assert bigram_file.read(path, VOCAB).followers(0, 1) == (0, {})


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        bigram_file.build([[0, 1, 4]], VOCAB)


Arrays = dict[str, npt.NDArray[np.unsignedinteger]]


def rewritten(path: Path, change: Callable[[dict[str, str], Arrays], None], mend: bool = True) -> None:
    """The file as somebody would make it who changes a part, and mends the checksum."""
    with safe_open(path, "numpy") as file:
        metadata, arrays = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(metadata, arrays)
    if mend:
        metadata["checksum"] = bigram_file._checksum(arrays)
    save_file(arrays, path, metadata)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "bigrams"
    bigram_file.write(file, bigram_file.build([TEXT], VOCAB))
    return file


def refused(path: Path, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as error:
        bigram_file.read(path, VOCAB)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("blob", [b"", b"\x00\xff", b"[1]\n", bytes(1000)])
def test_what_is_no_such_file_is_refused(path: Path, blob: bytes) -> None:
    path.write_bytes(blob)
    refused(path, "damaged, or no bigram file")


def test_a_file_that_lost_its_end_or_changed_a_byte_is_refused(path: Path) -> None:
    blob = path.read_bytes()
    path.write_bytes(blob[:-1])
    refused(path, "damaged, or no bigram file")
    path.write_bytes(blob[:-1] + b"\x07")
    refused(path, "its checksum is wrong")


def test_a_file_of_another_format_or_for_another_vocabulary_is_refused(path: Path) -> None:
    rewritten(path, lambda metadata, _: metadata.update(vocab_size="5"))
    refused(path, "vocabulary of 5 tokens, the target has 4")
    rewritten(path, lambda metadata, _: metadata.update(format="parlay-bigrams-9"))
    refused(path, "not a file of format parlay-bigrams-1")


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays["followers"].__setitem__(0, VOCAB),
        lambda arrays: arrays["starts"].__setitem__(0, 1),
        lambda arrays: arrays["starts"].__setitem__(2, 9),
        lambda arrays: arrays["starts"].__setitem__(-1, 9),
        lambda arrays: arrays.update(totals=arrays["totals"][:-1]),
        lambda arrays: arrays.update(counts=arrays["counts"].astype(np.int64)),
        lambda arrays: arrays.update(pairs=arrays["pairs"][:, None]),
        lambda arrays: arrays.update({name: arrays[name][:0] for name in arrays}),
        lambda arrays: arrays.pop("counts"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(path: Path, change: Callable[[Arrays], object]) -> None:
    rewritten(path, lambda _, arrays: [change(arrays)].clear())
    refused(path, "its parts do not fit together")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere: No such file"):
        bigram_file.read(tmp_path / "nowhere", VOCAB)
