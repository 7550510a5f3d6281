"""Cached keys that move to other places: what is found, what it costs, and that nobody gets them who did not ask."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch

from parlay import SamplingParams
from parlay.compiled.library import SWITCH
from parlay.engine import Engine
from parlay.engine.moving import runs_of
from parlay.models.config import DecoderConfig, RopeConfig
from parlay.models.native import NativeRunner
from parlay.testing.conformance.stage import Steady
from parlay.types import Event, Exactness, Metrics, Move, NoiseKey, Request, shared_length
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
    assert runs_of([], text, 8, 0) == runs_of([1, 2], [], 1, 0) == []


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_those_that_comparing_all_places_finds(seed: int) -> None:
    chance = random.Random(seed)
    text = chance.choices(range(3), k=chance.randint(1, 300))
    tokens = [*chance.choices(range(3), k=40), *text[chance.randrange(len(text)) :], *chance.choices(range(3), k=40)]
    least, place, expected = chance.randint(1, 12), chance.randint(0, 30), list[Move]()
    begun = place
    while place + least <= len(tokens):
        starts = [at for at in range(len(text)) if text[at : at + least] == tokens[place : place + least]]
        if not starts or len(text) - starts[0] < least:
            place += 1
            continue
        length = shared_length(tokens[place:], text[starts[0] :])
        expected.append(Move(place, starts[0], length))
        place += length
    assert runs_of(tokens, text, least, begun) == expected


def test_searching_long_texts_takes_no_time_that_others_would_wait() -> None:
    """A text of 30,000 tokens; the machine decides about seconds, so they are those of one pass over its numbers."""
    chance = random.Random(1)
    text, tokens = (chance.choices(range(30_000), k=30_000) for _ in range(2))

    def seconds(call: Callable[[], object]) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    pass_over = min(seconds(lambda: {(token,): place for place, token in enumerate(text)}) for _ in range(5))
    assert min(seconds(lambda: runs_of(tokens, text, 256, 0)) for _ in range(5)) < 10 * pass_over


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


def test_what_is_moved_again_after_a_preemption_is_not_counted_again(engine: Engine) -> None:
    longer, runner = [1, *BEFORE, 6, 2, *BEHIND, 4], engine.runner
    answer(engine, TYPED, 16)
    runner.open(-1, TYPED, "moved")  # it holds what moves, while all else is given up
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    request = Request(id="one", prompt=tuple(longer), params=params, key=NoiseKey(1), reuse=16, salt="moved")
    engine.add(request, PLAIN)
    for _ in range(3):
        engine.step()
    engine.scheduler._preempt(engine.scheduler.running[0])
    assert isinstance(runner, NativeRunner)
    while runner.store.drop_spare():
        pass
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    assert events[-1].metrics is not None
    assert events[-1].metrics.cached_tokens == len(longer) - 10
