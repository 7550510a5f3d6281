"""Measures the time of an engine step, by part of the step and by function.

    python -m benchmarks.profile_step                        # with a target that answers at once
    python -m benchmarks.profile_step --model parlay-mini    # with a real model, whose forward is timed separately

The table by part is timed without a profiler. The table by function is timed with one, which makes Python calls look
more expensive than they are: use its order, not its times.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.commands import one_line_errors
from benchmarks.figures.overhead import PARAMS, PROMPT_TOKENS, open_strategy, request, split, step_until_decoding
from benchmarks.figures.phases import TimedEngine
from benchmarks.figures.stub import StubCost, StubRunner
from benchmarks.options import add_threads_flag, command_parser
from parlay import models
from parlay.cost.timing import calibrate
from parlay.engine import Limits
from parlay.system import threads
from parlay.types import Cost, Runner, SamplingParams


def make_engine(runner: Runner, cost: Cost, strategy: str, params: SamplingParams, batch: int) -> TimedEngine:
    """Return an engine in the middle of decoding ``batch`` requests."""
    engine = TimedEngine(runner, cost, Limits(max_sequences=batch, max_rows=max(512, batch)))
    engine.time_forward()
    chosen = open_strategy(engine, strategy)
    for number in range(batch):
        engine.add(request(runner, number, params, prompt_for(runner)), chosen)
    step_until_decoding(engine, batch)
    return engine


def prompt_for(runner: Runner) -> tuple[int, ...]:
    """Return a prompt: the stub's own text, or any tokens for a real model."""
    if isinstance(runner, StubRunner):
        return runner.text(PROMPT_TOKENS)
    return tuple(5 + 7 * place % (runner.spec.vocab_size - 5) for place in range(PROMPT_TOKENS))


def parts(log: Sequence[Mapping[str, float]]) -> list[tuple[str, float, float]]:
    """Return the median microseconds of each part and its share of the step; the rest is scheduling and counting."""
    steps = [{"forward": step["forward"], **split(step, step["forward"])} for step in log]
    whole = median(step["step"] for step in log)
    rows = [(part, median(step[part] for step in steps)) for part in steps[0]]
    return [(part, 1e6 * seconds, seconds / whole) for part, seconds in rows]


def by_function(engine: TimedEngine, steps: int, lines: int) -> None:
    """Print the functions with the most time of their own, in microseconds per step."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        engine.step()
    profile.disable()
    print(f"\n{'us per step':>12} {'calls':>8}   function (own time, under the profiler)")
    stats = pstats.Stats(profile).get_stats_profile().func_profiles
    for name, entry in sorted(stats.items(), key=lambda item: -item[1].tottime)[:lines]:
        place = entry.file_name.rsplit("site-packages/", maxsplit=1)[-1].rsplit("src/", maxsplit=1)[-1]
        calls = float(str(entry.ncalls).split("/", maxsplit=1)[0]) / steps
        print(f"{1e6 * entry.tottime / steps:12.1f} {calls:8.1f}   {name} ({place}:{entry.line_number})")


@one_line_errors("profile_step")
def main() -> None:
    """Run the command."""
    parser = command_parser("profile_step", __doc__)
    parser.add_argument("--model", help="a model to run instead of the stub, which answers at once")
    parser.add_argument("--vocabulary", type=int, default=4096, help="vocabulary size of the stub")
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--tokens", choices=PARAMS, default="greedy", help="how tokens are chosen")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lines", type=int, default=30, help="functions to list; 0 for none")
    add_threads_flag(parser)
    options = parser.parse_args()
    threads.use(options.threads)
    runner: Runner = models.load(options.model) if options.model else StubRunner(options.vocabulary)
    cost = calibrate(runner) if options.model else StubCost()
    params = PARAMS[options.tokens]
    engine = make_engine(runner, cost, options.strategy, params, options.batch)
    engine.log.clear()
    for _ in range(options.steps):
        engine.step()
    print(
        f"{options.strategy}, batch {options.batch}, {options.tokens}, {runner.spec.name}; medians of {options.steps}"
    )
    for part, microseconds, share in parts(engine.log):
        print(f"{microseconds:12.1f} us {100 * share:5.1f} %   {part}")
    if options.lines:
        by_function(engine, options.steps, options.lines)


if __name__ == "__main__":
    main()
