"""Measures mixed traffic on the server: questions, chats, edits and calls that arrive at random, by strategy and load.

    python -m benchmarks.serving.mixed --data DIR                     # continues the last run
    python -m benchmarks.serving.mixed --data DIR --minutes 30        # no cell begins after half an hour
    python -m benchmarks.serving.mixed --quick --model parlay-mini    # few short requests, to see that it works

A short run of plain decoding with 16 conversations at once finds the server's capacity. A load is a share of it. In a
round each load is measured with every strategy in turn, on the same arrivals. Every text is compared with that of plain
decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.commands import begin, one_line_errors, open_results, results_path, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.serving.mixed_client import PATIENCE, Answer, play
from benchmarks.serving.mixed_page import ALONE, CAPACITY, FIRST_SECONDS, GOODPUT, RATE, SLOWER, page
from benchmarks.serving.mixed_trace import KINDS, Talk, arrivals, trace
from benchmarks.serving.served import served
from benchmarks.setup import FULL, SMOLLM2, Setup
from parlay.bench import records
from parlay.bench.loops import looped
from parlay.bench.records import PLAIN, Cell, Results, Row

STRATEGIES = (PLAIN, "prompt-lookup", "eagle3", "union:of=prompt-lookup+eagle3", "auto")
LOADS = (0.3, 0.6, 0.9)
AT_ONCE = 16
"""Conversations at once in the run that finds the capacity of plain decoding."""
_LONE = 8
"""Conversations that are decoded alone, for plain decoding's time per token."""

logger = logging.getLogger("benchmarks")


class Planned(NamedTuple):
    """One round of a strategy at a load."""

    number: int
    load: float
    cell: Cell


def plan(options: argparse.Namespace) -> Iterator[Planned]:
    """Yield all rounds in the order in which they are measured."""
    for number, load, strategy in product(range(options.rounds), options.loads, options.strategies):
        yield Planned(number, load, Cell(model=shown(options.model), strategy=strategy, workload=f"{load:g}"))


def shown(model: str) -> str:
    """Return the model's name without the folders of this machine."""
    return Path(model).resolve().name if Path(model).exists() else model


def lacking(options: argparse.Namespace, results: Results) -> list[Planned]:
    """Return the rounds of which the file has no row."""
    return [each for each in plan(options) if len(results.of(each.cell)) <= each.number]


class Measurement:
    """Measures one model's server with a list of conversations."""

    def __init__(self, results: Results, url: str, model: str, talks: Sequence[Talk], tokens: int) -> None:
        self._results, self._url, self._model, self._talks = results, url, model, talks
        self._shared = {"model": model, "max_tokens": tokens}
        self._texts: dict[tuple[str, str, int], str] = {}  # of plain decoding

    def run(self, left: Sequence[Planned], ends: float) -> None:
        """Measure until ``ends`` (of `time.monotonic`). Each round is written at once."""
        found = self._find_capacity()
        for strategy in dict.fromkeys(each.cell.strategy for each in left):
            with suppress(ValueError):  # told when it is measured
                self._play(strategy, "warm", self._talks[-len(KINDS) :], at_once=2)
        for each in left:
            if time.monotonic() >= ends:
                return
            try:
                self._results.add(self._measured(each, found))
            except ValueError as error:
                self._results.add([Row(cell=each.cell, round=each.number, error=str(error))])

    def _find_capacity(self) -> Row:
        """Return the row of plain decoding's capacity and of its time per token alone: from the file, or measured now.

        Its texts are needed in both cases, so the capacity run always takes place.
        """
        self._play(PLAIN, "warm", self._talks[-len(KINDS) :], at_once=2)
        answers = self._play(PLAIN, CAPACITY, self._talks, at_once=AT_ONCE)
        self._texts = {_key(answer): answer.text for answer in answers}
        cell = Cell(part=CAPACITY, model=self._model, strategy=PLAIN, workload="closed loop", concurrency=AT_ONCE)
        if not self._results.of(cell):
            alone = self._play(PLAIN, "alone", self._talks[:_LONE], at_once=1)
            seconds = max(answer.ended for answer in answers)
            per_token = _median([answer.per_token for answer in alone if answer.per_token is not None])
            values = {RATE: len(self._talks) / seconds, ALONE: per_token}
            row = replace(_row(cell, 0, answers), looped=self._looped(answers), values=values)
            self._results.add([row])
        return self._results.of(cell)[0]

    def _measured(self, planned: Planned, found: Row) -> list[Row]:
        """Return a row for all answers, and one for each kind. Raises ValueError if the strategy is refused."""
        number, load, cell = planned
        rate = load * found.values[RATE]
        logger.info("%s, load %g (%.2f talks a second), %s", self._model, load, rate, cell.strategy)
        starts = arrivals(len(self._talks), rate, seed=number)
        answers = self._play(cell.strategy, f"{load} {number}", self._talks, starts=starts)
        seconds = max(answer.ended for answer in answers) - starts[0]
        good = sum(_is_good(answer, SLOWER * found.values[ALONE]) for answer in answers)
        values = {RATE: rate, GOODPUT: good / seconds}
        rows = [replace(self._compared(cell, number, answers), seconds=seconds, values=values)]
        for kind in KINDS:
            own = [answer for answer in answers if answer.kind == kind]
            if own:
                rows.append(self._compared(replace(cell, part=kind), number, own))
        return rows

    def _compared(self, cell: Cell, number: int, answers: Sequence[Answer]) -> Row:
        same = sum(answer.text == self._texts[_key(answer)] for answer in answers)
        return replace(_row(cell, number, answers), same=same, of=len(answers))

    def _play(
        self,
        strategy: str,
        salt: str,
        talks: Sequence[Talk],
        *,
        starts: Sequence[float] | None = None,
        at_once: int | None = None,
    ) -> list[Answer]:
        """Send the conversations. With ``salt`` they find nothing in the cache that other runs have left."""
        body = {**self._shared, "strategy": strategy, "cache_salt": f"{strategy} {salt}"}

        async def played() -> list[Answer]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE, limits=limits) as client:
                return await play(client, talks, body, starts=starts, at_once=at_once)

        return asyncio.run(played())

    def _looped(self, answers: Sequence[Answer]) -> float:
        """Return the share of tokens that lie in a verbatim repeat within their own answer."""
        with httpx.Client(base_url=self._url, timeout=PATIENCE) as client:
            texts = [{"model": self._model, "prompt": a.text, "add_special_tokens": False} for a in answers if a.text]
            ids = [client.post("/tokenize", json=text).raise_for_status().json()["tokens"] for text in texts]
        return sum(looped(each) * len(each) for each in ids) / max(1, sum(map(len, ids)))


def _key(answer: Answer) -> tuple[str, str, int]:
    return answer.kind, answer.talk, answer.turn


def _is_good(answer: Answer, most: float) -> bool:
    """Return whether the answer began in time, and was fast enough for a person who reads along."""
    return answer.first <= FIRST_SECONDS and (answer.per_token is None or answer.per_token <= most)


def _row(cell: Cell, number: int, answers: Sequence[Answer]) -> Row:
    tokens = sum(answer.tokens for answer in answers)
    return Row(
        cell=cell,
        round=number,
        requests=len(answers),
        tokens=tokens,
        seconds=max(answer.ended for answer in answers),
        ttft=tuple(answer.first for answer in answers),
        itl=tuple(answer.per_token for answer in answers if answer.per_token is not None),
    )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.mixed", __doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument("--model", default=SMOLLM2, help=f"(default: {SMOLLM2})")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="begin no cell after this time (default: no limit)"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page of the existing rows")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), metavar="SPEC", help="default: five")
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS), metavar="X", help="default: .3 .6 .9")
    parser.add_argument("--talks", type=int, default=48, metavar="N", help="conversations in each cell (default: 48)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="longest answer in tokens (default: 96)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all cells (default: 3)")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, results: Results, talks: Sequence[Talk]) -> None:
    """Start a server and measure the rounds that the file lacks. Raises ValueError if the server fails."""
    if not (left := lacking(options, results)):
        return
    ends = time.monotonic() + 60 * options.minutes
    directory = Setup(FULL, options.data, options.cache).directory(options.model)
    name = shown(options.model)
    with served(f"{name}={directory}", "--router-memory", "off") as url:
        try:
            Measurement(results, url, name, talks, options.tokens).run(left, ends)
        except httpx.HTTPError as error:
            raise ValueError(f"the server answers no more ({error!r}): run this again to go on") from error


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parse(arguments)
    begin(options)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the server's process
    if options.quick:
        options.talks, options.tokens, options.rounds = 8, 24, 1
    data = " --data DIR" if options.data else ""
    command = f"python -m benchmarks.serving.mixed{data} --model {shown(options.model)}"
    with one_line_errors("serving.mixed"):
        if not options.page:
            talks = trace(options.data, options.talks)
            prompts = "published" if options.data else "built-in"
            settings = {"prompts": prompts, "talks": len(talks), "tokens": options.tokens}
            measure(options, open_results(options, "mixed", command, settings), talks)
        path = results_path(options, "mixed")
        write_page(path, page(*records.read(path)))


if __name__ == "__main__":
    main()
