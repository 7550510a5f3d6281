"""Datastores: what is searched for is found, in memory and from a file, and a file that is not whole is refused."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.stores.datastore_file import BadDatastore, Datastore, DatastoreHeader, fingerprint, vocabulary
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.types import Tokenizer

letters = st.lists(st.integers(0, 2), max_size=12)


def store_of(documents: Sequence[Sequence[int]], vocab_size: int = 3) -> Datastore:
    return Datastore.build([np.array(document) for document in documents], vocab_size)


def occurrences(documents: Sequence[Sequence[int]], query: Sequence[int]) -> list[list[int]]:
    """What follows the query, up to the end of the document, wherever something does; sorted as a datastore sorts."""
    size = len(query)
    return sorted(
        ([*document[place + size :], 10**6] for document in documents for place in range(len(document) - size)
         if list(document[place : place + size]) == list(query)),
    )  # fmt: skip


@given(documents=st.lists(letters, min_size=1, max_size=4).filter(any), query=letters.filter(bool))
def test_matches_are_those_of_a_naive_search_and_none_runs_over_a_border(
    documents: list[list[int]], query: list[int]
) -> None:
    store = store_of(documents)
    start, end = store.find(query)
    expected = occurrences(documents, query)
    assert end - start == len(expected)
    for place, after in zip(store.suffixes[start:end].tolist(), expected, strict=True):
        rest = store.tokens[place + len(query) :].tolist()
        assert rest[: len(after) - 1] == after[:-1]
        assert rest[len(after) - 1] == 3, "a border"


@given(
    documents=st.lists(letters, min_size=1, max_size=4).filter(any),
    context=letters,
    shortest=st.integers(1, 4),
)
def test_the_longest_end_that_occurs_is_found(documents: list[list[int]], context: list[int], shortest: int) -> None:
    store = store_of(documents)
    sizes = [size for size in range(shortest, len(context) + 1) if occurrences(documents, context[-size:])]
    length, start, end = store.longest(context, shortest)
    assert length == max(sizes, default=0)
    assert (start, end) == (store.find(context[-length:]) if length else (0, 0))


@pytest.mark.parametrize("vocab_size", [65_535, 65_536, 152_064])
def test_every_id_of_any_vocabulary_survives_the_file(tmp_path: Path, vocab_size: int) -> None:
    """The reference keeps 16 bits of each id: those beyond 65,535 came back as others."""
    top = vocab_size - 1
    ids = [top, top - 65_536 if top > 65_536 else 1, 7, top, 0, 7]
    store_of([ids], vocab_size).write(tmp_path / "store")
    store = Datastore.open(tmp_path / "store")
    assert store.tokens.tolist() == [*ids, vocab_size]
    assert store.tokens.itemsize == (2 if vocab_size <= 65_535 else 4)
    start, end = store.find([top])
    assert [store.tokens[place + 1] for place in store.suffixes[start:end]] == [0, ids[1]]


@given(documents=st.lists(letters, min_size=1, max_size=4).filter(any))
def test_a_file_holds_what_was_written(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("datastore") / "store"
    built = Datastore.build([np.array(ids) for ids in documents], 3, tokenizer="ä", fingerprint="f")
    built.write(path)
    opened = Datastore.open(path)
    assert opened.header == built.header
    assert opened.header.documents == sum(map(bool, documents))
    assert opened.tokens.tolist() == built.tokens.tolist()
    assert opened.suffixes.tolist() == built.suffixes.tolist()
    assert not opened.tokens.flags.writeable


# --------------------------------------------------------------------------------------------------------- bad files


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "store"
    store_of([[0, 1, 2, 1, 2, 0] * 20, [1, 1, 2]]).write(path)
    return path.read_bytes()


def refused(folder: Path, content: bytes) -> str:
    """The one line with which a file of that content is refused."""
    path = folder / "store"
    path.write_bytes(content)
    with pytest.raises(BadDatastore) as failure:
        Datastore.open(path)
    assert "\n" not in str(failure.value)
    assert str(path) in str(failure.value)
    return str(failure.value)


@given(data=st.data())
def test_any_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    content = bytearray(whole)
    for place in data.draw(st.sets(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        content[place] ^= data.draw(st.integers(1, 255))
    refused(tmp_path_factory.mktemp("damaged"), bytes(content))


@given(size=st.integers(0, 10_000))
def test_a_file_cut_short_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, size: int
) -> None:
    refused(tmp_path_factory.mktemp("cut"), whole[: size % len(whole)])


def test_bytes_added_to_the_end_are_noticed(tmp_path: Path, whole: bytes) -> None:
    refused(tmp_path, whole + b"\0")


def test_each_refusal_says_what_to_do(tmp_path: Path, whole: bytes) -> None:
    assert "parlay datastore build" in refused(tmp_path, b"once upon a time" * 10)
    assert "parlay datastore build" in refused(tmp_path, b"")
    assert "version 2" in refused(tmp_path, whole[:8] + struct.pack("<I", 2) + whole[12:])
    assert "cut short" in refused(tmp_path, whole[:-8])
    assert "checksum" in refused(tmp_path, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BadDatastore, match=r"can't read the datastore .*nowhere: No such file"):
        Datastore.open(tmp_path / "nowhere")
    with pytest.raises(BadDatastore, match="Is a directory"):
        Datastore.open(tmp_path)


@pytest.mark.parametrize(
    ("place", "number"),
    [("token", 3), ("token", 0xFFFF), ("end", 1), ("border", 1), ("suffix", 10**6), ("suffix", 2**32 - 1)],
)
def test_texts_and_places_that_lie_under_a_right_checksum_are_refused(
    tmp_path: Path, whole: bytes, place: str, number: int
) -> None:
    """A token or a border too many, a text without its end, a suffix outside the texts."""
    size = struct.unpack_from("<Q", whole, 16)[0]
    header = DatastoreHeader(**json.loads(whole[32 : 32 + size]))
    tokens_at, suffixes_at, _ = header.offsets(size)
    tokens = np.frombuffer(whole, header.token_type, header.tokens, tokens_at)
    at = {"token": 5, "end": header.tokens - 1, "border": int((tokens == header.vocab_size).argmax())}.get(place, 0)
    changed = bytearray(whole)
    if place == "suffix":
        struct.pack_into("<I", changed, suffixes_at + 4 * 7, number)
    else:
        struct.pack_into("<H", changed, tokens_at + 2 * at, number)
    struct.pack_into("<I", changed, 12, zlib.crc32(changed[16:]))
    assert "contains invalid texts or places" in refused(tmp_path, bytes(changed))


def test_a_header_of_endless_lists_is_refused(tmp_path: Path, whole: bytes) -> None:
    header = b"[" * 100_000
    rest = struct.pack("<QQ", len(header), 32 + len(header)) + header
    assert "header" in refused(tmp_path, whole[:12] + struct.pack("<I", zlib.crc32(rest)) + rest)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 10**9},
        {"tokens": -1},
        {"documents": 0},
        {"documents": 10**6},
        {"vocab_size": 2**40},
        {"vocab_size": 70_000},
        {"tokens": "many"},
        {"tokens": True},
        {"extra": 1},
    ],
)
def test_a_header_that_lies_under_a_right_checksum_is_refused(
    tmp_path: Path, whole: bytes, change: dict[str, object]
) -> None:
    """Nothing is read by its numbers before they fit the size of the file."""
    size = struct.unpack_from("<Q", whole, 16)[0]
    header = json.dumps({**json.loads(whole[32 : 32 + size]), **change}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    rest = struct.pack("<QQ", len(header), len(whole) - size + len(header)) + header + whole[32 + size :]
    assert "header" in refused(tmp_path, whole[:12] + struct.pack("<I", zlib.crc32(rest)) + rest)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    store_of([[0, 1]]).write(path)
    before = path.read_bytes()

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store_of([[2, 2]]).write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["store"]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("documents", "words"), [([], "no text"), ([[]], "no text"), ([[3]], "outside"), ([[-1]], "outside")]
)
def test_a_corpus_that_makes_no_datastore_is_refused(documents: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        store_of(documents)


# --------------------------------------------------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("parlay-mini"))


def test_a_fingerprint_is_that_of_what_ids_mean(tokenizer: Tokenizer) -> None:
    other = load_tokenizer(resolve("parlay-mini"))
    assert fingerprint(other) == fingerprint(tokenizer)
    assert vocabulary(tokenizer) == 4096
    other.backend_tokenizer.add_tokens(["<new>"])
    assert fingerprint(other) != fingerprint(tokenizer)
    assert vocabulary(other) == 4097
