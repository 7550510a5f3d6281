"""Fill-in-the-middle: a completion with a suffix, for models whose tokenizer has marks for it."""

from __future__ import annotations

import time

import pytest
from tokenizers import AddedToken, Tokenizer

from parlay.aio import AsyncLLM
from parlay.llm.vocabulary import Vocabulary
from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.serve.errors import ApiError
from parlay.serve.protocol.fill_in_the_middle import Gap, infill_prompt

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MOST = 64


class Counting(PlainTokenizer):
    """Counts how often it is asked for all of its tokens: that takes long, and no other thread runs meanwhile."""

    listed = 0

    def get_vocab(self) -> dict[str, int]:
        self.listed += 1
        return super().get_vocab()


@pytest.fixture
def vocabulary(engine: AsyncLLM) -> Vocabulary:
    """The built-in model's tokenizer, with marks."""
    known = engine.llm.tokenizer
    assert known is not None
    backend = Tokenizer.from_str(known.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return Vocabulary(Counting(backend, {}), len(known) + len(MARKS), [0])


def test_the_marks_stand_around_prefix_and_suffix(vocabulary: Vocabulary) -> None:
    tokenizer = vocabulary.tokenizer
    assert isinstance(tokenizer, Counting)
    vocabulary.prepare()
    listed = tokenizer.listed
    before, between, after = (tokenizer.backend_tokenizer.token_to_id(mark) for mark in MARKS)
    prefix, suffix = (tokenizer.encode(text, add_special_tokens=False) for text in ("def f(", "return 1"))
    ids = infill_prompt(vocabulary, MOST, Gap("def f(", "return 1"))
    assert ids == [before, *prefix, between, *suffix, after]
    assert tokenizer.listed == listed


def test_a_bound_on_the_suffix_keeps_its_first_tokens(vocabulary: Vocabulary) -> None:
    """So that a keystroke reads no more of the file than helps."""
    gap = Gap("def f(", "return 1 + 2 + 3", "x")
    whole = infill_prompt(vocabulary, MOST, gap.cut("psm"))
    bounded = infill_prompt(vocabulary, MOST, gap.cut("psm", 3))
    end = whole.index(vocabulary.tokenizer.backend_tokenizer.token_to_id(MARKS[1])) + 1  # type: ignore[union-attr]
    assert bounded == [*whole[: end + 3], whole[-1]]
    assert len(bounded) < len(whole)


@pytest.mark.parametrize("field", ["prompt", "suffix"])
def test_a_text_that_is_certainly_too_long_is_refused_by_its_field(
    engine: AsyncLLM, vocabulary: Vocabulary, field: str
) -> None:
    long = "the quick brown fox " * 100_000
    with pytest.raises(ApiError) as caught:
        infill_prompt(vocabulary, MOST, Gap(*((long, "") if field == "prompt" else ("", long))))
    assert (caught.value.param, caught.value.code) == (field, "context_length_exceeded")


@pytest.mark.parametrize("end", ["", " ", "!"])
def test_a_line_without_end_is_looked_at_once(end: str) -> None:
    """A file may be one line, and a search for its last word must not go through it from each letter."""
    began = time.process_time()
    gap, word = Gap("", "", "x = " + "a" * 500_000 + end).without_word()
    assert time.process_time() - began < 1
    assert (gap.written + word, len(word)) == ("x = " + "a" * 500_000 + end, 0 if end else 64)
