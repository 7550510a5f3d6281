"""Makes the row of one cell in one round from the waves that were decoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice, zip_longest
from typing import TypedDict, TypeVar

from parlay.bench.loops import first_loop
from parlay.bench.records import Cell, Row
from parlay.bench.wave import Answer, Prepared, Wave
from parlay.types import Exactness, Metrics

Number = TypeVar("Number", int, float)

COMPARED = frozenset({Exactness.BITS, Exactness.SEED})
"""The levels of exactness that promise the tokens of plain decoding."""


class Times(TypedDict):
    """The fields of a row about tokens and times."""

    tokens: int
    fresh_tokens: int
    decode_tokens: int
    decode_seconds: float
    seconds: float
    ttft: tuple[float, ...]
    itl: tuple[float, ...]
    talks: tuple[int, ...]


class Drafts(TypedDict):
    """The fields of a row about steps and drafts."""

    steps: int
    proposed_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    proposed_by_source: dict[str, int]
    accepted_by_source: dict[str, int]


class Phases(TypedDict):
    """The fields of a row that divide the time into phases."""

    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    overhead_seconds: float


class Sameness(TypedDict):
    """The fields of a row that compare texts with plain decoding's."""

    same: int
    of: int
    exactness: str


def row_of(cell: Cell, number: int, waves: Sequence[Wave], prepared: Prepared) -> Row:
    """Return the row of a cell. The waves decoded the prepared requests in order, once or several times."""
    answers = [answer for wave in waves for answer in wave.answers]
    metrics = [answer.metrics for answer in answers]
    notes = dict.fromkeys(answer.reading.note for answer in answers)
    return Row(
        cell=cell,
        round=number,
        requests=len(answers),
        **times(waves, answers, prepared),
        **drafts(metrics),
        **phases(waves, metrics),
        peak_memory_bytes=max(wave.peak_memory_bytes for wave in waves),
        looped=prepared.looped,
        **sameness(answers, prepared),
        joules=_joules(waves),
        energy=waves[0].energy,
        values=_merged(wave.values for wave in waves),
        note="; ".join(filter(None, [*notes, prepared.note, _faults(metrics)])),
    )


def times(waves: Sequence[Wave], answers: Sequence[Answer], prepared: Prepared) -> Times:
    """Return the fields about tokens and times."""
    readings = [answer.reading for answer in answers]
    asked = zip(readings, cycle(prepared.asks), strict=False)
    talks = [ask.talk for reading, ask in asked if reading.between_seconds is not None]
    several = len({*talks}) < len(talks)
    return {
        "tokens": sum(len(reading.tokens) for reading in readings),
        "fresh_tokens": sum(first_loop(reading.tokens) for reading in readings),
        "decode_tokens": sum(wave.decode_tokens for wave in waves),
        "decode_seconds": sum(wave.decode_seconds for wave in waves),
        "seconds": sum(wave.seconds for wave in waves),
        "ttft": _known(reading.first_seconds for reading in readings),
        "itl": _known(reading.between_seconds for reading in readings),
        "talks": tuple([talk for talk in talks if talk is not None]) if several else (),
    }


def drafts(metrics: Sequence[Metrics]) -> Drafts:
    """Return the fields about steps and drafts, summed over requests."""
    return {
        "steps": sum(each.steps for each in metrics),
        "proposed_by_position": _added(each.drafted_by_depth for each in metrics),
        "accepted_by_position": _added(each.accepted_by_depth for each in metrics),
        "proposed_by_source": _merged(each.drafted_by_source for each in metrics),
        "accepted_by_source": _merged(each.accepted_by_source for each in metrics),
    }


def phases(waves: Sequence[Wave], metrics: Sequence[Metrics]) -> Phases:
    """Return the time of each phase. Each request counts the whole time of its steps, although it shares them with
    others. So the sums are scaled down to the time that passed."""
    counted = sum(each.seconds for each in metrics)
    passed = sum(wave.seconds for wave in waves)
    scale = min(1.0, passed / counted) if counted else 1.0
    return {
        "prefill_seconds": scale * sum(each.prefill_seconds for each in metrics),
        "draft_seconds": scale * sum(each.draft_seconds for each in metrics),
        "verify_seconds": scale * sum(each.verify_seconds for each in metrics),
        "overhead_seconds": scale * sum(each.overhead_seconds for each in metrics),
    }


def sameness(answers: Sequence[Answer], prepared: Prepared) -> Sameness:
    """Count the texts that equal plain decoding's. If some answer does not promise that, none is compared."""
    exactness = Exactness.weakest(*(answer.metrics.exactness for answer in answers))
    if exactness not in COMPARED:
        return {"same": 0, "of": 0, "exactness": str(exactness)}
    goals = islice(cycle(prepared.goals), len(answers))
    same = sum(answer.tokens == goal for answer, goal in zip(answers, goals, strict=True))
    return {"same": same, "of": len(answers), "exactness": str(exactness)}


def _faults(metrics: Sequence[Metrics]) -> str:
    faulty = sum(each.drafter_faults > 0 for each in metrics)
    return f"the drafter failed in {faulty} of {len(metrics)} requests" if faulty else ""


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def _merged(counts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    total: dict[str, Number] = {}
    for each in counts:
        for name, value in each.items():
            total[name] = total[name] + value if name in total else value
    return total


def _joules(waves: Sequence[Wave]) -> float | None:
    known = _known(wave.joules for wave in waves)
    return sum(known) if len(known) == len(waves) else None
