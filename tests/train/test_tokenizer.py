"""The tokenizer gives back every text, and keeps digits and special tokens apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from parlay.train.lm_data import END_OF_TEXT, train_tokenizer, wrap_tokenizer

TOKENIZER = wrap_tokenizer(
    train_tokenizer(["def f(x):\n    return x + 1234\n", "The house is big. " * 5] * 9, 400), 128
)


@given(st.text(max_size=60).filter(lambda text: "<|" not in text))
def test_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text


def test_a_text_begins_with_the_end_of_another() -> None:
    """As in training. What is no whole text, an answer say, has no such beginning."""
    start = TOKENIZER.bos_token_id
    assert TOKENIZER.encode("The house")[0] == start
    assert start not in TOKENIZER.encode("The house", add_special_tokens=False)


def test_the_end_of_text_is_one_token() -> None:
    assert TOKENIZER.encode(END_OF_TEXT, add_special_tokens=False) == [0]


def test_digits_stand_alone() -> None:
    """A number is the same tokens after a space, a quote or a bracket."""
    assert isinstance(TOKENIZER, PreTrainedTokenizerFast)
    digits = TOKENIZER.encode("1234", add_special_tokens=False)
    assert len(digits) == 4
    for context in (" 1234", '"1234"', "(1234)"):
        assert [token for token in TOKENIZER.encode(context) if token in digits] == digits
