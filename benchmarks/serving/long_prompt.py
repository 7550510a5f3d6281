"""Measures how long a stream pauses while the server reads another request's long prompt.

python -m benchmarks.serving.long_prompt --model smollm2-135m FILE.gguf   # writes results/long-prompt.md
python -m benchmarks.serving.long_prompt --model smollm2-135m --quick     # one round, to see that it works
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPResponse
from itertools import count, pairwise
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
from parlay.strategies.entry import DEFAULT_STRATEGY

STRATEGIES = (PLAIN, DEFAULT_STRATEGY)
SENTENCES = 400
"""Sentences of the long prompt, of some eight tokens each."""
TOKENS = 4096
"""The most tokens of the stream, more than it writes meanwhile."""
_salts = count()


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds to read the prompt alone and beside a stream; that stream's longest pause and its tokens meanwhile."""

    model: str
    strategy: str
    prompt: int
    alone: float
    beside: float
    pause: float
    tokens: int


@dataclass(slots=True)
class Streamed:
    """A stream of tokens under way: when each of its events came, with its number of tokens."""

    events: list[tuple[float, int]] = field(default_factory=list)
    over: bool = False

    def read(self, reply: HTTPResponse) -> None:
        for line in reply:
            if self.over:
                return
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                self.events.append((time.perf_counter(), len(choice["parlay"]["pieces"])))

    def between(self, began: float, ended: float) -> tuple[float, int]:
        """The longest pause, and the number of tokens."""
        times = [began, *(at for at, _ in self.events if began < at < ended), ended]
        return max(later - before for before, later in pairwise(times)), sum(
            tokens for at, tokens in self.events if began < at < ended
        )


def ask(address: str, strategy: str, text: str, **fields: Any) -> tuple[HTTPConnection, HTTPResponse]:
    """Send a request that finds nothing in the cache. Raises ValueError if the answer is an error."""
    asked = {"prompt": text, "temperature": 0, "ignore_eos": True, "store": False, "strategy": strategy}
    connection = HTTPConnection(address, timeout=600)
    body = json.dumps(asked | {"cache_salt": str(next(_salts))} | fields)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise ValueError(f"the server answered {reply.status}: {reply.read().decode()}")
    return connection, reply


def read_prompt(address: str, strategy: str) -> tuple[float, float, int]:
    """Send the long prompt. Returns when it was sent, when its token came, and how many tokens it has."""
    text = "".join(f"Line {number} says nothing new. " for number in range(SENTENCES))
    began = time.perf_counter()
    connection, reply = ask(address, strategy, text, max_tokens=1)
    with closing(connection):
        used = json.loads(reply.read())["usage"]
    return began, time.perf_counter(), used["prompt_tokens"]


def measure(address: str, model: str, strategy: str) -> Round:
    """Measure one round. Raises ValueError if the stream ends before the prompt is read."""
    began, ended, prompt = read_prompt(address, strategy)
    alone = ended - began
    connection, reply = ask(address, strategy, "Once upon a time", max_tokens=TOKENS, stream=True)
    streamed = Streamed()
    reader = threading.Thread(target=streamed.read, args=(reply,))
    reader.start()
    while len(streamed.events) < 10 and reader.is_alive():
        time.sleep(0.01)
    began, ended, _ = read_prompt(address, strategy)
    if not reader.is_alive():
        raise ValueError("the stream ended before the prompt was read: take a model with a longer context")
    pause, tokens = streamed.between(began, ended)
    streamed.over = True
    reader.join()
    connection.close()
    return Round(model, strategy, prompt, alone, ended - began, pause, tokens)


HOW = (
    "One request streams an answer; then another one sends a prompt of some thousands of tokens, of which nothing is "
    "cached. *Alone* and *beside* are the seconds until its first token comes, without and with the stream; *pause* is "
    "the longest time without a token in the stream meanwhile, *tokens* what it wrote. Medians of the rounds, lowest "
    "and highest in brackets. Server and clients share the machine."
)


def rounds(source: str, count: int) -> Iterator[Round]:
    """Yield all rounds on one model, with the strategies in turn."""
    with served(source) as url:
        for _ in range(count):
            for strategy in STRATEGIES:
                yield measure(url.removeprefix("http://"), Path(source).stem, strategy)


def page(header: dict[str, Any], done: Sequence[Round]) -> str:
    """Write the page."""
    head = ("model", "strategy", "prompt", "alone, s", "beside, s", "pause, s", "tokens")
    lines = [
        _line([one for one in done if (one.model, one.strategy) == (model, strategy)])
        for model, strategy in dict.fromkeys((one.model, one.strategy) for one in done)
    ]
    return "\n".join(["# A long prompt beside a stream", "", about(header), "", HOW, "", *table(head, lines)])


def _line(own: Sequence[Round]) -> tuple[str, ...]:
    times = [one.alone for one in own], [one.beside for one in own], [one.pause for one in own]
    return (
        own[0].model,
        own[0].strategy,
        str(own[0].prompt),
        *(shown(Spread.of(each)) for each in times),
        f"{median([one.tokens for one in own]):g}",
    )


@one_line_errors("serving.long_prompt")
def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = command_parser("serving.long_prompt", HOW)
    parser.add_argument("--model", required=True, nargs="+", help="the models to serve, one after the other")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument("--quick", action="store_true", help="run one round, and write no page")
    parser.add_argument("--out", type=Path, default=RESULTS / "long-prompt.md", metavar="FILE")
    options = parser.parse_args(arguments)
    done: list[Round] = []
    for source in options.model:
        for one in rounds(source, 1 if options.quick else options.rounds):
            done.append(one)
            print(json.dumps(asdict(one)), flush=True)
    if not options.quick:
        names = " ".join(Path(source).name for source in options.model)
        header = provenance(f"python -m benchmarks.serving.long_prompt --model {names}")
        options.out.write_text(page(header, done), encoding="utf-8")
        result = header | {"rounds": [asdict(one) for one in done]}
        options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
