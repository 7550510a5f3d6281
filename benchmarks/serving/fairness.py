"""Measures a key's streams while another key sends as much as it can: time per token, compared with the server alone.

python -m benchmarks.serving.fairness                     # the built-in model; writes results/fairness.md
python -m benchmarks.serving.fairness --model FILE.gguf   # another model, too
python -m benchmarks.serving.fairness --quick             # a short run, to see that it works
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, shown, table
from benchmarks.serving.served import served
from parlay.bench.provenance import provenance
from parlay.bench.records import PLAIN
from parlay.bench.summary import Spread
from parlay.cli.race_prompts import EDIT, PROSE
from parlay.strategies.entry import DEFAULT_STRATEGY

MINI = "parlay-mini"
STRATEGIES = (PLAIN, DEFAULT_STRATEGY)
GREEDY_REQUESTS = 32
TOKENS = 64
GOAL = 2.0
_WARM_SECONDS = 3.0
"""Seconds until the greedy key's requests have filled the engine."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Seconds of one streamed answer: to its first chunk, per token after it, and the longest wait for a chunk."""

    first: float
    per_token: float
    gap: float


@dataclass(frozen=True, slots=True)
class Round:
    """The modest key's streams: alone, and while the greedy key's requests run."""

    model: str
    strategy: str
    alone: tuple[Stream, ...]
    beside: tuple[Stream, ...]

    @property
    def ratio(self) -> float:
        return per_token(self.beside) / per_token(self.alone)


def per_token(streams: Sequence[Stream]) -> float:
    return sum(stream.per_token for stream in streams) / len(streams)


def stream(address: str, key: str, prompt: str, strategy: str) -> Stream:
    """Stream one answer and time it. Raises ValueError if the answer is an error."""
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "store": False}
    body = json.dumps(asked | {"stream": True, "strategy": strategy})
    with closing(HTTPConnection(address, timeout=120)) as connection:
        connection.connect()
        began = time.perf_counter()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", body, headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise ValueError(f"the server answered {reply.status}: {reply.read().decode()}")
        chunks = [(time.perf_counter(), some) for some in iter(reply.read1, b"")]
    times = [at for at, some in chunks if b'"text"' in some]
    head = sum(len(choice["parlay"]["pieces"]) for choice in _choices(chunks[0][1]))
    gaps = [later - before for before, later in pairwise(times)]
    return Stream(times[0] - began, (times[-1] - times[0]) / (TOKENS - max(1, head)), max(gaps))


def _choices(some: bytes) -> Iterator[dict[str, Any]]:
    for line in some.splitlines():
        if line.startswith(b"data: {"):
            yield from json.loads(line[6:])["choices"]


@contextmanager
def greedy(address: str, count: int) -> Iterator[None]:
    """Send a number of concurrent requests with the greedy key, from a process of its own, until the block ends."""
    command = (sys.executable, "-m", "benchmarks.serving.greedy", address, "greedy", str(count))
    with subprocess.Popen(command) as process:
        try:
            time.sleep(_WARM_SECONDS)
            yield
        finally:
            process.kill()


def measure(address: str, model: str, strategy: str, requests: int) -> Round:
    """Measure one round."""
    prompts = [(PROSE.text, EDIT.text)[number % 2] for number in range(requests)]
    alone = tuple(stream(address, "modest", prompt, strategy) for prompt in prompts)
    with greedy(address, GREEDY_REQUESTS):
        beside = tuple(stream(address, "modest", prompt, strategy) for prompt in prompts)
    time.sleep(1.0)  # its requests end
    return Round(model, strategy, alone, beside)


def rounds(source: str, count: int, requests: int) -> Iterator[Round]:
    """Yield all rounds on one model, with the strategies in turn."""
    name = Path(source).stem
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("greedy\nmodest\n")
        with served(f"{name}={source}", "--api-key-file", str(keys)) as url:
            address = url.removeprefix("http://")
            for strategy in STRATEGIES:
                for prompt in (PROSE, EDIT):  # warms up; from now on both are in the cache
                    stream(address, "modest", prompt.text, strategy)
            for _ in range(count):
                for strategy in STRATEGIES:
                    yield measure(address, name, strategy, requests)


HOW = (
    f"The modest key streams one answer of {TOKENS} tokens after the other; the greedy key keeps {GREEDY_REQUESTS} "
    "requests under way at priority -16, half of them prompts of 1,500 tokens, half short ones with answers of 256. "
    "*Per token* is the time after the first chunk over the tokens after it, in milliseconds; *first* the time to the "
    "first chunk, *gap* the longest time between two chunks. Medians of the rounds, lowest and highest in brackets; a "
    "ratio is taken within a round. Server and clients share the machine. "
    f"Goal: at most {GOAL:g} times what it has alone."
)


def page(header: dict[str, Any], done: Sequence[Round]) -> str:
    """Write the page."""
    head = ("model", "strategy", "per token alone", "beside", "ratio", "first alone", "beside", "gap alone", "beside")
    lines = [
        _line(model, strategy, [one for one in done if (one.model, one.strategy) == (model, strategy)])
        for model, strategy in dict.fromkeys((one.model, one.strategy) for one in done)
    ]
    return "\n".join(["# Two keys, one greedy", "", about(header), "", HOW, "", *table(head, lines)])


def _line(model: str, strategy: str, own: Sequence[Round]) -> tuple[str, ...]:
    alone, beside = [one.alone for one in own], [one.beside for one in own]
    return (
        model,
        strategy,
        _shown([1000 * per_token(streams) for streams in alone]),
        _shown([1000 * per_token(streams) for streams in beside]),
        _shown([one.ratio for one in own]),
        *(_shown([1000 * one.first for streams in side for one in streams], 0) for side in (alone, beside)),
        *(_shown([1000 * one.gap for streams in side for one in streams], 0) for side in (alone, beside)),
    )


def _shown(values: Sequence[float], places: int = 2) -> str:
    return shown(Spread.of(values), places)


@one_line_errors("serving.fairness")
def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if the goal is missed."""
    parser = command_parser("serving.fairness", HOW)
    parser.add_argument(
        "--model", action="append", default=[], help="another model, besides the built-in one; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds (default: 4)")
    parser.add_argument("--quick", action="store_true", help="run one round, and write no page")
    parser.add_argument("--out", type=Path, default=RESULTS / "fairness.md", metavar="FILE")
    options = parser.parse_args(arguments)
    sources = [MINI, *options.model]
    done: list[Round] = []
    for source in sources:
        for one in rounds(source, 1 if options.quick else options.rounds, 2):
            done.append(one)
            print(json.dumps(asdict(one) | {"ratio": one.ratio}), flush=True)
    if not options.quick:
        asked = [f"--model {model}" for model in options.model]
        header = provenance(" ".join(["python -m benchmarks.serving.fairness", *asked]))
        options.out.write_text(page(header, done), encoding="utf-8")
        result = header | {"rounds": [asdict(one) for one in done]}
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    worst = max(median(one.ratio for one in done if one.strategy == strategy) for strategy in STRATEGIES)
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
