"""Records one answer with the time of each piece, decoded in turn plainly and with the default strategy."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from parlay.llm import LLM
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.types import SamplingParams

PLAIN = "none"
MESSAGE = (
    "Hi team, the kick-off is on 4 May at 10:00 in room Aurora. Plese send the agenda to Maria Lopez "
    "befor 2 May. The budget of 12,400 euros was approved by Jonas Weber. Lunch will be at Cafe Lumiere, "
    "18 Harbour Street."
)
PROMPT = f"Correct the spelling of this message:\n\n{MESSAGE}"
TOKENS = 160


@dataclass(frozen=True, slots=True)
class Step:
    """The tokens of one step: seconds since the request, and pieces of text with their source, a drafter or
    ``target``."""

    seconds: float
    pieces: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """One strategy's answer."""

    strategy: str
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole request, prompt included."""
        return self.steps[-1].seconds

    @property
    def text(self) -> str:
        return "".join(text for step in self.steps for text, _ in step.pieces)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording: the round with the median ratio, and the ratios of all rounds, lowest first."""

    plain: Lane
    fast: Lane
    ratios: tuple[float, ...]


def record(llm: LLM, rounds: int) -> Recording:
    """Record both strategies in turns, after one unmeasured answer of each. Raises ValueError if a text differs."""
    strategies = (PLAIN, DEFAULT_STRATEGY)
    for strategy in strategies:
        _answer(llm, strategy)
    found = [tuple(_answer(llm, strategy) for strategy in strategies) for _ in range(rounds)]
    texts = {lane.text for pair in found for lane in pair}
    if len(texts) > 1:
        raise ValueError(f"the texts differ: {sorted(texts)}")
    by_ratio = sorted(found, key=_ratio)
    plain, fast = by_ratio[len(found) // 2]
    return Recording(plain, fast, tuple(round(_ratio(pair), 3) for pair in by_ratio))


def _ratio(pair: Sequence[Lane]) -> float:
    plain, fast = pair
    return plain.seconds / fast.seconds


def _answer(llm: LLM, strategy: str) -> Lane:
    llm.reset_prefix_cache()  # every answer computes its prompt, and no answer is copied from an earlier one
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    begin = time.perf_counter()
    steps: list[Step] = []
    for event in llm.stream([{"role": "user", "content": PROMPT}], params, strategy=strategy, store=False):
        pieces = tuple((piece.text, piece.source) for piece in event.pieces)
        steps.append(Step(round(time.perf_counter() - begin, 5), pieces))
    return Lane(strategy, tuple(steps))


def write(path: Path, recording: Recording, header: dict[str, Any]) -> None:
    """Write the recording and its provenance as JSON."""
    path.write_text(json.dumps({"provenance": header, **asdict(recording)}, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> tuple[Recording, dict[str, Any]]:
    """Read what `write` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Recording(_lane(data["plain"]), _lane(data["fast"]), tuple(data["ratios"])), data["provenance"]


def _lane(data: dict[str, Any]) -> Lane:
    return Lane(data["strategy"], tuple(_step(step["seconds"], step["pieces"]) for step in data["steps"]))


def _step(seconds: float, pieces: Iterable[Sequence[str]]) -> Step:
    return Step(seconds, tuple((text, source) for text, source in pieces))


def median(recording: Recording) -> float:
    return statistics.median(recording.ratios)
