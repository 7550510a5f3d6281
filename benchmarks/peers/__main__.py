"""Command line: measures Parlay and other engines on the same checkpoint, prompts, lengths, threads and precision.

It makes the environments that are missing, measures in interleaved rounds, continues an interrupted run, and writes the
page of the rows.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.commands import begin, one_line_errors, results_path, write_page
from benchmarks.options import CACHE, command_parser
from benchmarks.peers.catalogue import PEERS, STRATEGIES, Peer
from benchmarks.peers.decoder import PeerDecoder
from benchmarks.peers.page import page
from benchmarks.peers.protocol import Task
from benchmarks.peers.venvs import add_venv_flags, find_all
from benchmarks.peers.worker import Limits
from benchmarks.setup import DRAFT, MINI, SMOLLM2, WIDE, Scale, Setup
from parlay.bench import workloads
from parlay.bench.provenance import provenance
from parlay.bench.records import Results, Row, System, read
from parlay.bench.runner import Bench, BenchPlan
from parlay.bench.workloads import Workload
from parlay.llm import LLM
from parlay.models.fetch.resolving import resolve
from parlay.models.gguf import reader as gguf
from parlay.models.gguf.mixtures import FILE_TYPES
from parlay.options import LoadOptions

KINDS = ("edit", "copy", "calls", "maths", "code", "prose")
DRAFTS = {WIDE: DRAFT, MINI: DRAFT}
"""The draft models that are used without ``--draft``, by target."""
LONGEST = 3072
"""The most tokens of prompt and answer together; all engines make room for them."""

logger = logging.getLogger("benchmarks")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("peers", __doc__)
    engines = [peer.engine for peer in PEERS]
    add_venv_flags(parser)
    parser.add_argument("--peers", nargs="*", choices=engines, default=engines, metavar="ENGINE", help=str(engines))
    parser.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        help="measure only these modes of the peers, as MODE or ENGINE:MODE (default: all that can run)",
    )
    parser.add_argument("--model", nargs="+", default=[SMOLLM2], help=f"names, folders or GGUF files ({SMOLLM2})")
    parser.add_argument("--draft", metavar="MODEL", help="draft model for all models, with the same tokenizer")
    parser.add_argument(
        "--strategies", nargs="+", default=STRATEGIES, metavar="NAME", help=f"Parlay's ({' '.join(STRATEGIES)})"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts; without it, built-in ones")
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="as in parlay bench (default: spec-bench with --data)"
    )
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each kind of text (default: 2)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer in tokens (default: 64)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds over all prompts with the peers (default: 2)")
    parser.add_argument(
        "--own-rounds", type=int, default=5, help="rounds in all of Parlay's strategies and plain decoding (default: 5)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (default: 2)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=12,
        help="begin no round that would end later; one always runs (default: 12 for each model)",
    )
    parser.add_argument(
        "--load-limit",
        type=float,
        default=420,
        metavar="SECONDS",
        help="time limit of a mode's first answer (default: 420)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="use one prompt of each kind and short answers, to see that it works"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page of the existing results")
    parser.add_argument("--fresh", action="store_true", help="overwrite the file of results instead of continuing it")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file of results; the page is written beside it, as .md"
    )
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help=f"folder of the models made (default: {CACHE})"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and write the page."""
    options = parse()
    begin(options)
    # Another file for another number of threads: rows of the two don't mix.
    path = results_path(options, f"peers-{options.threads}-threads" if options.threads != 2 else "peers")
    with one_line_errors("peers"):
        header, rows = read(path) if options.page else run(options, path)
    write_page(path, page(header, rows))


def run(options: argparse.Namespace, path: Path) -> tuple[dict[str, Any], Sequence[Row]]:
    """Measure all models into ``path``. Raises ValueError when Parlay can't run, or the file has another run's rows."""
    results = Results(path, provenance(command(options)), fresh=options.fresh)
    setup = Setup(scale(options), options.data, options.cache.absolute())
    pythons = find_all(options.peers, options)
    for model in options.model:
        measure(model, setup, options, pythons, results)
    return results.header, results.rows


def scale(options: argparse.Namespace) -> Scale:
    """Return the amounts given by flags; with ``--quick``, the smallest."""
    if options.quick:
        return Scale(prompts=1, wide_prompts=1, tokens=24, rounds=1)
    return Scale(prompts=options.prompts, wide_prompts=options.prompts, tokens=options.tokens, rounds=options.rounds)


def texts(model: str, setup: Setup, options: argparse.Namespace) -> tuple[Workload, ...]:
    """Load the prompts: the workloads named, else Spec-Bench if there is ``--data``, else built-in kinds of text."""
    names = options.workloads or (["spec-bench"] if options.data else None)
    if names is None:
        return setup.workloads(model, KINDS)
    loaded = workloads.load(names, setup.scale.prompts, options.data)
    return tuple(replace(each, name=each.name.removeprefix("spec-bench/")) for each in loaded)


def measure(
    model: str, setup: Setup, options: argparse.Namespace, pythons: Mapping[str, Path | str], results: Results
) -> None:
    """Measure all engines on one model. Raises ValueError if Parlay can't run it."""
    peers = [peer for peer in PEERS if peer.engine in pythons]
    against = (System(peer.engine, mode) for peer in peers for mode in modes(peer, model, options))
    draft = options.draft or DRAFTS.get(model)
    plan = BenchPlan(
        model=Path(model).name,
        strategies=tuple(options.strategies),
        workloads=texts(model, setup, options),
        against=tuple(against),
        rounds=setup.scale.rounds,
        max_tokens=setup.scale.tokens,
    )
    task = Task(
        model=str(setup.directory(model)),
        draft=str(resolve(draft)) if draft else "",
        threads=options.threads,
        longest=LONGEST,
        cache=str(setup.cache / "peers"),
        dense=str(setup.dense(model)) if setup.directory(model).suffix == ".gguf" else "",
        dense_draft=str(setup.dense(draft)) if draft else "",
    )
    if task.model.endswith(".gguf"):
        task = replace(task, precision=file_type(Path(task.model)))
    limits = Limits(load=options.load_limit)
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(task.model, draft_model=task.draft or None, load=LoadOptions(dtype="bfloat16")))
        decoders = {peer.engine: PeerDecoder(peer, pythons[peer.engine], task, limits, stack) for peer in peers}
        Bench(llm, plan, results, decoders).run(ends=time.monotonic() + 60 * options.minutes)
        own = setup.scale.rounds if options.quick else options.own_rounds
        Bench(llm, replace(plan, against=(), rounds=own), results).run()


def file_type(file: Path) -> str:
    """Return the name of a GGUF file's weight types, as in Q4_K_M."""
    number = gguf.read(file).keys.get("general.file_type")
    return next((name for name, kind in FILE_TYPES.items() if kind.number == number), "GGUF")


def modes(peer: Peer, model: str, options: argparse.Namespace) -> list[str]:
    """Return the modes that flags name, without those that lack a draft model."""
    able = [mode for mode in peer.modes if options.draft or model in DRAFTS or mode not in peer.drafting]
    asked = options.modes or able
    return [mode for mode in able if mode in asked or f"{peer.engine}:{mode}" in asked]


def command(options: argparse.Namespace) -> str:
    """Return the command that repeats the run, without folder names of this machine."""
    words = ["python -m benchmarks.peers --venvs DIR", f"--model {' '.join(Path(each).name for each in options.model)}"]
    words += [f"--draft {Path(options.draft).name}"] if options.draft else []
    words += [f"--strategies {' '.join(options.strategies)}"] if tuple(options.strategies) != STRATEGIES else []
    words += ["--data DIR"] if options.data else []
    words += [f"--peers {' '.join(options.peers)}".strip()] if len(options.peers) < len(PEERS) else []
    words += [f"--threads {options.threads}"] if options.threads != 2 else []
    words += [f"--modes {' '.join(options.modes)}"] if options.modes else []
    words += [f"--workloads {' '.join(options.workloads)}"] if options.workloads else []
    words += [f"--prompts {options.prompts} --tokens {options.tokens} --rounds {options.rounds}"]
    words += [f"--own-rounds {options.own_rounds}"] if options.own_rounds != 5 else []
    words += [f"--minutes {options.minutes:g}"] if options.minutes != 12 else []
    words += ["--quick"] if options.quick else []
    return " ".join(words)


if __name__ == "__main__":
    main()
