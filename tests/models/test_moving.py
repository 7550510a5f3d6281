"""Cached keys that move to other places: what is found, what it costs, and that nobody gets them who did not ask."""

from __future__ import annotations

import pytest
import torch

from parlay import SamplingParams
from parlay.compiled.library import SWITCH
from parlay.engine import Engine
from parlay.engine.moving import runs_of
from parlay.models.config import DecoderConfig, RopeConfig
from parlay.models.native import NativeRunner
from parlay.testing.conformance.stage import Steady
from parlay.types import Event, Exactness, Metrics, Move, NoiseKey, Request
from tests.engine.toy_engine import PLAIN
from tests.models.test_bits import KERNELS, random_weights, runs_here

ONE_LAYER = DecoderConfig(
    architecture="test", vocab_size=97, num_layers=1, rms_norm_eps=1e-6, max_context=1024,
    hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32, rope=RopeConfig(theta=1e4),
)  # fmt: skip
"""Keys of its layer depend on their own token and position alone: so moving them loses nothing but roundings."""

BEFORE, BEHIND = [5, 9, 11, 3] * 5, [7 + place * 13 % 83 for place in range(40)]
TYPED = [1, *BEFORE, 2, *BEHIND, 4]


def test_runs_are_found_in_order_and_leave_out_what_is_too_short() -> None:
    text = [*range(10, 30), *range(50, 60)]
    assert runs_of([1, *range(12, 25), 2, *range(50, 58)], text, 8, 0) == [Move(1, 2, 13), Move(15, 20, 8)]
    assert runs_of([1, *range(12, 25), 2, *range(50, 58)], text, 9, 0) == [Move(1, 2, 13)]
    assert runs_of([*range(12, 25)], text, 8, 3) == [Move(3, 5, 10)], "what is cached already is not moved"
    assert runs_of([1, 2, 3], text, 8, 0) == []


@pytest.fixture(params=[name for name in KERNELS if runs_here(name)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv(SWITCH, str(request.param))
    weights, device = random_weights(ONE_LAYER), torch.device("cpu")
    runner = NativeRunner(ONE_LAYER, weights, dtype=torch.float32, device=device, max_tokens_cached=1024)
    return Engine(runner, Steady(), moving=runner)


def answer(engine: Engine, tokens: list[int], reuse: int) -> tuple[list[Event], Metrics]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=3)
    salt = "moved" if reuse else ""
    request = Request(id="one", prompt=tuple(tokens), params=params, key=NoiseKey(1), reuse=reuse, salt=salt)
    engine.add(request, PLAIN)
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
        engine.runner.check()
    metrics = events[-1].metrics
    assert metrics is not None
    return events, metrics


def test_a_run_behind_a_typed_token_is_moved_and_serves_as_if_computed(engine: Engine) -> None:
    """The text of a one-layer model, and its log-probabilities but for roundings."""
    longer = [1, *BEFORE, 6, 2, *BEHIND, 4]
    plain, usual = answer(engine, longer, 0)
    answer(engine, TYPED, 16)
    moved, metrics = answer(engine, longer, 16)
    assert metrics.cached_tokens == len(longer) - 10, "all but the typed token, the first 8 of the run, and the root"
    assert (usual.exactness is Exactness.LOSSY, metrics.exactness) == (False, Exactness.LOSSY)
    for event, other in zip(moved[-6:], plain[-6:], strict=True):
        for one, known in zip(event.committed, other.committed, strict=True):
            assert one.token == known.token
            found, wanted = (
                torch.tensor([each for _, each in logprobs.top]) for logprobs in (one.logprobs, known.logprobs)
            )
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_only_long_runs_move_and_only_for_requests_that_allow_it(engine: Engine) -> None:
    """Prefixes that hold moved keys are found by requests alone that allow them."""
    longer = [1, *BEFORE, 6, 2, *BEHIND, 4]
    answer(engine, TYPED, 16)
    answer(engine, longer, 16)
    assert answer(engine, longer, 0)[1].cached_tokens == 0
    assert answer(engine, [1, *BEFORE, 6, 6, 2, *BEHIND, 4], 64)[1].cached_tokens == len(BEFORE) + 2
