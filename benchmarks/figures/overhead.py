"""Measures the cost of an engine step without the forward, with a target that answers at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median

from benchmarks.figures.phases import TimedEngine
from benchmarks.figures.stub import StubCost, StubRunner
from benchmarks.setup import Setup
from parlay.bench.records import Cell, Results, Row
from parlay.drafters.resources import Resources
from parlay.engine import Limits
from parlay.options import UsageError
from parlay.strategies.built import StrategyCache
from parlay.types import NoiseKey, Request, Runner, SamplingParams, Strategy

BATCHES = (1, 32)
VOCABULARIES: Mapping[int, int] = {4096: 3, 151_936: 1}
"""The vocabulary sizes of the built-in models and of Qwen models, and the number of rounds for each."""
STRATEGIES = ("none", "prompt-lookup", "prompt-lookup:policy=fixed")
PARAMS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, ignore_eos=True),
    "sampled, top-p 0.95, top-k 50": SamplingParams(temperature=1.0, top_p=0.95, top_k=50, ignore_eos=True),
}
PROMPT_TOKENS = 256
CELL_SECONDS = 1.0
FEWEST_STEPS = 5
WARM_UP_STEPS = 4

logger = logging.getLogger(__name__)


def overhead(setup: Setup, results: Results) -> None:
    """Measure every combination of strategy, batch size, sampling parameters and vocabulary."""
    for vocab_size, rounds in VOCABULARIES.items():
        cells = list(cells_of(vocab_size))
        done = min(len(results.of(cell)) for cell in cells)
        for turn in range(done, min(rounds, setup.scale.rounds)):
            runner = StubRunner(vocab_size)
            results.add([overhead_row(cell, turn, runner, setup.scale.steps) for cell in cells])
            logger.info("overhead: vocabulary %d, round %d", vocab_size, turn)


def cells_of(vocab_size: int) -> Iterator[Cell]:
    """Yield the cells of a vocabulary. A cell's workload names the sampling parameters, and its model is the stub."""
    for batch, way, name in product(BATCHES, PARAMS, STRATEGIES):
        yield Cell(part="overhead", model=f"stub {vocab_size}", strategy=name, workload=way, concurrency=batch)


def overhead_row(cell: Cell, turn: int, runner: StubRunner, steps: int) -> Row:
    """Measure one cell in one round."""
    values = measure(runner, cell.strategy, PARAMS[cell.workload], cell.concurrency, steps)
    return Row(cell=cell, round=turn, requests=cell.concurrency, values=values)


def measure(runner: StubRunner, name: str, params: SamplingParams, batch: int, steps: int) -> dict[str, float]:
    """Return milliseconds per step, by part of the step and without the forward, and the tokens per step and
    sequence."""
    engine = TimedEngine(runner, StubCost(), Limits(max_sequences=batch, max_rows=max(512, batch)))
    strategy = open_strategy(engine, name)
    prompt = runner.text(PROMPT_TOKENS)  # ends with the target's own text, so that there is something to look up
    for number in range(batch):
        engine.add(request(runner, number, params, prompt), strategy)
    step_until_decoding(engine, batch)
    log: list[dict[str, float]] = []
    tokens = 0
    deadline = time.perf_counter() + CELL_SECONDS
    while len(log) < steps and (len(log) < FEWEST_STEPS or time.perf_counter() < deadline):
        forward = runner.forward_seconds
        tokens += sum(len(event.committed) for event in engine.step())
        log.append(split(engine.log[-1], runner.forward_seconds - forward))
    for number in range(batch):
        engine.abort(f"request-{number}")
    return medians(log) | {"tokens": tokens / len(log) / batch}


def split(seconds: Mapping[str, float], forward: float) -> dict[str, float]:
    """Return the seconds of each part of a step. ``besides`` is all but the forward, ``rest`` is scheduling and
    counting."""
    parts = {part: value for part, value in seconds.items() if part not in ("step", "forward")}
    rest = seconds["step"] - sum(parts.values())
    parts["verify"] -= forward
    return {"besides": seconds["step"] - forward, **parts, "rest": rest, "forward": forward}


def medians(log: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median milliseconds of each part, and the 90th percentile of ``besides``."""
    middle = {part: 1000 * median(step[part] for step in log) for part in log[0]}
    besides = sorted(step["besides"] for step in log)
    return middle | {"besides p90": 1000 * besides[len(besides) * 9 // 10]}


def open_strategy(engine: TimedEngine, name: str) -> Strategy:
    """Build the strategy as `LLM` does."""

    def no_model(model: str) -> Runner:
        raise UsageError(f"no draft model here, asked for {model!r}")

    return StrategyCache(Resources(engine.runner.spec.vocab_size, no_model), engine.cost).get(name)


def request(runner: Runner, number: int, params: SamplingParams, prompt: tuple[int, ...]) -> Request:
    """Make a request that goes on until the context is full."""
    unbounded = replace(params, max_tokens=runner.spec.max_context - len(prompt))
    return Request(id=f"request-{number}", prompt=prompt, params=unbounded, key=NoiseKey(number))


def step_until_decoding(engine: TimedEngine, batch: int) -> None:
    """Run the prefill and a few more steps."""
    while sum(1 for event in engine.step() if event.committed) < batch:
        pass
    for _ in range(WARM_UP_STEPS):
        engine.step()
