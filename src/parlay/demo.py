"""`parlay demo`: plain decoding against the default strategy, and strategies that do not pay, on one screen.

Everything is greedy. A first plain run warms up and sets the length: the tokens before the text falls into a verbatim
loop, or as many as a slow machine writes in a second or two. Then the contenders take turns, and the median of each
one's rates counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TextIO

from parlay import threads
from parlay.bench.loops import first_loop
from parlay.demo_prompts import CALL, COPY, EDIT, PROSE, Workload
from parlay.llm import DEFAULT_STRATEGY, LLM, Stream
from parlay.outputs import CompletionOutput, StreamEvent
from parlay.strategies.catalogue import catalogue
from parlay.terminal import Excerpt, Tint
from parlay.types import Exactness, ParlayError, SamplingParams

PLAIN = "none"
WIDTH = 80
MAX_TOKENS = 160
EXCERPT_LINES = 12
FIRST_SECONDS, FIRST_TOKENS = 1.5, 32
SECONDS_PER_CONTENDER = 0.7
MOST_ROUNDS = 7
SLOW_LINES = 5
FAREWELL = """
Tokens per second are those after the prompt. For your own model:
  parlay demo --model HUB_ID_OR_FOLDER
  parlay generate "Once upon a time" --model HUB_ID_OR_FOLDER"""


@dataclass(frozen=True, slots=True)
class Contender:
    """What one strategy did with one workload: its median rate, and the sample of its last run."""

    tokens_per_second: float
    sample: CompletionOutput

    def same_text(self, other: Contender) -> bool:
        return self.sample.token_ids == other.sample.token_ids


def demonstrate(llm: LLM, out: TextIO) -> bool:
    """Print the comparison, at most 40 lines. False when a strategy that promises the same bits broke its promise."""
    print(_head(llm), file=out)
    _show_text(llm, out)
    print(f"\n{'':12}{'':>8}{'tokens/s':>18}{'':>9}{'tokens':>9}{'same':>7}", file=out)
    print(f"{'':12}{'tokens':>8}{'plain':>9}{'fast':>9}{'ratio':>9}{'a step':>9}{'text':>7}", file=out)
    honest = True
    for workload in (EDIT, CALL, COPY, PROSE):
        plain, fast = _race(llm, workload, [PLAIN, DEFAULT_STRATEGY])
        honest &= _keeps_promise(fast, plain)
        print(_row(workload, plain, fast), file=out, flush=True)
    print("\nThe prose again, always drafting; the default policy drafts only while it pays:", file=out)
    for line, kept in _forced(llm):
        honest &= kept
        print(line, file=out, flush=True)
    print(FAREWELL, file=out)
    return honest


def _head(llm: LLM) -> str:
    spec = llm.runner.spec
    where = f"{spec.dtype} on {spec.device}, {threads.count()} CPU threads"
    return f"{spec.name[: WIDTH - len(where) - 2]}: {where}"


def _show_text(llm: LLM, out: TextIO) -> None:
    """The edit as it is written by the default strategy."""
    tint = Tint(out)
    note = "copied tokens are tinted" if tint.enabled else "its first lines"
    print(f"\nAn edit, decoded with {DEFAULT_STRATEGY} ({note}):\n", file=out)
    excerpt = Excerpt(out, tint, EXCERPT_LINES, WIDTH)
    stream = llm.stream(_prompt(llm, EDIT), _params(MAX_TOKENS), strategy=DEFAULT_STRATEGY)
    for event in _first_seconds(stream):
        for piece in event.pieces:
            excerpt.write(piece.text, piece.source)
    excerpt.end()


# --------------------------------------------------------------------------------------------------------- measuring


def _race(llm: LLM, workload: Workload, strategies: Sequence[str]) -> list[Contender]:
    """The strategies take turns on the workload, after a plain run that sets the length."""
    stream = llm.stream(_prompt(llm, workload), _params(MAX_TOKENS), strategy=PLAIN, store=False)
    for _ in _first_seconds(stream):
        pass
    first = stream.output.outputs[0]
    length = first_loop(first.token_ids)
    rounds = int(SECONDS_PER_CONTENDER / max(first.metrics.seconds, 1e-3))
    runs = [
        [_run(llm, workload, strategy, length) for strategy in strategies]
        for _ in range(min(max(rounds, 1), MOST_ROUNDS))
    ]
    return [_contender(samples) for samples in zip(*runs, strict=True)]


def _first_seconds(stream: Stream) -> Iterator[StreamEvent]:
    """Its events until the time of a first run is over, so that a large model on a small machine takes no hour."""
    deadline = time.perf_counter() + FIRST_SECONDS
    tokens = 0
    with closing(stream):
        for event in stream:
            yield event
            tokens += len(event.token_ids)
            if tokens >= FIRST_TOKENS and time.perf_counter() > deadline:
                break


def _contender(samples: Sequence[CompletionOutput]) -> Contender:
    return Contender(statistics.median(sample.metrics.tokens_per_second for sample in samples), samples[-1])


def _run(llm: LLM, workload: Workload, strategy: str, tokens: int) -> CompletionOutput:
    stream = llm.stream(_prompt(llm, workload), _params(tokens), strategy=strategy, store=False)
    for _ in stream:
        pass
    return stream.output.outputs[0]


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens)


def _prompt(llm: LLM, workload: Workload) -> str | list[dict[str, str]]:
    has_chat = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    return workload.messages if workload.is_chat and has_chat else workload.text


# ---------------------------------------------------------------------------------------------------------- reporting


def _row(workload: Workload, plain: Contender, fast: Contender) -> str:
    return (
        f"{workload.name:12}{fast.sample.metrics.completion_tokens:>8}{plain.tokens_per_second:>9.0f}"
        f"{fast.tokens_per_second:>9.0f}{_ratio(fast, plain):>8.2f}x{fast.sample.metrics.tokens_per_step:>9.2f}"
        f"{'yes' if fast.same_text(plain) else 'NO':>7}"
    )


def _forced(llm: LLM) -> Iterator[tuple[str, bool]]:
    """A line for one strategy of each family, always drafting, and whether it kept its promise."""
    firsts: dict[str, str] = {}
    for name, entry in catalogue().items():
        if "policy" in entry.parameters and "file" not in entry.parameters:
            firsts.setdefault(entry.family, name)
    for name in list(firsts.values())[:SLOW_LINES]:
        strategy = f"{name}:policy=fixed"
        try:
            plain, forced = _race(llm, PROSE, [PLAIN, strategy])
        except ParlayError as reason:
            yield f"{strategy:37} not run: {reason}"[:WIDTH], True
            continue
        yield (
            f"{strategy:29}{forced.tokens_per_second:>9.0f}{_ratio(forced, plain):>8.2f}x"
            f"{forced.sample.metrics.tokens_per_step:>9.2f}{'yes' if forced.same_text(plain) else 'NO':>7}",
            _keeps_promise(forced, plain),
        )


def _ratio(fast: Contender, plain: Contender) -> float:
    return fast.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0


def _keeps_promise(contender: Contender, plain: Contender) -> bool:
    return contender.sample.exactness is not Exactness.BITS or contender.same_text(plain)
