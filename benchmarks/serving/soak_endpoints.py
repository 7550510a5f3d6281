"""Sends mixed requests to every endpoint over HTTP, by every strategy, whole and streamed: none may be lost, leak or
differ.

    python -m benchmarks.serving.soak_endpoints                   # 2,000 requests, and the report
    python -m benchmarks.serving.soak_endpoints --model smollm2-135m
    python -m benchmarks.serving.soak_endpoints --requests 100    # a short run, to see that it works

Some clients and drafters fail on purpose. Each answer of an exact strategy is compared with that of plain decoding,
which ran alone before.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.serving.cases import FAILING, INEXACT, SHARES, drawn_kinds
from benchmarks.serving.endpoints import ENDPOINTS, OTHERS, SAMPLING, WRONG, Endpoint, Json, continued
from benchmarks.serving.served import served
from benchmarks.serving.soak import CHECK_EVERY, MEMORY
from benchmarks.serving.soak_client import Leave, Refused, ask, call, leave
from benchmarks.serving.tally import Tally, report, summary
from parlay.bench.provenance import provenance

KINDS: dict[str, float] = dict(SHARES) | {"slow": 0.05, "other": 0.05}
PROMPTS = tuple(f"Repeat line {number}: the ferry leaves at ten past {number}." for number in range(1, 7))
EXACT = ("bits", "seed")
_REST = 30.0
"""Seconds within which the engine must be idle after the last request."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request. If its strategy is None, the server's own strategy is used, whose drafter fails."""

    kind: str
    endpoint: Endpoint
    body: Json
    strategy: str | None
    stream: bool
    how: Leave
    patience: int

    @property
    def key(self) -> str:
        """Return the fields on which its plain text depends."""
        return self.endpoint.path + json.dumps(self.body)

    def sent(self) -> Json:
        strategy = {} if self.strategy is None else {"strategy": self.strategy}
        return {**self.body, **strategy, "stream": self.stream}


def cases(count: int, seed: int, endpoints: Sequence[Endpoint], strategies: Sequence[str]) -> list[Case]:
    """Return ``count`` requests. The strategies take turns, so each gets its share."""
    chance, turn = random.Random(seed), itertools.cycle(strategies)
    return [_case(kind, next(turn), chance.choice(endpoints), chance) for kind in drawn_kinds(count, chance, KINDS)]


def _case(kind: str, strategy: str, endpoint: Endpoint, chance: random.Random) -> Case:
    body = endpoint.body(chance.choice(PROMPTS), chance.choice(SAMPLING))
    return Case(
        kind,
        endpoint,
        {**body, **endpoint.form} if chance.random() < 0.2 else body,
        None if kind == "failing" else strategy,
        stream=kind == "slow" or chance.random() < 0.6,
        how=chance.choice(("close", "close", "forget", "half")),
        patience=chance.randrange(1, 6),
    )


@dataclass(slots=True)
class Soak:
    """Runs the cases against the server at ``address``. ``exact`` has the strategies that keep the text of plain
    decoding."""

    address: str
    exact: frozenset[str | None]
    known: dict[str, str] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def learn(self, planned: Sequence[Case]) -> None:
        """Decode the plain text of every later request, each alone."""
        for case in planned:
            if case.key not in self.known:
                body = {**case.body, "strategy": "none", "stream": False}
                self.known[case.key] = ask(self.address, case.endpoint, body)

    def run(self, planned: Sequence[Case], clients: int) -> None:
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(self._one, itertools.count(), planned))
        self.check()
        until = time.monotonic() + _REST
        while (held := under_way(self.address)) and time.monotonic() < until:
            time.sleep(0.1)
        if held:
            self.tally.wrong.append(f"at the end the engine still holds {held}")

    def _one(self, number: int, case: Case) -> None:
        try:
            fate, wrong = self._fate(number, case)
        except Exception as error:
            fate, wrong = "lost", repr(error)
        with self.lock:
            if wrong:
                place = f"{case.kind}, {case.endpoint.path}, {case.strategy}, stream={case.stream}"
                self.tally.wrong.append(f"request {number} ({place}): {wrong}")
            self.tally.fates[fate] += 1
            self.tally.done += 1
            due = self.tally.done % CHECK_EVERY == 0
        if due:
            self.check()

    def _fate(self, number: int, case: Case) -> tuple[str, str]:
        """Return how a request ended, and what is wrong with it."""
        if case.kind == "other":
            call(self.address, *OTHERS[number % len(OTHERS)])
            return "completed", ""
        if case.kind == "malformed":
            return "refused", self._refusal({**case.sent(), **WRONG[number % len(WRONG)]}, case)
        if case.kind == "cancelled":
            told = leave(self.address, case.endpoint, case.sent(), case.how, case.patience)
            return "cancelled", self._compare(case, told, self.known[case.key][: len(told)])
        pause = case.patience / 100 if case.kind == "slow" else 0.0
        told = ask(self.address, case.endpoint, case.sent(), pause=pause)
        return "completed", self._compare(case, told, self.known[case.key])

    def _refusal(self, body: Json, case: Case) -> str:
        try:
            ask(self.address, case.endpoint, body)
        except Refused as error:
            return "" if error.status in (400, 404) else str(error)
        return "a malformed request was taken"

    def _compare(self, case: Case, told: str, plain: str) -> str:
        exact = case.strategy in self.exact
        with self.lock:
            self.tally.strategies[str(case.strategy)] += 1
            self.tally.exact += exact
            self.tally.inexact += not exact
        return f"{told!r} differs from plain decoding" if exact and told != plain else ""

    def check(self) -> None:
        """Record the server's memory."""
        held = int(metrics(self.address)["process_resident_memory_bytes"])
        with self.lock:
            self.tally.checks += 1
            self.tally.memory[self.tally.done] = held


def metrics(address: str) -> dict[str, float]:
    """Return the server's metrics, summed over their labels."""
    told = defaultdict[str, float](float)
    for family in text_string_to_metric_families(call(address, "GET", "/metrics").decode()):
        for sample in family.samples:
            told[sample.name] += sample.value
    return told


def under_way(address: str) -> dict[str, float]:
    """Return the counts of requests and cached tokens that the engine holds now, without zeros."""
    told = metrics(address)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "parlay_cache_used_tokens")
    return {name: told[name] for name in names if told[name]}


def fill(address: str) -> None:
    """Fill the cache with prompts that nobody sends again, so that later growth of memory is not the cache."""
    room, tokens = metrics(address)["parlay_cache_room_tokens"], 0
    for number in itertools.count():
        if tokens > room:
            return
        tokens += json.loads(call(address, "POST", "/v1/completions", filler(number)))["usage"]["prompt_tokens"]


def filler(number: int) -> Json:
    """Return the body of one of these prompts."""
    return {"prompt": f"Ferry {number} leaves at {list(range(60))}.", "max_tokens": 1, "strategy": "none"}


def soak(address: str, count: int, seed: int, clients: int) -> dict[str, Any]:
    """Run ``count`` requests, and return the results."""
    offered = json.loads(call(address, "GET", "/choices"))["strategies"]
    exact = frozenset(one["name"] for one in offered if one["exactness"] in EXACT)
    first = json.loads(call(address, "POST", "/v1/responses", {"input": "Good morning.", "max_output_tokens": 8}))
    strategies = [one["name"] for one in offered]
    strategies += [one for one in INEXACT if one.partition(":")[0] in strategies]
    planned = cases(count, seed, (*ENDPOINTS, continued(first["id"])), strategies)
    run = Soak(address, exact | {None})
    run.learn(planned)
    before, began = metrics(address), time.perf_counter()
    run.run(planned, clients)
    seconds, after = time.perf_counter() - began, metrics(address)
    run.tally.tokens = int(after["parlay_completion_tokens_total"] - before["parlay_completion_tokens_total"])
    result = summary(run.tally, Counter(case.kind for case in planned), seconds)
    faults = after["parlay_drafter_faults_total"] - before["parlay_drafter_faults_total"]
    return {**result, "drafter_faults": int(faults), "endpoints": Counter(case.endpoint.path for case in planned)}


@one_line_errors("serving.soak_endpoints")
def main(arguments: list[str] | None = None) -> int:
    """Run the soak. Return 1 if a promise was broken."""
    parser = command_parser("serving.soak_endpoints", __doc__)
    parser.add_argument("--model", default="parlay-mini", help="model to serve (default: parlay-mini)")
    parser.add_argument("--requests", type=int, default=2000, help="number of requests (default: 2,000)")
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the report, and .json beside it")
    options = parser.parse_args(arguments)
    failing = f"{FAILING}:policy=fixed,after=3"
    with served(options.model, "--memory", MEMORY, "--strategy", failing, "--log-level", "error") as url:
        address = url.removeprefix("http://")
        fill(address)
        result = soak(address, options.requests, options.seed, options.clients)
    command = f"python -m benchmarks.serving.soak_endpoints --model {options.model} --requests {options.requests}"
    result["provenance"] = provenance(command)
    print(json.dumps(result), flush=True)
    out = options.out or (RESULTS / "soak-endpoints.md" if options.requests >= 2000 else None)
    if out is not None:
        out.write_text(page(result), encoding="utf-8")
        out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


def page(result: dict[str, Any]) -> str:
    """Write the page."""
    mixed = ", ".join(f"{count} to `{path}`" for path, count in sorted(result["endpoints"].items()))
    kinds = ", ".join(f"{count} {kind}" for kind, count in result["planned"].items())
    return report("Soak over all endpoints", result, {"requests": mixed, "kinds": kinds})


if __name__ == "__main__":
    sys.exit(main())
