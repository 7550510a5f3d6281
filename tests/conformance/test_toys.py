"""U2 and the drafters' side of the contract, on toys whose every logit is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parlay.engine import Limits
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing import toy_drafters
from parlay.testing.conformance import toy_stage
from parlay.testing.conformance.stage import PLAIN, Stage, StageRequest, StageSample, decode
from parlay.testing.conformance.universal import CAPACITY, agree, prompt
from parlay.testing.toy_drafters import Prober, Raising, RejectedReader
from parlay.testing.toy_head import ToyHead, toy_state
from parlay.testing.toys import ToyRunner, nan_after
from parlay.types import Draft, Drafter, SamplingParams, SequenceView, Strategy, trees

STAGE = toy_stage("toy")
RECURRENT = toy_stage("toy recurrent", tree="chain", cut=4)
ANSWER = toy_drafters.answer_by(STAGE.logits_of)
VOCAB = STAGE.vocab_size
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=60)
NARROW = Limits(max_sequences=3, max_rows=5, max_draft_rows=6)
BOTH = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def drafting(drafter: Drafter, budget: int) -> Strategy:
    return Strategy("toy", (drafter,), SharedNoise(), Fixed(budget))


def run(drafter: Drafter, budget: int, params: SamplingParams) -> StageSample:
    """Decode one request; its text must be that of plain decoding."""
    ask = StageRequest(prompt(STAGE, 5, 12), params, seed=4)
    (sample,) = decode(STAGE.open_runner(CAPACITY), [(ask, drafting(drafter, budget))])
    assert sample.tokens == STAGE.expected(ask).output
    return sample


@BOTH
@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_an_oracle_gives_depth_plus_one_tokens_in_every_full_step(budget: int, params: SamplingParams) -> None:
    sample = run(toy_drafters.oracle(ANSWER), budget, params)
    assert set(sample.steps[:-1]) == {budget + 1}
    assert sample.metrics.acceptance_rate == 1.0


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_an_oracle_in_any_tree_is_followed_to_the_end_of_the_true_path(seed: int, params: SamplingParams) -> None:
    true_depths: dict[int, int] = {}

    def watch(view: SequenceView, budget: int) -> Draft:
        draft = inner.propose([view], [budget])[0]
        true_depths[len(view.tokens)] = true_depth(view, draft)
        return draft

    inner = toy_drafters.tree_oracle(ANSWER, VOCAB, seed)
    sample = run(toy_drafters.ToyDrafter(watch), 9, params)
    at = 12
    for committed in sample.steps[:-1]:
        assert committed == true_depths[at] + 1
        at += committed
    assert len(set(sample.steps)) > 1, "every tree was as deep as the others"


def true_depth(view: SequenceView, draft: Draft) -> int:
    """How far the tree goes along with what the target will say."""
    below = trees.children(draft.tree)
    node, path = -1, list[int]()
    while True:
        token = ANSWER(view, path)
        carriers = [child for child in below[node] if draft.tree.tokens[child] == token]
        if not carriers:
            return len(path)
        node, path = carriers[0], [*path, token]


@BOTH
@pytest.mark.parametrize("budget", [1, 4, 11])
def test_an_adversary_gives_exactly_one_token_per_step(budget: int, params: SamplingParams) -> None:
    metrics = run(toy_drafters.adversary(ANSWER, VOCAB), budget, params).metrics
    assert metrics.tokens_per_step == 1.0
    assert metrics.draft_tokens > 0
    assert metrics.accepted_tokens == 0


def test_a_drafter_that_is_right_at_known_positions_is_accepted_there() -> None:
    pattern = (True, True, False, True)
    sample = run(toy_drafters.sometimes(ANSWER, VOCAB, pattern), 5, GREEDY)
    at, expected = 12, []
    while at < 12 + 60:
        accepted = next(offset for offset in range(5) if not pattern[(at + offset) % 4])
        expected.append(min(accepted + 1, 12 + 60 - at))
        at += expected[-1]
    assert sample.steps == expected


@pytest.mark.parametrize("limits", [Limits(), NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("capacity", [CAPACITY, 150], ids=["roomy", "tight"])
def test_taps_are_those_of_the_tokens_that_became_cached(capacity: int, limits: Limits) -> None:
    """Prefill chunks included; after forks and preemption too."""
    head = ToyHead(toy_drafters.tree_oracle(ANSWER, VOCAB), toy_state)
    asks = [
        StageRequest(prompt(STAGE, 8, 30), replace(SAMPLED, max_tokens=40), 3, index, group="g") for index in range(4)
    ]
    agree(STAGE, [(ask, drafting(head, 6)) for ask in asks], limits, capacity=capacity)
    assert head.shown > 100
    assert head.wrong == []


def test_every_step_is_observed_and_a_stop_inside_the_path_cuts_the_taps() -> None:
    """From the first step on, whose pending run is the whole prompt."""
    ask = StageRequest(prompt(STAGE, 5, 12), SAMPLED, seed=4)
    ask = replace(ask, stop_ids=frozenset({STAGE.expected(ask).output[9]}))
    head = ToyHead(toy_drafters.oracle(ANSWER), toy_state)
    for budget in range(1, 8):
        (sample,) = decode(STAGE.open_runner(CAPACITY), [(ask, drafting(head, budget))])
        assert sample.ending[0] == "stop"
    assert head.wrong == []


@BOTH
def test_a_drafter_that_asks_for_them_sees_the_samplers_choices_at_rejected_rows(params: SamplingParams) -> None:
    reader = RejectedReader(toy_drafters.adversary(ANSWER, VOCAB), STAGE.logits_of)
    run(reader, 6, params)
    assert reader.rows == 7 * 54 + sum(range(1, 7)), "a step was not observed"
    assert reader.wrong == []


@BOTH
def test_a_probe_is_never_accepted_however_right(params: SamplingParams) -> None:
    metrics = run(Prober(ANSWER), 3, params).metrics
    assert metrics.tokens_per_step == 1.0
    assert metrics.draft_tokens == metrics.accepted_tokens == 0


@pytest.mark.parametrize("where", ["propose", "observe"])
def test_a_drafter_that_raises_is_counted_and_dropped(where: str) -> None:
    sample = run(Raising(toy_drafters.oracle(ANSWER), 3, where), 2, GREEDY)
    assert sample.metrics.drafter_faults == 1
    assert 3 <= sample.metrics.draft_steps <= 4
    assert set(sample.steps[5:]) == {1}


def malformed(kind: str) -> Drafter:
    """Drafts that no forward or rule could take."""

    def guess(view: SequenceView, budget: int) -> Draft:
        draft = trees.chain([1, 2, 3], "malformed")
        tree = draft.tree
        broken = {
            "token": replace(draft, tree=replace(tree, tokens=(1, VOCAB, 3))),
            "negative token": replace(draft, tree=replace(tree, tokens=(1, -1, 3))),
            "parent": replace(draft, tree=replace(tree, parents=(-1, 2, 1))),
            "length": replace(draft, tree=replace(tree, parents=(-1, 0))),
            "sources": replace(draft, sources=("malformed",)),
            "scores": replace(draft, scores=(0.5,)),
            "kind": replace(draft, kind="iid"),
            "siblings": replace(draft, tree=replace(tree, tokens=(1, 1, 1), parents=(-1, -1, -1))),
            "probes": replace(draft, probes=9),
        }
        return broken[kind]

    return toy_drafters.ToyDrafter(guess)


KINDS = ["token", "negative token", "parent", "length", "sources", "scores", "kind", "siblings", "probes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [STAGE, RECURRENT], ids=["tree", "chain"])
def test_a_malformed_draft_costs_nothing_but_the_drafts(kind: str, stage: Stage) -> None:
    jobs = [(StageRequest(prompt(STAGE, 5, 12), SAMPLED, seed=4), drafting(malformed(kind), 5))]
    assert agree(stage, jobs, faults=True) == []


class Careless:
    """Returns another number of drafts than was asked for."""

    needs = toy_drafters.ToyDrafter.needs

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [trees.chain([1], "careless")] * (len(views) + 1)

    def observe(self, observations: Sequence[object]) -> None: ...

    def release(self, sequence: int) -> None: ...


def test_a_wrong_number_of_drafts_costs_nothing_but_the_drafts() -> None:
    jobs = [(StageRequest(prompt(STAGE, seed, 12), SAMPLED, seed), drafting(Careless(), 5)) for seed in range(3)]
    assert agree(STAGE, jobs, faults=True) == []


@pytest.mark.parametrize("budget", [0, 1, 3, 8])
def test_nan_logits_end_one_request_after_the_same_text_under_any_draft(budget: int) -> None:
    """Others go on, and the tokens before the fault are those that plain decoding gave."""
    logits_of = nan_after(STAGE.logits_of, 12 + 9)
    sick = replace(STAGE, logits_of=logits_of, open_runner=lambda capacity: ToyRunner(logits_of, VOCAB), known={})
    asks = [StageRequest(prompt(STAGE, seed, length), SAMPLED, seed) for seed, length in ((1, 12), (2, 30))]
    oracle = drafting(toy_drafters.oracle(ANSWER), budget)
    plain = decode(sick.open_runner(CAPACITY), [(ask, PLAIN.strategy(sick, 0)) for ask in asks])
    fast = decode(sick.open_runner(CAPACITY), [(ask, oracle) for ask in asks])
    assert [sample.ending[0] for sample in fast] == ["error", "length"]
    assert fast[0].last is not None
    assert "NaN" in (fast[0].last.error or "")
    assert [sample.tokens for sample in fast] == [sample.tokens for sample in plain]
    assert len(fast[0].tokens) == 9
