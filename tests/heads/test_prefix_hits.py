"""A head that did not see all of a text: neither what was cached nor what was written in a pause is computed again, and
still all tokens have rows in its cache."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from parlay.drafters.heads.eagle3 import Eagle3
from parlay.drafters.heads.text_rows import HeadSequence, HeadSequences
from parlay.engine.target_layers import TargetLayers
from parlay.heads import artefact
from parlay.heads.artefact import HeadArtefact
from parlay.llm import LLM
from parlay.router.policies import Fixed
from parlay.testing.checkpoints import VOCAB_SIZE
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.text.prompts import TokensPrompt
from parlay.types import Budgets, Draft, SamplingParams, SequenceView

_SHARED = [place * 7 % VOCAB_SIZE for place in range(50)]
_CHUNK = 32


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many tokens the target computes states again, each time."""
    asked: list[int] = []
    states = TargetLayers.states

    def counted(
        self: TargetLayers, views: Sequence[SequenceView], spans: Sequence[tuple[int, int]], taps: Sequence[int]
    ) -> list[Mapping[int, Tensor]]:
        found = states(self, views, spans, taps)
        asked.extend(len(next(iter(each.values()))) for each in found if each)
        return found

    monkeypatch.setattr(TargetLayers, "states", counted)
    return asked


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes of each draft of a strategy with k=2."""
    drafts: list[int] = []
    propose = Eagle3.propose

    def counted(self: Eagle3, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        found = propose(self, views, budgets)
        if max(budgets) == 2:  # not as where a head is proved
            drafts.extend(map(len, found))
        return found

    monkeypatch.setattr(Eagle3, "propose", counted)
    return drafts


@pytest.fixture
def strategy(head: HeadArtefact, tmp_path: Path) -> str:
    """Drafts two nodes with the head in every step that its policy allows."""
    artefact.save(tmp_path, head, "")
    return f"eagle3:head={tmp_path},policy=fixed,k=2,min_p=0.0"


def test_what_was_cached_of_a_prompt_is_not_computed_again(
    model: Path, head: HeadArtefact, tmp_path: Path, asked: list[int]
) -> None:
    """The second prompt begins as the first does, and is fed in chunks: those before the last draft nothing."""
    artefact.save(tmp_path, head, "")
    strategy = f"eagle3:head={tmp_path},policy=fixed,k=4"
    prompts = [_SHARED, [*_SHARED, *((place * 5 + 1) % VOCAB_SIZE for place in range(90))]]
    with LLM(
        str(model),
        tokenizer=toy_tokenizer(VOCAB_SIZE),
        dtype="float32",
        device="cpu",
        max_num_batched_tokens=_CHUNK,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        answers = [
            llm.generate([TokensPrompt(prompt_token_ids=ids)], params, strategy=strategy)[0].outputs[0]
            for ids in prompts
        ]
        plain = llm.generate([TokensPrompt(prompt_token_ids=prompts[1])], params, strategy="none")[0].outputs[0]
    assert answers[1].token_ids == plain.token_ids
    assert answers[1].metrics is not None
    assert answers[1].metrics.draft_tokens > 0
    assert not asked


@pytest.mark.parametrize("first", ["none", "eagle3"])
def test_each_turn_of_a_conversation_finds_the_rows_of_the_turn_before(
    first: str, *, model: Path, strategy: str, monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    """Only the user's three tokens and the answer's last few run again, whichever strategy cached the prompt."""
    found: dict[int, int] = {}  # by sequence: its rows at first
    reserve = HeadSequences.reserve

    def seen(self: HeadSequences, state: HeadSequence, view: SequenceView, tokens: int, busy: set[int]) -> bool:
        found.setdefault(view.sequence, state.ran)
        return reserve(self, state, view, tokens, busy)

    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        params, text, lengths = SamplingParams(temperature=0, max_tokens=20), list(_SHARED), []
        llm.generate([TokensPrompt(prompt_token_ids=text)], params, strategy="none" if first == "none" else strategy)
        llm.generate([TokensPrompt(prompt_token_ids=text)], params, strategy=strategy)
        monkeypatch.setattr(HeadSequences, "reserve", seen)
        for turn in range(3):
            output = llm.generate([TokensPrompt(prompt_token_ids=text)], params, strategy=strategy)[0].outputs[0]
            lengths.append(len(text))
            text += [*output.token_ids, 3 + turn, 5, 7]
    assert max(length - rows for length, rows in zip(lengths, found.values(), strict=True)) <= 8
    assert not asked


def test_a_head_that_lacks_two_stretches_drafts_at_once(
    model: Path, strategy: str, monkeypatch: pytest.MonkeyPatch, asked: list[int], drafts: list[int]
) -> None:
    """It has not seen the prefix that was cached, nor steps in which its policy was inactive."""
    plan, steps = Fixed.plan, itertools.count()

    def late(self: Fixed, views: Sequence[SequenceView]) -> Budgets:
        found = plan(self, views)
        return found if next(steps) % 8 == 5 else Budgets([0] * len(views))

    monkeypatch.setattr(Fixed, "plan", late)
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        llm.generate([TokensPrompt(prompt_token_ids=_SHARED)], params, strategy="none")
        llm.generate([TokensPrompt(prompt_token_ids=[*_SHARED, 3, 5, 7])], params, strategy=strategy)
    assert drafts == [2]
    assert asked == [1]


def drafts_seldom(monkeypatch: pytest.MonkeyPatch, every: int, sees: bool) -> None:
    """Let the policy draft in the last of so many steps, and show the head the one before only if it ``sees`` it."""
    plan, steps = Fixed.plan, itertools.count()

    def seldom(self: Fixed, views: Sequence[SequenceView]) -> Budgets:
        step = next(steps) % every
        watching = [(0,)] * len(views) if sees and step == every - 2 else ()
        return plan(self, views) if step == every - 1 else Budgets([0] * len(views), watching=watching)

    monkeypatch.setattr(Fixed, "plan", seldom)


def check_text(model: Path, strategy: str, tokens: int) -> None:
    """Decode with the strategy, and plainly: the text is the same."""
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        prompt = [TokensPrompt(prompt_token_ids=_SHARED)]
        drafted = llm.generate(prompt, params, strategy=strategy)[0].outputs[0]
        plain = llm.generate(prompt, params, strategy="none")[0].outputs[0]
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("sees", [False, True])
def test_what_was_written_in_a_pause_is_not_computed_again(
    sees: bool, *, model: Path, strategy: str, monkeypatch: pytest.MonkeyPatch, asked: list[int], drafts: list[int]
) -> None:
    """It drafts in every eighth step. If it does not see the step before that, one state is computed, never more."""
    drafts_seldom(monkeypatch, 8, sees)
    check_text(model, strategy, 40)
    assert len(drafts) > 3
    assert set(drafts) == {2}
    assert asked == ([] if sees else [1] * len(drafts))
