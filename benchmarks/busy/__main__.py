"""Command line: Parlay and other engines beside 0, 1, 2 and 4 processes that burn a core each, interleaved."""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.busy.page import page
from benchmarks.busy.plans import FULL, QUICK, Scale, plans
from benchmarks.commands import one_line_errors, open_results, show_log, write_page
from benchmarks.options import CACHE
from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.decoder import PeerDecoder
from benchmarks.peers.protocol import Task
from benchmarks.peers.venvs import add_venv_flags, find_all
from benchmarks.peers.worker import Limits
from benchmarks.setup import DRAFT, MINI, SMOLLM2, SMOLLM2_BF16, WIDE, Setup
from benchmarks.setup import FULL as USUAL
from parlay.bench.host import busy_cores
from parlay.bench.records import Results
from parlay.bench.runner import Bench
from parlay.bench.wave import Decoder
from parlay.llm import LLM
from parlay.models.fetch.resolving import resolve

ALL_PEERS = ("llama-cpp-python", "transformers", "openvino-genai")
QUICK_PEERS = ("llama-cpp-python",)
MINUTES, QUICK_MINUTES = 30.0, 1.5
LONGEST = 1024
"""Tokens of prompt and answer for which other engines make room."""
BUSY_ALREADY = 0.5
"""Cores that others keep busy, from which a run says so."""

logger = logging.getLogger("benchmarks")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--model", nargs="+", help=f"default: {SMOLLM2}")
    parser.add_argument("--peers", nargs="*", choices=ALL_PEERS, metavar="ENGINE", help=f"{ALL_PEERS}")
    add_venv_flags(parser)
    parser.add_argument("--busy", nargs="+", type=int, metavar="N", help="processes beside; 0 is always among them")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"default: {FULL.rounds}")
    parser.add_argument("--minutes", type=float, metavar="N", help="no round begins that would end later (default: 30)")
    parser.add_argument("--quick", action="store_true", help="one model, one peer, 0 and 2 busy processes")
    parser.add_argument("--fresh", action="store_true", help="start the file anew instead of going on with it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="results; the page goes beside it, as .md")
    parser.add_argument("--cache", type=Path, default=CACHE, metavar="DIR", help=f"models made (default: {CACHE})")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    show_log()
    with one_line_errors("busy"):
        results = open_results(options, "busy", command(options))
    if (others := busy_cores()) > BUSY_ALREADY:
        logger.warning("others keep %.1f cores of this machine busy", others)
    ends = time.monotonic() + 60 * (options.minutes or (QUICK_MINUTES if options.quick else MINUTES))
    for model in options.model or [SMOLLM2]:
        measure(model, options, results, ends)
    write_page(results.path, page(results.header, results.rows))


def measure(model: str, options: argparse.Namespace, results: Results, ends: float) -> None:
    """All rounds of one model, as far as there is time."""
    setup = Setup(USUAL, None, options.cache)
    directory = setup.directory(model)
    scale = scale_of(options)
    with ExitStack() as stack:
        llm = stack.enter_context(
            LLM(str(directory), draft_model=DRAFT if model == WIDE else None, router_memory="off")
        )
        dense = str(setup.directory(SMOLLM2_BF16)) if model == SMOLLM2 else ""
        decoders = peer_decoders(directory, dense, options, stack)
        name = model if model in (MINI, WIDE) else directory.name
        benches = [Bench(llm, plan, results, decoders) for plan in plans(llm, name, scale, tuple(decoders))]
        took = 0.0
        for turn in range(scale.rounds):
            began = time.monotonic()
            if took and began + took > ends:
                logger.info("%s: %d rounds are what there was time for", model, turn)
                return
            for bench in benches:
                bench.run_round()
            took = time.monotonic() - began
            logger.info("%s: round %d of %d took %.0f s", model, turn + 1, scale.rounds, took)


def scale_of(options: argparse.Namespace) -> Scale:
    """As asked for."""
    usual = QUICK if options.quick else FULL
    busy = tuple(sorted({0, *(options.busy or usual.busy)}))
    return replace(usual, busy=busy, rounds=options.rounds or usual.rounds)


def peer_decoders(directory: Path, dense: str, options: argparse.Namespace, stack: ExitStack) -> Mapping[str, Decoder]:
    """By engine. One that is not installed is a row that says so. ``dense``: see `Task`."""
    task = Task(
        model=str(directory),
        draft=str(resolve(DRAFT)),
        threads=len(os.sched_getaffinity(0)),
        longest=LONGEST,
        cache=str(options.cache.absolute() / "peers"),
        dense=dense,
    )
    wanted = options.peers if options.peers is not None else QUICK_PEERS if options.quick else ALL_PEERS
    pythons, limits = find_all(wanted, options), Limits(answer=180.0)
    return {
        peer.engine: PeerDecoder(peer, pythons[peer.engine], task, limits, stack)
        for peer in PEERS
        if peer.engine in pythons
    }


def command(options: argparse.Namespace) -> str:
    """The command to repeat, without folder names of this machine."""
    words = ["python -m benchmarks.busy --venvs DIR"]
    words += [f"--model {' '.join(Path(model).name for model in options.model)}"] if options.model else []
    words += [f"--peers {' '.join(options.peers)}"] if options.peers is not None else []
    words += [f"--busy {' '.join(map(str, options.busy))}"] if options.busy else []
    words += ["--quick"] if options.quick else []
    return " ".join(words)


if __name__ == "__main__":
    main()
