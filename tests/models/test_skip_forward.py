"""Forwards of the native decoder that leave sub-layers out: they compute what they should and change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from parlay import trees
from parlay.models.config import DecoderConfig
from parlay.models.forward import Result, Work
from parlay.models.native import NativeRunner
from parlay.testing.checkpoints import VOCAB_SIZE, random_model
from parlay.types import Chain, Exactness, Segment, Skip, Tree

CONFIG = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_layers=3,
    num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, max_context=512,
)  # fmt: skip
PART: Skip = frozenset({("attention", 1), ("mlp", 1), ("mlp", 2)})
TEXT = [7 * place % VOCAB_SIZE for place in range(60)]
NONE: Skip = frozenset()


def make(dtype: torch.dtype, skip: Skip = NONE) -> NativeRunner:
    """The runner; with ``skip``, one whose sub-layers of these names add nothing, though they run."""
    weights = {name: tensor.to(dtype).clone() for name, tensor in random_model("llama").state_dict().items()}
    for half, layer in skip:
        last = "self_attn.o_proj" if half == "attention" else "mlp.down_proj"
        weights[f"model.layers.{layer}.{last}.weight"].zero_()
    return NativeRunner(CONFIG, weights, dtype=dtype, device=torch.device("cpu"), max_tokens_cached=4096, name="tiny")


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    if make(chosen).spec.exactness is not Exactness.BITS:
        pytest.skip("on this machine rows are exact up to numerical noise only")
    return chosen


def opened(runner: NativeRunner, name: int, tokens: Sequence[int], cached: int, room: int = 40) -> None:
    """A sequence that holds the first ``cached`` tokens, and has room for the others and some more."""
    runner.open(name, tokens, salt=str(name))
    assert runner.reserve(name, len(tokens) + room)
    if cached:
        runner.forward([Segment(name, tuple(tokens[:cached]), logits_from=cached)])
        runner.keep(name, ())


def chain(name: int, tokens: Sequence[int], start: int, rows: int = 1) -> Chain:
    return Chain(name, start, tuple(tokens[start:]), len(tokens) - start - rows)


def test_what_is_skipped_adds_nothing(dtype: torch.dtype) -> None:
    """The logits are those of a model whose skipped sub-layers end in zeros, to the last bit."""
    runner, other = make(dtype), make(dtype, PART)
    opened(runner, 0, TEXT, 0)
    opened(other, 0, TEXT, 0)
    skipped = runner.skip_forward([chain(0, TEXT, 0, rows=len(TEXT))], PART)
    assert torch.equal(skipped, other.forward([Segment(0, tuple(TEXT))]).logits_RV)


def test_with_nothing_skipped_the_logits_are_the_targets(dtype: torch.dtype) -> None:
    runner = make(dtype)
    opened(runner, 0, TEXT, 50)
    again = runner.skip_forward([chain(0, TEXT, 20, rows=40)], NONE)
    opened(runner, 1, TEXT, 0)
    assert torch.equal(again, runner.forward([Segment(1, tuple(TEXT), logits_from=20)]).logits_RV)


def test_with_everything_skipped_a_row_sees_its_own_token_only(dtype: torch.dtype) -> None:
    runner = make(dtype)
    opened(runner, 0, TEXT, 30)
    opened(runner, 1, TEXT[::-1], 30)
    every = frozenset(runner.spec.sublayers)
    both = runner.skip_forward([Chain(0, 30, (5, 9), 1), Chain(1, 30, (9,), 0)], every)
    assert torch.equal(both[0], both[1])


def test_a_chain_written_row_by_row_is_the_chain_at_once(dtype: torch.dtype) -> None:
    """Rows that an earlier call left in scratch serve the next."""
    runner = make(dtype)
    opened(runner, 0, TEXT, 50)
    opened(runner, 1, TEXT, 50)
    at_once = runner.skip_forward([chain(0, TEXT, 50, rows=10)], PART)
    steps = [runner.skip_forward([chain(1, TEXT[: end + 1], end)], PART) for end in range(50, 60)]
    assert torch.equal(at_once, torch.cat(steps))


def test_a_chain_does_not_depend_on_its_company(dtype: torch.dtype) -> None:
    runner = make(dtype)
    for name, cached in ((0, 50), (1, 33), (2, 7)):
        opened(runner, name, TEXT, cached)
    chains = [chain(0, TEXT, 50, rows=2), chain(1, TEXT, 33, rows=27), chain(2, TEXT[:20], 4, rows=1)]
    together = runner.skip_forward(chains, PART)
    assert torch.equal(together, torch.cat([runner.skip_forward([one], PART) for one in chains]))


def later_logits(runner: NativeRunner, disturb: bool) -> list[Tensor]:
    """Steps with trees and partial acceptance, forks and a reused prefix; between them other forwards, or none."""
    runner.open(0, TEXT)
    assert runner.reserve(0, len(TEXT) + 40)
    seen: list[Tensor] = []
    cached, skips = 0, itertools.cycle([PART, NONE, frozenset(runner.spec.sublayers)])
    for length in (20, 41, 42, 60):
        fed = tuple(TEXT[cached:length])
        tree = Tree((3, 4, 5, 6), (-1, 0, -1, 2)) if length != 41 else trees.chain_tree((8, 9))
        if disturb:
            for back in (0, min(cached, 17), cached):
                skip = next(skips)
                start = cached - back
                runner.skip_forward([Chain(0, start, (*TEXT[start:length], 11, 12, 13), 0)], skip)
                runner.check()
        seen.append(runner.forward([Segment(0, fed, tree)]).logits_RV)
        cached = runner.keep(0, ())
    runner.fork(0, 1)
    if disturb:
        runner.skip_forward([Chain(0, 20, tuple(TEXT[20:]), 0)], PART)
    runner.release(0)
    assert runner.open(2, [*TEXT, 1]) == len(TEXT), "the prefix is reusable as before"
    for name in (1, 2):
        assert runner.reserve(name, len(TEXT) + 1)
        seen.append(runner.forward([Segment(name, (1,))]).logits_RV)
    runner.check()
    return seen


def test_nothing_later_differs_by_a_bit(dtype: torch.dtype) -> None:
    """Cached rows are put back, scratch rows written anew (U5): logits are those of a run without such forwards."""
    undisturbed = later_logits(make(dtype), disturb=False)
    for before, after in zip(undisturbed, later_logits(make(dtype), disturb=True), strict=True):
        assert torch.equal(before, after)


def test_such_a_forward_can_not_be_kept() -> None:
    """Neither can one before it, whose rows it may have overwritten."""
    runner = make(torch.float32)
    opened(runner, 0, TEXT, 50)
    runner.forward([Segment(0, (1,))])
    runner.skip_forward([Chain(0, 50, (1,), 0)], PART)
    with pytest.raises(AssertionError, match="keep without a forward"):
        runner.keep(0, ())


def test_cached_rows_come_back_even_if_the_forward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make(torch.float32)
    opened(runner, 0, TEXT, 50)
    before = runner.forward([Segment(0, (1,))]).logits_RV
    run = runner._forward.run

    def fail(work: Work) -> Result:
        run(work)
        raise RuntimeError("out of luck")

    with monkeypatch.context() as broken:
        broken.setattr(runner._forward, "run", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            runner.skip_forward([Chain(0, 10, tuple(TEXT[10:50]), 0)], frozenset({("attention", 1)}))
    assert torch.equal(before, runner.forward([Segment(0, (1,))]).logits_RV)


@pytest.mark.parametrize(
    ("one", "skip", "words"),
    [
        (Chain(0, 50, (1,), 0), frozenset({("mlp", 3)}), "can't be skipped: layers are 0 to 2"),
        (Chain(0, 50, (VOCAB_SIZE,), 0), PART, "not in the vocabulary"),
        (Chain(1, 0, (1,), 0), PART, "reserve them first"),
        (Chain(0, 500, (1,) * 80, 0), PART, "beyond the context of 512"),
        (Chain(9, 0, (1,), 0), PART, "sequence 9 is not open"),
    ],
)
def test_what_can_not_be_run_is_said(one: Chain, skip: Skip, words: str) -> None:
    runner = make(torch.float32)
    opened(runner, 0, TEXT, 50)
    runner.open(1, [1])
    with pytest.raises(ValueError, match=words):
        runner.skip_forward([one], skip)
    runner.check()
