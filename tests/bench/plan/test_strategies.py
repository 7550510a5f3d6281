"""What the cost model is told of a strategy follows from the catalogue: budget, policy, and who writes the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parlay.bench.plan.strategies import Acceptance, Models, compared, is_modelled, members, plan, read_acceptance
from parlay.cost.devices import machine
from parlay.cost.roofline import LayerSums, MixedLayers
from parlay.cost.speed import DraftPlan, Setting, TreeShape, speed_of
from parlay.strategies.catalogue import catalogue
from parlay.strategies.spelling import parse
from parlay.types.layer_split import LayerSplit
from tests.bench.plan.conftest import TINY

DRAFT = replace(TINY, num_layers=1)
MODELS = Models(TINY, DRAFT)


def test_plain_decoding_drafts_nothing() -> None:
    assert plan(parse("none"), MODELS, Acceptance((0.7,))) == DraftPlan(name="none")


def test_budget_policy_and_acceptance_are_the_strategys_own() -> None:
    acceptance = Acceptance((0.7,), {"prompt-lookup": (0.4,)})
    found = plan(parse("prompt-lookup:k=5,policy=fixed"), MODELS, acceptance)
    assert (found.nodes, found.ranks, found.drafter, found.adapts) == (5, (0.4,), None, False)
    assert plan(parse("token-recycling"), MODELS, acceptance).ranks == (0.7,)


def test_a_draft_model_writes_with_its_own_shape_and_the_target_with_some_of_its_layers() -> None:
    assert plan(parse("draft-model"), MODELS, Acceptance((0.7,))).drafter == DRAFT
    deep = Models(replace(TINY, num_layers=22))
    skipping = plan(parse("layer-skip:ratio=0.5"), deep, Acceptance((0.7,))).drafter
    assert skipping is not None
    assert skipping.num_layers == 12  # two stay, and half of the other twenty


def test_a_target_that_drafts_for_itself_has_fewer_bits_and_keys() -> None:
    large, chances = Models(replace(TINY, weight_bytes=2.0)), Acceptance((0.9,))
    rounded = plan(parse("self-draft:bits=4,window=0"), large, chances).drafter
    assert rounded == replace(large.target, weight_bytes=4.5 / 8)
    recent = plan(parse("self-draft:window=256,sinks=4"), large, chances).drafter
    assert recent == replace(large.target, recent_layers=TINY.num_layers, recent_tokens=260)


def test_a_head_costs_a_layer_for_each_level_and_heads_side_by_side_one_product_for_all() -> None:
    big = Models(replace(TINY, hidden_size=4096, intermediate_size=14336, vocab_size=128_256, num_layers=32))
    eagle3, medusa = plan(parse("eagle3"), big, Acceptance((0.7,))), plan(parse("medusa"), big, Acceptance((0.7,)))
    assert eagle3.drafter is not None
    assert medusa.drafter is not None
    assert (eagle3.drafter.num_layers, medusa.drafter.num_layers) == (1, 0)
    assert (eagle3.at_once, medusa.at_once) == (False, True)
    assert eagle3.drafter.vocab_size == 4096
    assert eagle3.drafter.parameters < big.target.parameters / 25


@pytest.mark.parametrize("name", ["eagle3", "medusa", "dynamo", "kangaroo"])
def test_a_head_is_in_memory_and_has_no_experts_whatever_the_target_has(name: str) -> None:
    """Streamed layers and experts are read anew in every forward: a head that had them would never pay."""
    experts = MixedLayers(layers=2, count=8, chosen=2, weights=3 * 32 * 64, slots=4)
    sums = LayerSums(qkv=128, mixed=64, mlp=0, whole=64, recent=0, attended=64)
    split = LayerSplit((1,), (0,), 10**9, 10**9, 10**9)
    usual = plan(parse(name), Models(replace(TINY, intermediate_size=128)), Acceptance((0.7,))).drafter
    for target in (replace(TINY, intermediate_size=128, split=split), replace(TINY, mixed=experts, sums=sums)):
        assert plan(parse(name), Models(target), Acceptance((0.7,))).drafter == usual


def test_probes_cost_rows_of_the_forward_that_verifies_and_no_head() -> None:
    probing = plan(parse("ppd"), MODELS, Acceptance((0.7,)))
    assert probing.drafter is None
    assert probing.probes == 12
    setting = Setting(machine("l4", "bfloat16"), TINY, 1, 100)
    tree, nothing = TreeShape(4, 2.0, 4, 1), TreeShape(0, 1.0, 0, 1)
    free = replace(probing, probes=0)
    assert speed_of(setting, probing, tree).verify_seconds > speed_of(setting, free, tree).verify_seconds
    assert speed_of(setting, probing, nothing) == speed_of(setting, free, nothing)


def test_a_draft_model_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(ValueError, match="--draft-model"):
        plan(parse("draft-model"), Models(TINY), Acceptance((0.7,)))


def test_a_strategy_that_is_not_modelled_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"union: no costs are modelled .* use one of none, prompt-lookup"):
        plan(parse("union"), MODELS, Acceptance((0.7,)))


@pytest.mark.parametrize(
    "name", [name for name, entry in catalogue().items() if is_modelled(name) and not entry.routes]
)
def test_every_strategy_of_a_modelled_family_can_be_planned(name: str) -> None:
    found = plan(parse(name), MODELS, Acceptance((0.7,)))
    assert found.name == name
    assert (found.nodes == 0) == (name == "none")


def texts(named: Sequence[str], models: Models) -> list[str]:
    return [str(spec) for spec in compared([parse(name) for name in named], models)]


def test_plain_decoding_is_always_compared_and_comes_first() -> None:
    """By default with a copy, the default strategy and what it would choose from, a head among it."""
    assert texts((), MODELS) == ["none", "prompt-lookup", "suffix-decoding", "draft-model", "eagle3", "auto"]
    assert texts((), Models(TINY)) == ["none", "prompt-lookup", "suffix-decoding", "eagle3", "auto"]
    assert texts(["jacobi", "none"], MODELS) == ["none", "jacobi"]


def test_acceptance_is_read_for_all_for_one_and_by_rank() -> None:
    read = read_acceptance(["0.5", "draft-model=0.6+0.2"])
    assert read.of(parse("draft-model")) == (0.6, 0.2)
    assert read.of(parse("prompt-lookup")) == (0.5,)
    assert read_acceptance([]).of(parse("prompt-lookup")) == (0.0,)


def test_what_chooses_is_planned_by_what_it_chooses_from() -> None:
    assert list(map(str, members(parse("auto"), MODELS))) == ["suffix-decoding", "draft-model"]
    assert list(map(str, members(parse("auto:of=prompt-lookup+eagle3"), MODELS))) == ["prompt-lookup", "eagle3"]
    assert members(parse("jacobi"), MODELS) == [parse("jacobi")]
    with_head = Models(TINY, DRAFT, {"eagle3": "a head", "medusa": "another"})
    assert list(map(str, members(parse("auto"), with_head))) == ["suffix-decoding", "draft-model", "eagle3"]


@pytest.mark.parametrize("text", ["often", "1.5", "-0.1", "0.6+0.6", "draft-model=", "nan"])
def test_acceptance_that_is_no_chance_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--acceptance"):
        read_acceptance([text])
