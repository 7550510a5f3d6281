"""The likeliest token of each row without its logits: the same token as by logits, and only where nobody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from parlay import LLM, SamplingParams
from parlay.compiled.build import LIBRARY, NAMES
from parlay.compiled.library import SWITCH
from parlay.engine import Engine
from parlay.models.config import DecoderConfig
from parlay.models.native import NativeRunner
from parlay.models.wrapped_runner import WrappedRunner
from parlay.types import NO_SKIP, Output, Runner, Segment, Skip, Tree

TEXT = tuple(range(40, 140))
TREE = Tree((7, 8, 9, 10, 11, 12, 13), (-1, 0, 0, 2, -1, 3, 5))
HEAD = "lm_head.weight"

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the package was installed without a C compiler")


def make(config: DecoderConfig, weights: dict[str, Tensor]) -> NativeRunner:
    return NativeRunner(config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=4096)


def outputs(runner: NativeRunner) -> tuple[Output, Output]:
    """The outputs of a text and a tree below it: with logits, then with the likeliest tokens alone."""
    runner.open(0, TEXT)
    assert runner.reserve(0, len(TEXT) + len(TREE))
    segment = Segment(0, TEXT, TREE)
    return runner.forward([segment]), runner.forward([segment._replace(likeliest=True)])


def with_head(checkpoint: tuple[DecoderConfig, dict[str, Tensor]], head_VH: Tensor, cap: float = 0.0) -> NativeRunner:
    """The model with another LM head, which has as many outputs as rows."""
    config, weights = checkpoint
    embedding_VH = weights["model.embed_tokens.weight"][: len(head_VH)]
    return make(
        replace(config, vocab_size=len(head_VH), tie_embeddings=False, logit_cap=cap),
        {**weights, "model.embed_tokens.weight": embedding_VH, HEAD: head_VH},
    )


@pytest.mark.parametrize("kernels", NAMES)
@pytest.mark.parametrize(("tokens", "cap"), [(0, 0.0), (1000, 30.0), (517, 0.0)])
def test_the_tokens_are_those_of_the_largest_logits(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]],
    kernels: str,
    tokens: int,
    cap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On each instruction set, whether or not outputs fill whole panels, with and without a cap."""
    monkeypatch.setenv(SWITCH, kernels)
    head_VH = checkpoint[1]["model.embed_tokens.weight"]
    known, found = outputs(with_head(checkpoint, head_VH[: tokens or len(head_VH)].clone(), cap))
    assert known.likeliest == ()
    assert found.likeliest == tuple(known.logits_RV.argmax(-1).tolist())
    assert len(found.logits_RV) == 0


def test_of_equal_logits_the_lowest_token_is_taken(checkpoint: tuple[DecoderConfig, dict[str, Tensor]]) -> None:
    """The head has each row four times, in panels of different threads."""
    head_VH = checkpoint[1]["model.embed_tokens.weight"][:500]
    known, found = outputs(with_head(checkpoint, head_VH.repeat(4, 1)))
    assert max(found.likeliest) < 500
    assert found.likeliest == tuple(known.logits_RV[:, :500].argmax(-1).tolist())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_come_back_where_a_row_has_no_usable_one(
    checkpoint: tuple[DecoderConfig, dict[str, Tensor]], value: float
) -> None:
    """Who reads them can say why."""
    head_VH = checkpoint[1]["model.embed_tokens.weight"].clone()
    head_VH[77] = value
    known, found = outputs(with_head(checkpoint, head_VH))
    assert found.likeliest == ()
    torch.testing.assert_close(found.logits_RV, known.logits_RV, rtol=0, atol=0, equal_nan=True)


def test_one_segment_that_wants_logits_gets_them_for_all(checkpoint: tuple[DecoderConfig, dict[str, Tensor]]) -> None:
    runner = make(*checkpoint)
    for name in (0, 1):
        runner.open(name, TEXT)
        assert runner.reserve(name, len(TEXT))
    out = runner.forward([Segment(0, TEXT, likeliest=True), Segment(1, TEXT)])
    assert out.likeliest == ()
    assert len(out.logits_RV) == 2 * len(TEXT)


class Noting(WrappedRunner):
    """Notes how many rows of logits each forward returned."""

    def __init__(self, inner: Runner, noted: list[int]) -> None:
        super().__init__(inner)
        self._noted = noted

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        out = super().forward(segments, taps, skip)
        self._noted.append(len(out.logits_RV))
        return out


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup", "auto"])
def test_greedy_requests_write_no_logits_and_the_same_text(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a request that wants log-probabilities, too, where logits are written for all."""
    noted: list[int] = []
    monkeypatch.setattr("parlay.llm.resources.Engine", lambda runner, *a, **k: Engine(Noting(runner, noted), *a, **k))
    greedy = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    prompt = "one two three one two three one two three one two"
    with LLM("parlay-mini", strategy=strategy, router_memory="off") as llm:
        (alone,) = llm.generate(prompt, greedy)
        assert not any(noted)
        beside, wanting = llm.generate([prompt, prompt], [greedy, replace(greedy, logprobs=2)])
        assert any(noted)
    assert alone.outputs[0].token_ids == beside.outputs[0].token_ids == wanting.outputs[0].token_ids
