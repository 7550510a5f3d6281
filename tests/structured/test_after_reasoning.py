"""The form of an answer begins where the reasoning before it ends."""

from __future__ import annotations

import pytest
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from parlay.structured.after_reasoning import AfterReasoning
from parlay.structured.grammars import Grammars
from parlay.testing.toy_tokenizers import byte_level
from parlay.text.reasoning import THINK as TAGS
from parlay.text.reasoning import Marks, expected_thoughts, marks
from parlay.types import StructuredOutputsParams

STOP = 4
THINK, DONE = 100, 101
FORM = StructuredOutputsParams(regex="(ab|cd)")


def made(grammars: Grammars, *, begun: bool) -> AfterReasoning:
    constraint = grammars.compile(FORM).constraint({STOP})
    return AfterReasoning(constraint, Marks(None if begun else THINK, DONE))


def ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def options(mask_V: Tensor | None) -> set[int]:
    assert mask_V is not None
    return set(mask_V.nonzero()[:, 0].tolist())


def test_reasoning_is_free_and_does_not_end_the_text(grammars: Grammars, tokenizer: PreTrainedTokenizerBase) -> None:
    at = made(grammars, begun=True)
    free = options(at.allowed(0, ()))
    assert STOP not in free
    assert {7, 300, THINK, DONE} <= free
    assert at.allowed(0, (7, STOP)) is None
    assert at.forced(8) == ()
    assert at.legal([7, 9, STOP, 9]) == 2


def test_the_form_begins_after_the_mark_committed_or_drafted(
    grammars: Grammars, tokenizer: PreTrainedTokenizerBase
) -> None:
    at = made(grammars, begun=True)
    alone = grammars.compile(FORM).constraint({STOP})
    a, z = ids(tokenizer, "a")[0], ids(tokenizer, "z")[0]
    start = options(alone.allowed(0, ()))
    assert options(at.allowed(0, (7, DONE))) == start
    assert at.legal([7, DONE, a, z]) == 3
    assert not at.commit(7)
    assert options(at.allowed(1, (DONE,))) == start
    assert options(at.allowed(0, ())) >= {z}
    assert not at.commit(DONE)
    assert options(at.allowed(2, ())) == start
    assert options(at.allowed(1, (DONE, a))) == options(alone.allowed(0, (a,)))
    assert [at.commit(token) for token in ids(tokenizer, "ab")][-1]
    assert at.committed == 2 + len(ids(tokenizer, "ab"))


def test_the_first_token_decides_where_the_prompt_does_not(
    grammars: Grammars, tokenizer: PreTrainedTokenizerBase
) -> None:
    at = made(grammars, begun=False)
    start = options(grammars.compile(FORM).constraint({STOP}).allowed(0, ()))
    assert options(at.allowed(0, ())) == start | {THINK}
    assert at.legal([THINK, 7, 8, DONE, ids(tokenizer, "z")[0]]) == 4
    assert 7 in options(at.allowed(0, (THINK,)))
    answered, thought = made(grammars, begun=False), made(grammars, begun=False)
    for token in ids(tokenizer, "ab"):
        answered.commit(token)
    assert THINK not in options(made(grammars, begun=False).allowed(0, ids(tokenizer, "a")))
    for token in (THINK, 7, 300, DONE):
        assert not thought.commit(token)
    assert options(thought.allowed(4, ())) == start


@pytest.fixture(scope="module")
def thinker() -> PreTrainedTokenizerBase:
    """A tokenizer that has the marks of reasoning."""
    return byte_level(["say"], 300, (TAGS.begin, TAGS.end))


def test_marks_are_tokens_or_there_is_nothing_to_wait_for(
    thinker: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase
) -> None:
    begin, end = thinker.convert_tokens_to_ids([TAGS.begin, TAGS.end])
    assert marks(thinker, "maybe") == Marks(begin, end)
    assert marks(thinker, "begun") == Marks(None, end)
    assert marks(thinker, "none") is None
    assert marks(tokenizer, "maybe") is None
    thinker.chat_template = "{{ messages }}</think>"
    asked = thinker.encode("say <think>\n", add_special_tokens=False)
    assert expected_thoughts(thinker, asked) == "begun"
    assert expected_thoughts(thinker, thinker.encode("say", add_special_tokens=False)) == "maybe"
    assert expected_thoughts(tokenizer, asked) == "none"
