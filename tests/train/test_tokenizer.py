"""The tokenizer gives back every text, and keeps digits and special tokens apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from parlay.train.chat import SPECIAL_TOKENS
from parlay.train.tokenizer import train_tokenizer, wrap_tokenizer

TOKENIZER = wrap_tokenizer(
    train_tokenizer(["def f(x):\n    return x + 1234\n", "The house is big. " * 5] * 9, 400), 128
)


@given(st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text


def test_a_text_begins_with_the_end_of_another() -> None:
    """As in training: the copying heads rest on that token. What is no whole text, an answer say, has none."""
    start = TOKENIZER.bos_token_id
    assert TOKENIZER.encode("The house")[0] == start
    assert start not in TOKENIZER.encode("The house", add_special_tokens=False)
    chat = TOKENIZER.apply_chat_template([{"role": "user", "content": "The house"}], return_dict=False)
    assert chat.count(start) == 1
    assert chat[0] == start


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_tokens_are_single_ids(token: str) -> None:
    assert TOKENIZER.encode(token, add_special_tokens=False) == [SPECIAL_TOKENS.index(token)]


def test_digits_stand_alone() -> None:
    """A number is the same tokens after a space, a quote or a bracket."""
    assert isinstance(TOKENIZER, PreTrainedTokenizerFast)
    digits = TOKENIZER.encode("1234", add_special_tokens=False)
    assert len(digits) == 4
    for context in (" 1234", '"1234"', "(1234)"):
        assert [token for token in TOKENIZER.encode(context) if token in digits] == digits
