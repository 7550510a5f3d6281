"""The tokenizers that GGUF files carry cut and spell text as the models' own do, by the name in their keys."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from parlay.models.fetch.resolving import resolve
from parlay.models.gguf.reader import Strings, Value
from parlay.models.gguf.splitting import SPLITTINGS
from parlay.models.gguf.tokenizer import build, load_tokenizer

TEXT = "He's got 1234 EUROs,\n\n  HelloWorld don't/\n日本 x²"
WORDS = {
    "llama-bpe": "He|'s| got| |123|4| EUROs|,\n\n| | HelloWorld| don|'t|/\n|日本| x|²",
    "qwen2": "He|'s| got| |1|2|3|4| EUROs|,\n\n| | HelloWorld| don|'t|/\n|日本| x|²",
    "smollm": "He|'s| got| |1|2|3|4| EUROs|,|\n\n | HelloWorld| don|'t|/|\n|日本| x|²",
    "gpt-2": "He|'s| got| 1234| EUROs|,|\n\n | HelloWorld| don|'t|/|\n|日本| x|²",
    "tekken": "He|'s| got| |1|2|3|4| EUROs|,\n\n| | Hello|World| don|'t|/\n|日本| x|²",
}
"""What each family's expressions make of `TEXT`, as the models' own tokenizers do."""


@pytest.mark.parametrize("name", WORDS)
def test_text_is_cut_as_the_family_was_trained(name: str) -> None:
    pieces = SPLITTINGS[name].pre_tokenizer().pre_tokenize_str(TEXT)
    assert "|".join(TEXT[begin:end] for _, (begin, end) in pieces) == WORDS[name]


def strings(words: Sequence[str]) -> Strings:
    parts = [struct.pack("<Q", len(word.encode())) + word.encode() for word in words]
    return Strings(b"".join(parts), len(words))


def sentence_piece(**others: Value) -> dict[str, Value]:
    """A vocabulary in which "▁abc" can be made in several ways, of which the scores choose one."""
    control = ["<unk>", "<s>", "</s>", "<tool>"]
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "a", "b", "c", "ab", "▁a", "bc", "▁ab", "abc", "é"]
    tokens = [*control, *letters, *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": (2, 3, 3, 4, *[6] * 256, *[1] * len(words)),
        "tokenizer.ggml.scores": (*[0.0] * 260, *(-float(rank) for rank in (9, 9, 9, 9, 1, 2, 3, 4, 5, 6))),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **others,
    }


def test_pieces_with_scores_merge_best_first_and_unknown_text_falls_back_to_bytes() -> None:
    tokenizer = build(sentence_piece())
    assert tokenizer.encode("ab abc").tokens == ["<s>", "▁ab", "▁ab", "c"]
    assert tokenizer.encode("é日", add_special_tokens=False).tokens == ["▁", "é", "<0xE6>", "<0x97>", "<0xA5>"]
    assert tokenizer.encode("a<tool>b", add_special_tokens=False).tokens == ["▁a", "<tool>", "▁", "b"]
    for text in ("ab abc", "  two  spaces ", "日本 é\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_pairs_of_characters_merge_in_the_order_of_the_file_and_newlines_stay_together() -> None:
    tokens = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": strings([*sentence_piece()["tokenizer.ggml.tokens"].read(), "\n", "\n\n\n"]),
        "tokenizer.ggml.token_type": (*sentence_piece()["tokenizer.ggml.token_type"], 1, 1),
        "tokenizer.ggml.merges": strings(["a b", "▁ a", "b c", "▁ ab"]),
    }
    tokenizer = build(sentence_piece(**tokens))
    assert tokenizer.encode("ab abc").tokens == ["<s>", "ab", "▁ab", "c"]
    assert tokenizer.encode("a\n\n\nb\n\n日", add_special_tokens=False).tokens == [
        *("a", "\n\n\n", "b", "\n", "\n", "<0xE6>", "<0x97>", "<0xA5>"),
    ]
    assert tokenizer.decode(tokenizer.encode(" a 日\n\n\n b").ids) == " a 日\n\n\n b"


def test_the_file_says_what_stands_around_a_text() -> None:
    plain = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False}
    tokenizer = build(sentence_piece(**plain))
    assert tokenizer.encode("ab").tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode("ab").ids) == "ab"
    closed = build(sentence_piece(**{"tokenizer.ggml.add_eos_token": True}))
    assert closed.encode("ab").tokens == ["<s>", "▁ab", "</s>"]


def byte_level(name: str, **others: Value) -> dict[str, Value]:
    tokens = ["<|end|>", "<think>", "h", "e", "l", "o", "Ġ", "he", "ll", "hell", "hello"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": strings(tokens),
        "tokenizer.ggml.token_type": (3, 4, *[1] * 9),
        "tokenizer.ggml.merges": strings(["h e", "l l", "he ll"]),
        "tokenizer.ggml.bos_token_id": 0,
        **others,
    }


def test_whole_words_bos_and_marked_tokens_follow_the_family() -> None:
    """Llama 3 takes a word that is a token without merging, and begins with bos unless the file says otherwise."""
    text = "hello<think><|end|> he"
    marked = ["<think>", "<|end|>", "Ġ", "he"]
    assert build(byte_level("llama-bpe")).encode(text).tokens == ["<|end|>", "hello", *marked]
    assert build(byte_level("qwen2")).encode(text).tokens == ["hell", "o", *marked]
    without = build(byte_level("llama-bpe", **{"tokenizer.ggml.add_bos_token": False}))
    assert without.encode(text).tokens == ["hello", *marked]
    tokenizer = build(byte_level("smollm"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == "hello<think> he"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_cache_folder_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder takes the file's name, and then none of its bytes."""
    full = tmp_path / "full"
    full.symlink_to("/dev/full")

    @contextmanager
    def written(path: Path, mode: int = 0o644) -> Iterator[Path]:
        yield full

    monkeypatch.setattr("parlay.models.gguf.tokenizer.written_whole", written)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = load_tokenizer(resolve("smollm2-135m-draft"))
    assert found.encode("a river")
