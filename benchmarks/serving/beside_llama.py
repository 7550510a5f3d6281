"""Compares whole requests over HTTP: `parlay serve` and llama.cpp's `llama-server` on the same GGUF file, streamed.

    python -m benchmarks.serving.beside_llama --llama-server EXE --model FILE.gguf --draft-model FILE.gguf --data DIR

Each mode of llama-server is a process of its own, because it gets its drafter at the start. Parlay is one process, and
its requests name their strategy. The servers take turns: while one answers, the others wait. All compute every prompt
anew.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from urllib.parse import urlsplit

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.pages import about, failures, number, same, table
from benchmarks.serving.over_api import CLIENT, OverHttp, text_ids
from benchmarks.serving.served import PATIENCE, served
from parlay.bench import workloads
from parlay.bench.prepare import first_ids
from parlay.bench.records import OURS, PLAIN, Cell, Results, Row, System
from parlay.bench.rounds import Rounds
from parlay.bench.stopwatch import Reading
from parlay.bench.summary import Measurements, ratio, whole_rate
from parlay.bench.wave import Ask, Prepared, Wave, lone_wave
from parlay.llm import LLM

LLAMA = "llama-server"
OWN = (PLAIN, "prompt-lookup", "draft-model", "eagle3", "auto")
MODES: Mapping[str, tuple[str, ...]] = {
    PLAIN: (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "draft-simple": ("--spec-type", "draft-simple"),
}
"""llama-server's flags for each of its modes; the last mode also gets the draft model."""
WORKLOADS = ("spec-bench", "humaneval", "editeval", "bfcl-simple")
ALL_TOKENS: Mapping[str, object] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Sampling settings with which both engines draw from all tokens; llama-server's defaults keep only the likeliest."""
READY = 120.0
"""The time limit in seconds until a server answers."""
INTRO = (
    "Tokens per second of whole requests, from sending one to its last piece; llama-server's plain decoding is 1. "
    "`none` is Parlay's plain decoding, `auto` its default. The mean is geometric, over the kinds. Both get the "
    "same token ids, run on the same file and as many threads, and end a text where the model ends it. The client's "
    "processor time counts against both. The last row counts texts that equal those of Parlay's plain decoding: "
    "llama.cpp rounds otherwise, so its texts part ways after some tokens."
)

logger = logging.getLogger("benchmarks")


class Asked(OverHttp):
    """Asks one server of either engine. No two requests share a cached prefix."""

    def __init__(self, llm: LLM, server: str, model: str) -> None:
        super().__init__(llm, server, model, streamed=True)
        self._numbers = itertools.count()
        self._temperature = 0.0

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Decode as `Decoder` says."""
        self._temperature = temperature
        (ask,) = asks
        found = self.ask(strategy, ask)
        wave = lone_wave(ask, strategy, Reading(text_ids(self._llm, found.text), 1, found.first, found.last))
        return replace(wave, values={CLIENT: found.client})

    def _body(self, strategy: str, ask: Ask) -> dict[str, object]:
        body = super()._body(strategy, ask)
        salt = f"{strategy} {next(self._numbers)}"
        more = {"ignore_eos": False, "cache_prompt": False, "cache_salt": salt, "seed": 1}
        return {**body, **more, **ALL_TOKENS, "temperature": self._temperature}


@contextmanager
def llama_served(executable: Path, model: Path, threads: int, flags: Sequence[str]) -> Iterator[str]:
    """Start a llama-server and yield its address when it takes requests. Raises ValueError if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (str(executable), "-m", str(model), "--port", str(port), "-t", str(threads), "-np", "1", "-c", "8192")
    with subprocess.Popen((*command, *flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(process, port, " ".join(flags))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _wait_for(process: subprocess.Popen[bytes], port: int, flags: str) -> None:
    until = time.monotonic() + READY
    while process.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ValueError(f"llama-server {flags} did not start: run it by hand to see why")


def measure(results: Results, options: argparse.Namespace) -> None:
    """Measure all workloads and temperatures, with all servers running."""
    found = workloads.load(options.workloads, options.prompts, options.data)
    draft: tuple[str, ...] = ("--draft-model", str(options.draft_model)) if options.draft_model else ()
    with ExitStack() as up:
        llm = up.enter_context(LLM(str(options.model), router_memory="off"))
        flags = ("--threads", str(options.threads), *draft)
        url = up.enter_context(served(f"model={options.model}", *flags))
        decoders = {OURS: Asked(llm, urlsplit(url).netloc, "model")}
        for mode in options.modes:
            more = (*MODES[mode], *(("-md", draft[1]) if mode == "draft-simple" else ()))
            server = up.enter_context(llama_served(options.llama_server, options.model, options.threads, more))
            decoders[f"{LLAMA} {mode}"] = Asked(llm, server, "model")
        measuring = Rounds(decoders)
        for temperature, number, work in itertools.product(options.temperatures, range(options.rounds), found):
            cells = [
                Cell(engine=engine, model=options.model.stem, strategy=strategy, workload=work.name)
                for engine in decoders
                for strategy in (options.strategies if engine == OURS else (PLAIN,))
            ]
            cells = [replace(cell, temperature=temperature) for cell in cells]
            if len(results.of(cells[0])) > number:
                continue
            logger.info("%s, temperature %g, round %d", work.name, temperature, number)
            asks = tuple(Ask(ids=first_ids(llm, item), most=options.tokens) for item in work.items)
            answers = [decoders[OURS].decode(PLAIN, [ask], temperature) for ask in asks]
            goals = tuple(answer.answers[0].tokens for answer in answers)
            results.add(measuring.measure(cells, Prepared(asks, goals, None, ""), number))


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write the page, with a table for each model and temperature."""
    found = Measurements(rows)
    lines = ["# Whole requests beside llama-server", "", about(header), "", INTRO, ""]
    for model, temperature in dict.fromkeys((cell.model, cell.temperature) for cell in found.cells):
        own = Measurements([row for row in rows if (row.cell.model, row.cell.temperature) == (model, temperature)])
        lines += [f"## {model}, temperature {temperature:g}", "", *section(own)]
    return "\n".join([*lines, *failures(found)]).rstrip() + "\n"


def section(found: Measurements) -> list[str]:
    """Write the table of one model and temperature: a row for each kind of work, then the mean and the least."""
    systems = list(dict.fromkeys(cell.system for cell in found.cells))
    kinds = list(dict.fromkeys(cell.workload for cell in found.cells))
    gains: dict[tuple[str, str], float] = {}
    for cell in found.cells:
        base = found.of(replace(cell, engine=f"{LLAMA} {PLAIN}", strategy=PLAIN))
        spread = ratio(found.of(cell), base, whole_rate)
        if spread is not None:
            gains[cell.workload, _name(cell.system)] = spread.median
    names = [_name(system) for system in systems]
    lines = [(kind, *(number(gains.get((kind, name))) for name in names)) for kind in kinds]
    of_system = {name: [gain for (_, system), gain in gains.items() if system == name] for name in names}
    for label, of in (("**mean**", geometric_mean), ("least", min)):
        lines.append((label, *(number(of(values) if (values := of_system[name]) else None) for name in names)))
    texts = [same([row for row in found.rows if _name(row.cell.system) == name]) for name in names]
    return table(("kind", *names), [*lines, ("text of Parlay's plain decoding", *texts)])


def _name(system: System) -> str:
    """Return a system's name: a strategy of Parlay by its name alone, a mode of llama-server with the engine's name."""
    return system.strategy if system.engine == OURS else system.engine.removesuffix(f" {PLAIN}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.beside_llama", __doc__)
    parser.add_argument("--llama-server", type=Path, required=True, metavar="EXE", help="llama.cpp's server")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="GGUF file")
    parser.add_argument("--draft-model", type=Path, metavar="FILE", help="GGUF file of a small model of its family")
    parser.add_argument("--data", type=Path, metavar="DIR", help="published sets of prompts")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME", help="as in parlay bench")
    parser.add_argument("--strategies", nargs="+", default=list(OWN), metavar="SPEC", help="strategies of Parlay")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES), help="modes of llama-server")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], metavar="X")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of each kind (default: 3)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer in tokens (default: 64)")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="default: 1")
    add_run_flags(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the page."""
    options = parse(arguments)
    begin(options)
    with one_line_errors("serving.beside_llama"):
        command = (
            "python -m benchmarks.serving.beside_llama --llama-server EXE --model FILE --draft-model FILE --data DIR"
        )
        results = open_results(options, "beside-llama", command)
        measure(results, options)
    write_page(results.path, page(results.header, results.rows))


if __name__ == "__main__":
    main()
