"""Splits of a model over devices: memory, and what steps cost."""

from __future__ import annotations

import pytest

from benchmarks.simulation.cases import QWEN_7B
from parlay.cost.devices import machine
from parlay.cost.roofline import ForwardShape
from parlay.simulate.costs import LearnedSteps, MeasuredSteps, RooflineSteps, TimedStep
from parlay.simulate.drafting import no_seconds
from parlay.simulate.splits import Link, Split, SplitSteps, beside, memory_of, shard, share_of, splits
from parlay.testing.conformance.stage import Steady

H100 = machine("h100", "bfloat16")
FAST, SLOW = Link(300e9, 2e-6, "fast"), Link(1e9, 1e-4, "slow")
DECODE = (8, 8, 8, 8000.0, 8000.0)
PREFILL = (1, 512, 1, 512.0, 512.0 * 512)


def steps(split: Split, link: Link = FAST) -> SplitSteps:
    return SplitSteps(H100, QWEN_7B, split, link)


@pytest.mark.parametrize(("batch", "rows", "context"), [(1, 1, 0), (8, 1, 1000), (4, 5, 300), (1, 512, 512)])
def test_the_quick_roofline_is_the_roofline(batch: int, rows: int, context: int) -> None:
    work = ForwardShape(batch=batch, rows=rows, context=context)
    each = work.sums
    quick = RooflineSteps(H100, QWEN_7B)(each.sequences, each.rows, each.head_rows, each.keys, each.pairs)
    assert quick == pytest.approx(H100.forward(QWEN_7B, work) + H100.engine.of_step(batch), rel=1e-6)


def test_one_device_is_no_split() -> None:
    assert steps(Split())(*DECODE) == RooflineSteps(H100, QWEN_7B)(*DECODE)
    assert steps(Split(), SLOW).parts(*DECODE).link == 0


def test_tensor_parallelism_reads_half_of_the_weights_and_pays_for_its_links() -> None:
    one, two, slow = steps(Split()), steps(Split(tensor=2)), steps(Split(tensor=2), SLOW)
    assert 0.5 < two(*DECODE) / one(*DECODE) < 0.855
    assert slow(*DECODE) > one(*DECODE)
    assert two.parts(*DECODE).link < slow.parts(*DECODE).link


def test_a_pipeline_gains_with_groups_of_sequences_and_not_for_one() -> None:
    one, two = steps(Split()), steps(Split(pipeline=2))
    alone = (1, 1, 1, 1000.0, 1000.0)
    assert two(*alone) == pytest.approx(one(*alone), rel=0.05)
    large = (256, 256, 256, 256_000.0, 256_000.0)
    assert two(*large) < one(*large) * 1.1


def test_context_parallelism_divides_prompts_and_the_keys_of_long_texts() -> None:
    one, two = steps(Split()), steps(Split(context=2))
    long = (1, 1, 1, 100_000.0, 100_000.0)
    assert two(*long) < 0.9 * one(*long)
    assert two(*PREFILL) < 0.75 * one(*PREFILL)
    assert two(*DECODE) > 0.9 * one(*DECODE)


def test_groups_of_tensor_ranks_that_share_texts_divide_both_and_pay_for_both_links() -> None:
    tensor, context, both = steps(Split(tensor=2)), steps(Split(context=2)), steps(Split(tensor=2, context=2))
    long = (1, 1, 1, 100_000.0, 100_000.0)
    assert both(*long) < min(tensor(*long), context(*long))
    assert both.parts(*DECODE).link > tensor.parts(*DECODE).link
    assert both.parts(*DECODE).compute <= tensor.parts(*DECODE).compute
    room = [
        memory_of(QWEN_7B, split, 20e9, None).cache_tokens for split in (Split(tensor=2), Split(tensor=2, context=2))
    ]
    assert room[1] == pytest.approx(2 * room[0], abs=1)


def test_memory_is_divided_as_weights_and_keys_are() -> None:
    alone = memory_of(QWEN_7B, Split(), 20e9, None)
    two = memory_of(QWEN_7B, Split(tensor=2), 20e9, None)
    assert two.weights == pytest.approx(alone.weights / 2, rel=0.01)
    assert two.cache_tokens > 2 * alone.cache_tokens
    assert memory_of(QWEN_7B, Split(context=2), 20e9, None).cache_tokens == 2 * alone.cache_tokens
    assert memory_of(QWEN_7B, Split(), 10e9, None).cache_tokens == 0
    assert memory_of(QWEN_7B, Split(tensor=2), 10e9, None).cache_tokens > 10_000
    assert memory_of(QWEN_7B, Split(), None, None).cache_tokens == 1 << 30
    beside_it = memory_of(QWEN_7B, Split(), 20e9, shard(QWEN_7B, Split(pipeline=14)))
    assert beside_it.cache_tokens < alone.cache_tokens


def test_splits_use_the_devices_there_are() -> None:
    found = list(splits(4, QWEN_7B, drafter=True))
    assert all(each.devices <= 4 and (each.replicas + 1) * each.ranks > 4 for each in found)
    wanted = {"4 x one device", "2 x tensor 2", "1 x tensor 2 pipeline 2", "1 x tensor 2 context 2", "1 x context 4"}
    assert {*wanted, "2 x drafter apart"} <= set(map(str, found))
    assert not any(each.context > 1 and each.pipeline > 1 for each in found)
    assert len(set(found)) == len(found)


def test_a_drafter_beside_hides_behind_the_verify_if_that_is_quicker() -> None:
    target = steps(Split())

    def slow_draft(sequences: int, nodes: int, context: float) -> float:
        return 0.004

    apart = beside(slow_draft, target, FAST)
    assert apart(1, 4, 500) == pytest.approx(0.004 + 2 * FAST.latency)
    assert apart(16, 4, 500) <= 0.004 + 2 * FAST.latency
    assert beside(no_seconds, target, FAST)(16, 4, 500) == pytest.approx(2 * FAST.latency)


def test_measured_steps_are_means_straight_in_between_and_grow_with_keys() -> None:
    timed = [TimedStep(rows, keys, 0.01 + 0.001 * rows + 1e-6 * keys) for rows in (1, 2, 4, 8) for keys in (100, 900)]
    cost = MeasuredSteps(timed)
    assert cost(1, 3, 3, 400, 0) == pytest.approx(0.0134)
    assert cost(1, 16, 16, 100, 0) == pytest.approx(0.0261)
    with pytest.raises(ValueError, match="1 different numbers of rows were measured"):
        MeasuredSteps(timed[:2])
    assert LearnedSteps(Steady())(2, 4, 4, 700, 0) == Steady().forward(4, 512)


def test_measured_chunks_of_prompts_cost_more_behind_more_text() -> None:
    def seconds(rows: int, before: int) -> float:
        return 0.01 + 0.001 * rows + 1e-6 * before + 2e-7 * rows * before

    chunks = [TimedStep(rows, rows + before, seconds(rows, before), rows * (rows + before))
              for rows in (100, 104, 480, 500, 510) for before in (0, 500, 700)]  # fmt: skip
    cost = MeasuredSteps([*chunks, *(TimedStep(1, keys, 0.011 + 1e-6 * keys, keys) for keys in (100, 900))])
    for before in (0, 700):
        assert cost(1, 500, 1, 500 + before, 500 * (500 + before)) == pytest.approx(seconds(500, before), rel=0.05)


def test_what_several_processes_have_of_a_machine_is_the_machine() -> None:
    half = share_of(H100, 2)
    assert half.bandwidth == H100.bandwidth / 2
    assert half.forward_seconds == H100.forward_seconds
    one, two = RooflineSteps(H100, QWEN_7B), RooflineSteps(half, QWEN_7B)
    assert 1.3 * one(*DECODE) < two(*DECODE) < 2 * one(*DECODE)
