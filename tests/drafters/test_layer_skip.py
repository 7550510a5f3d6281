"""Draft & Verify, on layers whose logits are known for every text and every set that is skipped, and on toys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.layer_skip import LayerSkip
from parlay.options import UsageError
from parlay.sampling.sampler import sample
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.checkpoints import random_model
from parlay.testing.conformance import default_stages, run_check, subject_of
from parlay.testing.conformance.stage import StageRequest, decode
from parlay.testing.toys import text_hash
from parlay.types import (
    Draft,
    Observation,
    Request,
    RunnerSpec,
    SamplingParams,
    Skip,
    Verdict,
    trees,
)
from tests.drafters.own_layers import LOGITS, TARGET, VOCAB, LayeredSight, Layers
from tests.drafters.sight import GREEDY, SAMPLED, no_runner


def degraded(text: Sequence[int], skip: Skip) -> Tensor:
    """What the target says, and noise for each sub-layer left out."""
    logits_V = LOGITS(text)
    for half, layer in sorted(skip):
        noise = torch.Generator().manual_seed(text_hash(text, 2 * layer + (half == "mlp")))
        logits_V = logits_V + 0.5 * torch.randn(VOCAB, generator=noise)
    return logits_V


@dataclass
class Sight(LayeredSight):
    layers: Layers = field(default_factory=lambda: Layers(degraded))


def made(settings: str = "", target: RunnerSpec | None = TARGET) -> LayerSkip:
    drafter = build(parse(f"layer-skip:{settings}"), Resources(VOCAB, no_runner, target=target))
    assert isinstance(drafter, LayerSkip)
    return drafter


def skipped(drafter: LayerSkip) -> set[str]:
    """The sub-layers it leaves out, as letter and number."""
    view = Sight(0, [1, 2])
    drafter.propose([view], [1])
    return {f"{half[0]}{layer}" for half, layer in view.layers.calls[-1][1]}


def observe(drafter: LayerSkip, view: Sight, draft: Draft, accepted: int) -> None:
    path = tuple(range(accepted))
    sampled = (*(draft.tree.tokens[node] for node in path), 0)
    drafter.observe([Observation(view, draft, Verdict(path, sampled))])


# ------------------------------------------------------------------------------------------------- what is skipped


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("attention=2+3,mlp=1+4", {"a2", "a3", "m1", "m4"}),
        ("attention=0+5+5", {"a0", "a5"}),
        ("mlp=3", {"m3"}),
        ("", {"a3", "a2", "m3", "m2"}),  # .45 of the eight inner ones, rounded, from the middle
        ("ratio=0", set()),
        ("ratio=0.25", {"a3", "a2"}),
        ("ratio=1", {f"{half}{layer}" for half in "am" for layer in range(1, 5)}),
    ],
)
def test_what_is_named_or_else_the_middle_is_left_out(settings: str, expected: set[str]) -> None:
    """By the rule of thumb the first and last layer always run."""
    assert skipped(made(settings)) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("attention=6", ["attention=6", "six", "0 to 5"]),
        ("mlp=1+-1", ["mlp=-1", "0 to 5"]),
        ("attention=two", ["attention=two", "0 to 5"]),
        ("mlp=01", ["mlp=01"]),
        ("attention=1,ratio=0.5", ["layers to skip or their ratio, not both"]),
        ("ratio=1.5", ["ratio must be at most 1, got 1.5", "at most 1"]),
        ("threshold=nan", ["threshold must be at least 0, got nan"]),
        ("search=-1", ["search must be at least 0, got -1"]),
    ],
)
def test_what_can_not_be_skipped_is_said_in_one_line(settings: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        made(settings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("target", [None, replace(TARGET, layer_skip=False, name="foreign")])
def test_a_target_that_can_not_skip_is_an_error_with_both_names(target: RunnerSpec | None) -> None:
    with pytest.raises(UsageError, match="strategy layer-skip") as caught:
        made(target=target)
    assert target is None or "foreign" in str(caught.value)


def test_a_model_behind_the_adapter_is_such_a_target() -> None:
    from parlay.models.transformers_adapter.runner import AdapterRunner

    runner = AdapterRunner(random_model("gpt2"), name="tiny-gpt2")
    with pytest.raises(UsageError, match=r"strategy layer-skip .* runner of tiny-gpt2 can't skip any"):
        made(target=runner.spec)


# -------------------------------------------------------------------------------------------------- what is drafted


@pytest.mark.parametrize("request_", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_chain_is_what_the_one_sampler_draws_from_the_skipping_target(request_: Request) -> None:
    view = Sight(0, [1, 2, 3], request=request_)
    (draft,) = made("threshold=0,threshold_sampled=0,mlp=1+2").propose([view], [5])
    written: list[int] = []
    for _ in range(5):
        logits = degraded([*view.tokens, *written], frozenset({("mlp", 1), ("mlp", 2)}))
        probabilities = (logits / (request_.params.temperature or 1)).softmax(-1)
        (token,) = sample(logits[None], [view], [written])
        assert isinstance(token, int)
        assert draft.scores[len(written)] == pytest.approx(float(probabilities[token]), rel=1e-5)
        written.append(token)
    assert list(draft.tree.tokens) == written
    assert trees.is_chain(draft.tree)


def test_each_sequence_of_a_batch_gets_the_draft_it_gets_alone() -> None:
    """One forward per step for all of them, and a row that is not a number ends its own chain only."""

    def logits_of(text: Sequence[int], skip: Skip) -> Tensor:
        result = degraded(text, skip)
        return torch.full_like(result, torch.nan) if text[0] == 9 else result

    def views(layers: Layers) -> list[Sight]:
        texts = ([1, 2, 3], [9, 2, 3], [4, 4], [5])
        return [Sight(name, list(text), layers, (GREEDY, SAMPLED)[name % 2]) for name, text in enumerate(texts)]

    layers, budgets = Layers(logits_of), [4, 4, 2, 0]
    settings = "threshold=0,threshold_sampled=0"
    together = made(settings).propose(views(layers), budgets)
    alone = [
        made(settings).propose([view], [budget])[0]
        for view, budget in zip(views(Layers(logits_of)), budgets, strict=True)
    ]
    assert together == alone
    assert [len(draft) for draft in together] == [4, 0, 2, 0]
    assert [call[0] for call in layers.calls] == [(0, 1, 2), (0, 2), (0,), (0,)]


def test_a_chain_ends_at_a_stop_and_after_an_unsure_token() -> None:
    """The unsure token itself is drafted, so that there is always something to learn from."""

    def logits_of(text: Sequence[int], skip: Skip) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor(len(text) % VOCAB), VOCAB) * (9.0 if len(text) < 6 else 1.0)

    view = Sight(0, [0, 1, 2], Layers(logits_of))
    (draft,) = made().propose([view], [8])
    assert draft.tree.tokens == (3, 4, 5, 6)
    assert draft.scores[-1] < 0.8 < min(draft.scores[:-1])
    stopping = replace(view, request=replace(GREEDY, stop_ids=frozenset({4})))
    assert made().propose([stopping], [8])[0].tree.tokens == (3, 4)
    assert len(made().propose([view], [1000])[0]) == 4


def test_the_threshold_moves_as_the_paper_says() -> None:
    """Match rate .5 m + .5 r; threshold .9 t + .1 (t +- .01), and no lower after a chain that was cut off."""
    drafter, view = made(), Sight(0, [1, 2])
    stop = drafter._stop(view)
    draft = trees.chain([1, 2, 3, 4], "layer-skip")
    stop.full = False
    observe(drafter, view, draft, 2)
    assert stop.matched == pytest.approx(0.7)
    assert stop.threshold == pytest.approx(0.801)
    observe(drafter, view, draft, 4)
    assert stop.matched == pytest.approx(0.85)
    assert stop.threshold == pytest.approx(0.802)
    observe(drafter, view, draft, 4)
    assert stop.threshold == pytest.approx(0.801)
    stop.full = True
    observe(drafter, view, draft, 4)
    assert stop.threshold == pytest.approx(0.801)
    observe(drafter, view, replace(draft, sources=("someone else's",) * 4), 0)
    observe(drafter, view, Draft(), 0)
    assert stop.matched == pytest.approx(0.9625)
    assert drafter._stop(Sight(1, [1], request=SAMPLED)).threshold == 0.5
    drafter.release(0)
    drafter.release(0)
    assert drafter._stop(view).threshold == 0.8


def test_nothing_is_carried_from_text_to_text() -> None:
    """A rewind, another text under the name, a budget of zero: the draft is a fresh drafter's."""
    drafter, view = made(), Sight(0, [1, 2, 3])
    for tokens, budget in (([1, 2, 3], 4), ([1, 2, 3, 7], 4), ([1], 4), ([5, 6], 0), ([5, 6, 1], 6)):
        view.tokens = tokens
        assert drafter.propose([view], [budget]) == made().propose([Sight(0, tokens)], [budget])


# --------------------------------------------------------------------------------------------------------- the search


def test_search_finds_a_set_that_promises_more_speed() -> None:
    """Leaving out anything in layer 2 ruins the text, and nothing else matters: all else is worth leaving out."""

    def logits_of(text: Sequence[int], skip: Skip) -> Tensor:
        ruined = any(layer == 2 for _, layer in skip)
        return LOGITS([*text, 1] if ruined else text)

    view, text = Sight(0, [3], Layers(logits_of)), [3]
    drafter = made("search=150,window=16,threshold=0")
    for _ in range(190):
        text.append(int(LOGITS(text).argmax()))
        view.tokens = list(text)
        drafter.propose([view], [1])
    _, skip, _ = view.layers.calls[-1]
    assert not any(layer == 2 for _, layer in skip)
    assert len(skip) >= 8, f"of the ten sub-layers that can be spared only {sorted(skip)} are"
    assert sum(rows > 1 for _, _, rows in view.layers.calls) == 150


# ------------------------------------------------------------------------------------------------------ on real stages


@pytest.mark.parametrize("stage", ["toy", "native float32", "native bfloat16"])
def test_with_nothing_skipped_a_step_commits_k_and_one(stage: str) -> None:
    """Greedy and sampled: the target agrees with itself."""
    here = default_stages()[stage]
    strategy = subject_of("layer-skip:ratio=0,threshold=0,threshold_sampled=0").strategy(here, 4)
    for params in (SamplingParams(temperature=0.0, max_tokens=31), SamplingParams(temperature=1.0, max_tokens=31)):
        ask = StageRequest((1, 2, 3, 4, 5), params)
        (sample,) = decode(here.open_runner(4096), [(ask, strategy)])
        assert sample.tokens == here.expected(ask).output
        assert sample.steps == [1, 5, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("stage", ["toy", "native float32", "native bfloat16"])
def test_with_everything_skipped_the_text_is_the_same(stage: str) -> None:
    every = "+".join(map(str, range(4 if stage == "toy" else 3)))
    spec = f"layer-skip:attention={every},mlp={every},threshold=0,threshold_sampled=0"
    finding = run_check("continuing", subject_of(spec), default_stages()[stage])
    assert finding.passed, str(finding)
