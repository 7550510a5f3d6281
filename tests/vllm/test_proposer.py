"""The proposer against vLLM's interface, played by a batch that verifies drafts as vLLM does."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from parlay.cost.measured import MeasuredCost
from parlay.drafters.resources import Resources
from parlay.drafters.token_text import open_text
from parlay.options import UsageError
from parlay.router.policies import Fixed
from parlay.sampling.rules.shared_noise import SharedNoise
from parlay.testing.toy_drafters import ToyDrafter
from parlay.types import (
    NO_DRAFT,
    Budgets,
    Draft,
    Needs,
    Observation,
    SamplingParams,
    SequenceView,
    Strategy,
    trees,
)
from parlay.vllm import Proposer
from parlay.vllm.drafting import ChainDrafting
from parlay.vllm.rows import Rows

VOCAB, LONGEST, MOST = 50, 256, 8


@dataclass
class Model:
    max_model_len: int = LONGEST
    tokenizer: str | None = None

    def get_vocab_size(self) -> int:
        return VOCAB


@dataclass
class Speculative:
    num_speculative_tokens: int = MOST


@dataclass
class Scheduler:
    max_num_seqs: int = 8


@dataclass
class Config:
    """What the proposer reads of `VllmConfig`."""

    additional_config: object = field(default_factory=dict)
    model_config: Model = field(default_factory=Model)
    speculative_config: Speculative = field(default_factory=Speculative)
    scheduler_config: Scheduler = field(default_factory=Scheduler)


def proposer(strategy: str = "prompt-lookup", **options: object) -> Proposer:
    ticks = iter(range(1_000_000))
    return Proposer(Config({"parlay": {"strategy": strategy, **options}}), lambda: next(ticks) / 100)


def periodic(tokens: Sequence[int]) -> int:
    """A target whose texts go round: what followed three tokens ago follows again."""
    return tokens[-3] if len(tokens) >= 3 else 1


@dataclass(eq=False)
class Running:
    tokens: list[int]
    draft: list[int] = field(default_factory=list)


class Batch:
    """vLLM's persistent batch: rows of ids, of which some are removed, moved, and read anew."""

    def __init__(self, proposer: Proposer, target: Callable[[Sequence[int]], int] = periodic) -> None:
        self.proposer, self.target = proposer, target
        self.rows: list[Running] = []
        self.steps = 0

    def add(self, prompt: Sequence[int]) -> Running:
        self.rows.append(Running(list(prompt)))
        return self.rows[-1]

    def step(self, reading: Sequence[Running] = ()) -> list[list[int]]:
        """Verify all drafts and ask for new ones. Rows in ``reading`` still read their prompts."""
        sampled: list[list[int]] = []
        for row in self.rows:
            new: list[int] = []
            if row not in reading:
                for guess in [*row.draft, None]:
                    new.append(self.target([*row.tokens, *new]))
                    if new[-1] != guess:
                        break
            row.tokens += new
            sampled.append(new)
        ids = np.full((len(self.rows) + 1, LONGEST), -7, np.int32)
        for number, row in enumerate(self.rows):
            ids[number, : len(row.tokens)] = row.tokens
        lengths = np.array([len(row.tokens) for row in self.rows], np.int32)
        drafts = self.proposer.propose(sampled, lengths, ids, slot_mappings=None)
        for row, draft in zip(self.rows, drafts, strict=True):
            assert all(type(token) is int and 0 <= token < VOCAB for token in draft)
            assert len(draft) <= MOST
            assert not draft or len(row.tokens) + len(draft) < LONGEST
            row.draft = draft
        self.steps += 1
        return drafts


def test_texts_that_repeat_are_drafted_and_equal_those_without_drafts() -> None:
    batch = Batch(proposer("prompt-lookup:policy=fixed,k=8"))
    rows = [batch.add([1, 2, 3, 4 + number]) for number in range(3)]
    while min(len(row.tokens) for row in rows) < 100:
        batch.step()
    assert batch.steps < 50
    for row in rows:
        plain = row.tokens[:4]
        while len(plain) < len(row.tokens):
            plain.append(periodic(plain))
        assert row.tokens == plain
    counts = batch.proposer.counts
    assert counts.accepted_tokens > 0.8 * counts.drafted_tokens > 0
    assert counts.calls == batch.steps


def test_the_default_strategy_drafts() -> None:
    batch = Batch(Proposer(Config(None)))
    row = batch.add([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])
    for _ in range(40):
        if len(row.tokens) < 200:
            batch.step()
    assert batch.proposer.counts.drafted_tokens


def test_a_prompt_that_is_still_read_has_no_draft() -> None:
    batch = Batch(proposer())
    row = batch.add([1, 2, 3, 1, 2, 3])
    assert batch.step(reading=[row]) == [[]]
    assert len(batch.step()) == 1


def test_a_text_ends_within_the_models_length() -> None:
    batch = Batch(proposer("prompt-lookup:policy=fixed,k=8"))
    row = batch.add([1, 2, 3] * 70)
    while len(row.tokens) < LONGEST - 1:
        batch.step()  # which checks each draft's length
    assert len(row.tokens) <= LONGEST


class TestRows:
    """Texts are found again although vLLM names none of them."""

    def call(self, rows: Rows, texts: Sequence[Sequence[int]], new: int = 1) -> list[int]:
        ids = np.zeros((len(texts), LONGEST), np.int32)
        for number, text in enumerate(texts):
            ids[number, : len(text)] = text
        call = rows.read([list(text[len(text) - new :]) for text in texts], list(map(len, texts)), ids)
        self.latest = call
        return [text.sequence for text in call.texts if text is not None]

    def test_rows_that_move_keep_their_texts(self) -> None:
        rows = Rows(LONGEST, 8)
        first, second, third = [1, 2, 3], [4, 5, 6, 7], [8, 9, 10]
        names = self.call(rows, [first, second, third])
        assert names == [1, 2, 3]
        assert not self.latest.decoded
        assert self.call(rows, [[*third, 3], [*second, 2]]) == [3, 2]
        assert self.latest.decoded

    def test_equal_texts_stay_two(self) -> None:
        rows = Rows(LONGEST, 8)
        assert self.call(rows, [[1, 2, 3], [1, 2, 3]]) == [1, 2]
        assert sorted(self.call(rows, [[1, 2, 3, 4], [1, 2, 3, 4]])) == [1, 2]

    def test_another_text_of_the_same_length_is_a_new_one(self) -> None:
        rows = Rows(LONGEST, 8)
        self.call(rows, [[1, 2, 3]])
        assert self.call(rows, [[7, 2, 3, 4]]) == [2]

    def test_a_text_left_out_for_a_while_comes_back_and_one_that_is_gone_ends(self) -> None:
        rows = Rows(LONGEST, 8)
        self.call(rows, [[1, 2, 3], [4, 5, 6]])
        self.call(rows, [[1, 2, 3, 4]])
        assert self.call(rows, [[1, 2, 3, 4, 5], [4, 5, 6, 7]]) == [1, 2]
        assert not self.latest.decoded  # its row was read anew
        ended: list[int] = []
        text = [1, 2, 3, 4, 5]
        for _ in range(20):
            text = [*text, 1]
            self.call(rows, [text])
            ended += [each.sequence for each in self.latest.ended]
        assert ended == [2]

    def test_no_more_texts_than_vllm_runs_are_kept_beside_those_of_the_batch(self) -> None:
        rows = Rows(LONGEST, 2)
        for number in range(20):
            self.call(rows, [[number, 1], [number, 2]])
        assert len(rows.clear()) <= 4


class Broken:
    """Proposes what no text may have, or raises."""

    needs = Needs(outcomes=False)

    def __init__(self, resources: Resources) -> None: ...

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        if len(views[0].tokens) % 2:
            raise RuntimeError("out of order")
        return [trees.chain([1, VOCAB, 2], "broken") if budget else NO_DRAFT for budget in budgets]

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


def test_a_drafter_that_fails_costs_its_drafts_alone(caplog: pytest.LogCaptureFixture) -> None:
    batch = Batch(proposer(f"{__name__}:Broken"))
    row = batch.add([1, 2, 3])
    for _ in range(6):
        batch.step()
    assert len(row.tokens) >= 9
    assert len(caplog.records) == 1
    assert "out of order" in caplog.text


class AskBoth(Fixed):
    """Asks the first drafter, then the second."""

    def plan(self, views: Sequence[SequenceView]) -> Budgets:
        self._asked = iter((1, 0))
        return Budgets([3] * len(views), 0, [0] * len(views))

    def next_budgets(self, views: Sequence[SequenceView], drafts: Sequence[Draft | None]) -> Budgets:
        return Budgets([3 * next(self._asked)] * len(views), 0, [1] * len(views))


def test_a_draft_stays_where_the_drafter_asked_after_it_has_none() -> None:
    chain = trees.chain([1, 2, 3], "some")
    drafters = (ToyDrafter(lambda view, budget: chain), ToyDrafter(lambda view, budget: NO_DRAFT))
    drafting = ChainDrafting(Strategy("both", drafters, SharedNoise(), AskBoth(3)), MeasuredCost(), VOCAB)
    text = open_text(0, [4, 5], SamplingParams(max_tokens=9))
    drafting.draft([text], [3])
    assert text.draft.tree.tokens == (1, 2, 3)


def test_no_error_reaches_vllm(caplog: pytest.LogCaptureFixture) -> None:
    """Nonsense in place of a batch: nothing is drafted, and after some calls nothing is tried."""
    own = proposer()
    for _ in range(20):
        assert own.propose([[1], [2]], [5], np.zeros((1, 4), np.int32)) == [[], []]
    assert caplog.text.count("decoded without drafts") == 2
    assert own.counts.failures == 8


def test_stores_learn_across_requests_only_if_told() -> None:
    story = [5, 9, 7, 11, 13, 2, 8, 6, 4, 3, 17, 19, 23, 29, 31, 37]

    def drafted(share: bool) -> int:
        own = proposer("suffix-automaton:policy=fixed,k=4,bias=0", share_outputs=share)
        told = lambda tokens: story[(story.index(tokens[-1]) + 1) % len(story)]  # noqa: E731
        first = Batch(own, told)
        row = first.add([0, story[0]])
        while len(row.tokens) < len(story):
            first.step()
        first.rows.clear()
        for _ in range(20):
            first.step()
        before = own.counts.drafted_tokens
        again = Batch(own, told)
        row = again.add([0, 0, story[0]])
        while len(row.tokens) < len(story) - 2:
            again.step()
        return own.counts.drafted_tokens - before

    assert drafted(share=True) > 0
    assert drafted(share=False) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"parlay": {"strateggy": "auto"}}, "no option 'strateggy'"),
        ({"parlay": {"strategy": 3}}, "parlay.strategy must be a text, got 3"),
        ({"parlay": "auto"}, "must be an object"),
        ({"parlay": {"strategy": "prompt-lookip"}}, "prompt-lookup"),
        ({"parlay": {"strategy": "token-recycling"}}, "committed tokens only"),
        ({"parlay": {"strategy": "draft-model:model=any"}}, "draft_model"),
        ({"parlay": {"strategy": "eagle3"}}, "parlay export"),
        ({"parlay": {"strategy": "auto:of=prompt-lookup+medusa"}}, "parlay export"),
        ({"parlay": {"strategy": "prompt-lookup:rule=typical"}}, "own rule"),
    ],
)
def test_options_that_cannot_work_are_one_line(config: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        Proposer(Config(config))
    assert "\n" not in str(raised.value)


def test_what_was_drafted_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.parlay")
    batch = Batch(proposer("prompt-lookup:policy=fixed,k=8", log_seconds=0.5))
    batch.add([1, 2, 3, 1, 2, 3])
    for _ in range(20):
        batch.step()
    assert "tokens per step" in caplog.text


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own")
def test_vllm_builds_it_and_calls_it_as_recorded() -> None:
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
    from vllm.v1.worker import gpu_model_runner

    config: Any = Config()
    config.speculative_config.model = "parlay.vllm.Proposer"
    assert isinstance(create_custom_proposer(config), Proposer)
    source = inspect.getsource(gpu_model_runner.GPUModelRunner.propose_draft_token_ids)
    call = source.partition('spec_config.method == "custom_class"')[2].partition("elif")[0]
    for word in ("sampled_token_ids,", "num_tokens_no_spec,", "token_ids_cpu,", "slot_mappings=slot_mappings"):
        assert word in call
