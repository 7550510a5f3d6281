"""A model that has no numbers for one token: who reads it ends, and nobody else notices, not even who drafts it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from parlay.engine import Engine, Limits
from parlay.models.families.reading import read_config
from parlay.models.native import NativeRunner
from parlay.router.policies import Fixed
from parlay.sampling.rules import SharedNoise
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.conformance.stage import Steady
from parlay.testing.toy_drafters import ToyDrafter
from parlay.types import Draft, NoiseKey, Request, SamplingParams, SequenceView, Strategy, Tree
from tests.engine.test_step import run
from tests.engine.toy_engine import PLAIN, committed

SICK = 7
"""The token whose embedding is NaN. Nobody chooses it."""
WELL = [
    token for token in torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).tolist() if token != SICK
]


def request(name: str, prompt: list[int], temperature: float = 0.0) -> Request:
    params = SamplingParams(temperature=temperature, max_tokens=6, logit_bias={SICK: -100.0})
    return Request(id=name, prompt=tuple(prompt), params=params, key=NoiseKey(3))


@pytest.mark.parametrize("compiled", ["", "0"])
def test_nan_stays_with_the_requests_that_read_it(
    compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests use the same memory. Beside the right token, and behind it, everybody drafts the sick one."""
    if compiled:
        monkeypatch.setenv("PARLAY_COMPILED", compiled)
    weights = dict(save_random("llama", tmp_path).state_dict())
    weights["model.embed_tokens.weight"][SICK] = math.nan

    def engine() -> Engine:
        config, room = read_config(tmp_path), 400
        runner = NativeRunner(config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=room)
        return Engine(runner, Steady(), Limits())

    well = [request(f"well{size}", WELL[:size], 0.8 * (size % 2)) for size in (3, 17, 40)]
    late = [request(f"late{size}", WELL[-size:]) for size in (4, 33)]
    sick = [request("first", [SICK, 3]), request("amid", [*WELL[:30], SICK, *WELL[:4]]), request("last", [1, SICK])]
    texts: dict[str, list[int]] = {}
    target = engine()
    for one in (*well, *late):
        target.add(one, PLAIN)
        texts[one.id] = committed(run(target)[one.id])
        assert len(texts[one.id]) == 6

    def guess(view: SequenceView, budget: int) -> Draft:
        text, at = texts.get(view.request.id, []), len(view.tokens) - len(view.request.prompt)
        tree = Tree((SICK, text[at], SICK)[:budget], (-1, -1, 1)[:budget]) if at < len(text) else Tree((SICK,), (-1,))
        return Draft(tree, sources=("toy",) * len(tree))

    drafting = Strategy("toy", (ToyDrafter(guess),), SharedNoise(), Fixed(3))
    for strategy in (PLAIN, drafting):
        target = engine()
        for one in (*sick[:1], *well, *sick[1:]):
            target.add(one, strategy)
        events = run(target)
        for one in late:
            target.add(one, strategy)
        events |= run(target)
        for one in sick:
            assert "logits are NaN" in (events[one.id][-1].error or "")
            assert committed(events[one.id]) == []
        assert {one.id: committed(events[one.id]) for one in (*well, *late)} == texts
