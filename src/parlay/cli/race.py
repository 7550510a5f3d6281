"""`parlay demo`: compares plain decoding with the default strategy, and shows strategies that do not pay off, on one
screen.

Everything is greedy. A first plain answer sets the length: its tokens before the text falls into a verbatim loop. Then
plain decoding and the strategy alternate in rounds, until the median ratio is certain or the time is up. Other
processes that keep the machine busy all the while slow both down alike, so ratios suffer less from them than speeds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO

from parlay.bench.host import busy_cores, busy_note
from parlay.bench.loops import FEWEST_TOKENS, first_loop
from parlay.bench.prepare import conversation_ids, text_ids
from parlay.bench.records import OURS, PLAIN, Cell, Row
from parlay.bench.rounds import Rounds
from parlay.bench.summary import CellSummary, summary
from parlay.bench.wave import Ask, Ids, Prepared, Waves
from parlay.bench.workloads import Message
from parlay.cli.race_prompts import CALL, COPY, EDIT, PROSE, DemoPrompt
from parlay.llm.llm import LLM
from parlay.llm.outputs import CompletionOutput
from parlay.strategies.catalogue import catalogue
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.system import threads
from parlay.system.terminal import Excerpt, Tint
from parlay.types import Exactness, SamplingParams

WIDTH = 80
EXCERPT_LINES = 12
SLOW_LINES = 4
_ELSE = {"file", "model", "models"}
"""Options of strategies that need more than the target."""
PROBES, PROBE_TOKENS = 5, 8
"""Short plain answers that warm up; the fastest measures the machine's speed."""
LENGTHS = ((400.0, 160), (20.0, 48), (0.0, 24))
"""The length of answers by the least tokens per second at which it is used. The steps are far apart, so that the
length, on which the ratios depend, is the same on a busy and an idle machine."""
ROUND_SECONDS = 0.25
FEWEST_ROUNDS, MOST_ROUNDS = 3, 15
CERTAIN = 0.03
"""Relative standard error of a ratio at which no more rounds are run."""
RACE_SECONDS, SLOW_SECONDS = 5.0, 2.0
"""Seconds after which no more rounds start: for a workload, and for a strategy that always drafts."""
FAREWELL = """
Tokens per second are those after the prompt. For your own model:
  parlay demo --model HUB_ID_OR_FOLDER
  parlay generate "Once upon a time" --model HUB_ID_OR_FOLDER"""


def demonstrate(llm: LLM, out: TextIO) -> bool:
    """Print the comparison in at most 40 lines. Returns False if a strategy that promises the same bits broke its
    promise."""
    others = busy_cores()
    stage = DemoPart.of(llm)
    print(_head(llm), file=out)
    if note := busy_note(others):
        print(note, file=out)
    _show_text(stage, out)
    print(f"\n{'':12}{'':>8}{'tokens/s':>18}{'':>9}{'tokens':>9}{'same':>7}", file=out)
    print(f"{'':12}{'tokens':>8}{'plain':>9}{'fast':>9}{'ratio':>9}{'a step':>9}{'text':>7}", file=out)
    honest = True
    for workload in (EDIT, CALL, COPY, PROSE):
        prepared = stage.prepare(workload)
        race = stage.race(prepared, DEFAULT_STRATEGY, RACE_SECONDS)
        honest &= race.keeps_promise
        print(_row(workload, race), file=out, flush=True)
    print("\nThe prose again, always drafting; the default policy drafts only while it pays:", file=out)
    for strategy in _always_drafting():
        race = stage.race(prepared, strategy, SLOW_SECONDS)
        honest &= race.keeps_promise
        print(_slow_row(strategy, race), file=out, flush=True)
    print(FAREWELL, file=out)
    return honest


def _head(llm: LLM) -> str:
    spec = llm.runner.spec
    where = f"on {spec.device}, {threads.count()} CPU threads"
    return f"{spec.name[: WIDTH - len(where) - 1]} {where}"


def _show_text(stage: DemoPart, out: TextIO) -> None:
    """Print the edit while the default strategy decodes it."""
    tint = Tint(out)
    note = "drafted tokens are tinted" if tint.enabled else "its first lines"
    print(f"\nAn edit, decoded with {DEFAULT_STRATEGY} ({note}):\n", file=out)
    excerpt = Excerpt(out, tint, EXCERPT_LINES, WIDTH)
    params = SamplingParams(temperature=0, max_tokens=stage.tokens)
    for event in stage.llm.stream({"prompt_token_ids": stage.prompt(EDIT)}, params, strategy=DEFAULT_STRATEGY):
        for piece in event.pieces:
            excerpt.write(piece.text, piece.source)
    excerpt.end()


# --------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True, slots=True)
class Race:
    """Rounds of plain decoding and of a strategy on one prompt."""

    plain: list[Row]
    fast: list[Row]

    @property
    def summary(self) -> CellSummary:
        """The strategy's results compared with plain decoding."""
        return summary(self.fast, self.plain)

    @property
    def certain(self) -> bool:
        ratio = self.summary.ratio if len(self.fast) >= FEWEST_ROUNDS else None
        return ratio is not None and ratio.error <= CERTAIN * ratio.median

    @property
    def same_text(self) -> bool:
        return all(row.same == row.of for row in self.fast)

    @property
    def keeps_promise(self) -> bool:
        return self.same_text or any(row.exactness != Exactness.BITS for row in self.fast)


@dataclass(frozen=True, slots=True)
class DemoPart:
    """The model, what measures it, and the length of answers."""

    llm: LLM
    rounds: Rounds
    tokens: int

    @staticmethod
    def of(llm: LLM) -> DemoPart:
        """Warm the model up, and choose the length of answers."""
        rounds = Rounds({OURS: Waves(llm)}, ROUND_SECONDS, warm_up=False)
        speed = max(DemoPart(llm, rounds, PROBE_TOKENS).plain_speed(PROSE) for _ in range(PROBES))
        return DemoPart(llm, rounds, next(tokens for least, tokens in LENGTHS if speed >= least))

    def prepare(self, workload: DemoPrompt) -> Prepared:
        """Decode a plain answer; the length ends where the text begins to repeat itself."""
        ids = self.prompt(workload)
        text = self._plainly(ids).token_ids
        text = text[: max(first_loop(text), FEWEST_TOKENS)]
        return Prepared((Ask(ids=ids, most=len(text)),), (text,), None, "")

    def race(self, prepared: Prepared, strategy: str, seconds: float) -> Race:
        """Run rounds until the ratio is certain or ``seconds`` have passed."""
        cells = [Cell(model="", strategy=name, workload="") for name in (PLAIN, strategy)]
        race = Race([], [])
        ends = time.monotonic() + seconds
        while len(race.fast) < MOST_ROUNDS and not race.certain:
            plain, fast = self.rounds.measure(cells, prepared, len(race.fast))
            race.plain.append(plain)
            race.fast.append(fast)
            if fast.error or time.monotonic() > ends:
                break
        return race

    def plain_speed(self, workload: DemoPrompt) -> float:
        """Tokens per second of one plain answer."""
        return self._plainly(self.prompt(workload)).metrics.tokens_per_second

    def prompt(self, workload: DemoPrompt) -> Ids:
        if not workload.is_chat:
            return text_ids(self.llm, workload.text)
        return conversation_ids(self.llm, [Message(*turn) for turn in workload.turns])

    def _plainly(self, ids: Ids) -> CompletionOutput:
        params = SamplingParams(temperature=0, max_tokens=self.tokens)
        (output,) = self.llm.generate({"prompt_token_ids": ids}, params, strategy=PLAIN, store=False)
        return output.outputs[0]


def _always_drafting() -> list[str]:
    """One strategy of each family, among those that need only the target."""
    firsts: dict[str, str] = {}
    for name, entry in catalogue().items():
        if "policy" in entry.parameters and not entry.parameters.keys() & _ELSE:
            firsts.setdefault(entry.family, f"{name}:policy=fixed")
    return list(firsts.values())[:SLOW_LINES]


# ---------------------------------------------------------------------------------------------------------- reporting


def _row(workload: DemoPrompt, race: Race) -> str:
    plain = summary(race.plain, race.plain)
    tokens = race.fast[0].tokens // max(race.fast[0].requests, 1)
    return f"{workload.name:12}{tokens:>8}{_speed(plain)}{_results(race)}"


def _slow_row(strategy: str, race: Race) -> str:
    if race.fast[0].error:
        return f"{strategy:37} not run: {race.fast[0].error}"[:WIDTH]
    return f"{strategy:29}{_results(race)}"


def _results(race: Race) -> str:
    found = race.summary
    ratio = found.ratio.median if found.ratio else 0.0
    same = "yes" if race.same_text else "NO"
    return f"{_speed(found)}{ratio:>8.2f}x{found.tokens_per_step or 0:>9.2f}{same:>7}"


def _speed(found: CellSummary) -> str:
    return f"{found.speed.median if found.speed else 0:>9.0f}"
