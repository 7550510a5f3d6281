"""Text at the edge: pieces add up to the decoded text, and no part of a stop string is ever given out."""

from __future__ import annotations

import pytest

from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.testing.toy_tokenizers import sentence_pieces
from parlay.text.detokenizer import TextStream
from parlay.types import SamplingParams

TOKENIZER = load_tokenizer(resolve("parlay-mini"))
TEXT = "Straße, naïve café 日本 🙂 and back again.\n    def f(x):\n        return x"


def feed(stream: TextStream, text: str) -> str:
    """Push the text's tokens as an engine would, and return what was released on the way."""
    released = ""
    for token in TOKENIZER.encode(text):
        stopped = stream.push(token)
        released += "".join(piece for _, piece in stream.release(final=False))
        if stopped:
            break
    return released + "".join(piece for _, piece in stream.release(final=True))


def test_pieces_add_up_to_the_text_across_multi_byte_characters() -> None:
    stream = TextStream(TOKENIZER, SamplingParams())
    assert feed(stream, TEXT) == stream.text == TEXT


@pytest.mark.parametrize("stop", ["café", " and b", "\n    def", "x"])
def test_a_stop_string_ends_the_text_and_no_part_of_it_is_released(stop: str) -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=stop))
    assert feed(stream, TEXT) == stream.text == TEXT.split(stop, maxsplit=1)[0]
    assert stream.stop_reason == stop


def test_the_earliest_of_several_stop_strings_wins() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop=["again", "café", "back"]))
    assert feed(stream, TEXT) == TEXT.split("café", maxsplit=1)[0]


def test_a_stop_string_can_be_kept() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop="café", include_stop_str_in_output=True))
    assert feed(stream, TEXT) == TEXT.split("café", maxsplit=1)[0] + "café"


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    stream = TextStream(TOKENIZER, SamplingParams(stop="a", min_tokens=10_000, max_tokens=10_000))
    assert feed(stream, TEXT) == TEXT


def test_special_tokens_are_left_out_unless_wanted() -> None:
    end = TOKENIZER.get_vocab()["<|end|>"]
    for skip, expected in ((True, ""), (False, "<|end|>")):
        stream = TextStream(TOKENIZER, SamplingParams(skip_special_tokens=skip))
        stream.push(end)
        assert stream.text == expected


BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTES = [
    ([*"🙂".encode(), 0xF0, 0x9F, "▁a", "▁b"], f"🙂{BROKEN * 2} a b"),
    ([0x41, 0xC3, "▁a"], f"A{BROKEN} a"),
    (["▁a", *"é".encode(), 0xFF, *"é".encode(), "▁b", *"ü".encode()], f"aé{BROKEN * 3} bü"),
    ([0xC3, *"ü".encode()], ""),
]


@pytest.mark.parametrize(("pieces", "text"), BYTES)
def test_bytes_that_are_no_character_do_not_end_a_text(pieces: list[int | str], text: str) -> None:
    """Bytes that follow each other are decoded together, and a broken one breaks those that were given out."""
    tokenizer = sentence_pieces(["▁a", "▁b"])
    stream, released = TextStream(tokenizer, SamplingParams()), ""
    for piece in pieces:
        written = piece if isinstance(piece, str) else f"<0x{piece:02X}>"
        stream.push(tokenizer.convert_tokens_to_ids(written))
        released += "".join(part for _, part in stream.release(final=False))
    released += "".join(part for _, part in stream.release(final=True))
    assert released == stream.text == text
