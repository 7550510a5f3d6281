"""Texts end at every token that a model calls an end, and at control tokens whose text is a known end."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, models

from parlay import LLM, SamplingParams
from parlay.llm.vocabulary import Vocabulary
from parlay.models.tokenizers.plain import PlainTokenizer
from parlay.options import LoadOptions
from parlay.text.end_tokens import end_tokens, read_end_tokens
from parlay.types import ParlayError

WORDS = ("a", "b", "<|im_end|>", "<EOT>")


def tokenizer(*added: str, special: bool = True, eos: str | None = None) -> PlainTokenizer:
    """A vocabulary of `WORDS`, which are plain text, with ``added`` behind them."""
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="a"))
    backend.add_tokens([AddedToken(text, special=special) for text in added])
    return PlainTokenizer(backend, {} if eos is None else {"eos_token": eos})


@pytest.mark.parametrize("special", [True, False])
def test_the_tokens_of_fill_in_the_middle_end_a_text_although_no_metadata_names_them(special: bool) -> None:
    read = tokenizer("<|endoftext|>", "<|fim_pad|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", special=special)
    assert end_tokens(read, [1], 100) == (1, 4, 5, 7, 8)


def test_words_of_plain_text_end_nothing_whatever_their_text() -> None:
    assert end_tokens(tokenizer(), [], 100) == ()


def test_the_end_that_the_tokenizer_names_counts() -> None:
    assert end_tokens(tokenizer("stop here", eos="stop here"), [], 100) == (4,)


def test_no_end_is_outside_the_models_vocabulary() -> None:
    assert end_tokens(tokenizer("<|endoftext|>"), [], 4) == ()
    assert end_tokens(tokenizer("<|endoftext|>"), [-1, 1, 99], 5) == (1, 4)
    assert end_tokens(None, [-1, 1, 99], 5) == (1,)


def test_an_end_of_a_part_of_the_answer_ends_no_text() -> None:
    assert end_tokens(tokenizer("<|end|>", "<|return|>", "<|call|>"), [], 100) == (5, 6)
    assert end_tokens(tokenizer("<|end|>"), [], 100) == (4,)


def test_a_user_can_name_the_ends_instead_by_id_or_text() -> None:
    assert read_end_tokens("1, <|endoftext|>,1", tokenizer("<|endoftext|>"), 100) == (1, 4)
    with pytest.raises(ParlayError, match="'two words' is not a token of this model"):
        read_end_tokens("two words", tokenizer(), 100)
    with pytest.raises(ParlayError, match="'99' is not a token"):
        read_end_tokens("99", tokenizer(), 4)


def test_a_vocabulary_that_was_read_is_used_for_the_same_ends_only() -> None:
    read = Vocabulary(tokenizer("<|endoftext|>"), 5, [1])
    assert read.end_ids == (1, 4)
    assert read.fits(5, [1])
    assert not read.fits(5, [1], "<|endoftext|>")


def test_completions_end_where_the_user_says() -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM("parlay-mini") as llm:
        ids = llm.generate("The tide", params)[0].outputs[0].token_ids
    with LLM("parlay-mini", load=LoadOptions(end_tokens=f"{ids[5]}")) as llm:
        sample = llm.generate("The tide", params)[0].outputs[0]
    assert sample.token_ids == ids[: ids.index(ids[5]) + 1]
    assert sample.finish_reason == "stop"


def test_an_end_is_no_text_though_the_tokenizer_calls_it_not_special() -> None:
    read = tokenizer("<|eot_id|>", special=False)
    (end,) = end_tokens(read, [], 100)
    with LLM("parlay-mini", tokenizer=read) as llm:
        for skips, text in ((True, ""), (False, " <|eot_id|>")):
            params = SamplingParams(max_tokens=3, allowed_token_ids=[end], skip_special_tokens=skips)
            (sample,) = llm.generate("a", params)[0].outputs
            assert (sample.text, sample.token_ids, sample.finish_reason) == (text, (end,), "stop")
