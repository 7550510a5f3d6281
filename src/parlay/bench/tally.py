"""From the waves of one cell in one round to its row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from parlay.bench.loops import first_loop
from parlay.bench.records import Cell, Row
from parlay.bench.wave import Answer, Ids, Wave
from parlay.types import Exactness

COMPARED = frozenset({Exactness.BITS, Exactness.SEED})
"""The levels at which the tokens of plain decoding are promised."""


def row_of(
    cell: Cell, number: int, waves: Sequence[Wave], goals: Sequence[Ids], *, looped: float | None, note: str
) -> Row:
    """``goals`` are plain decoding's tokens for each answer, in the order of the waves."""
    answers = [answer for wave in waves for answer in wave.answers]
    exactness = Exactness.weakest(*(answer.metrics.exactness for answer in answers))
    promised = exactness in COMPARED
    same = sum(answer.tokens == goal for answer, goal in zip(answers, goals, strict=True))
    metrics = [answer.metrics for answer in answers]
    scale = _scale(waves)
    return Row(
        cell=cell,
        round=number,
        requests=len(answers),
        tokens=sum(len(answer.tokens) for answer in answers),
        fresh_tokens=sum(first_loop(answer.tokens) for answer in answers),
        decode_tokens=sum(wave.decode_tokens for wave in waves),
        decode_seconds=sum(wave.decode_seconds for wave in waves),
        seconds=sum(wave.seconds for wave in waves),
        ttft=_known(answer.first_seconds for answer in answers),
        itl=_known(answer.between_seconds for answer in answers),
        steps=sum(each.steps for each in metrics),
        proposed_by_position=_added(each.drafted_by_depth for each in metrics),
        accepted_by_position=_added(each.accepted_by_depth for each in metrics),
        proposed_by_source=_merged(each.drafted_by_source for each in metrics),
        accepted_by_source=_merged(each.accepted_by_source for each in metrics),
        prefill_seconds=scale * sum(each.prefill_seconds for each in metrics),
        draft_seconds=scale * sum(each.draft_seconds for each in metrics),
        verify_seconds=scale * sum(each.verify_seconds for each in metrics),
        overhead_seconds=scale * sum(each.overhead_seconds for each in metrics),
        peak_memory_bytes=max(wave.peak_memory_bytes for wave in waves),
        looped=looped,
        same=same if promised else 0,
        of=len(answers) if promised else 0,
        exactness=str(exactness),
        joules=_joules(waves),
        note="; ".join(filter(None, [note, _faults(answers)])),
    )


def _scale(waves: Sequence[Wave]) -> float:
    """A step counts in full for each request that took part in it: brought back to the time that passed."""
    counted = sum(answer.metrics.seconds for wave in waves for answer in wave.answers)
    passed = sum(wave.seconds for wave in waves)
    return min(1.0, passed / counted) if counted else 1.0


def _faults(answers: Sequence[Answer]) -> str:
    faulty = sum(answer.metrics.drafter_faults > 0 for answer in answers)
    return f"the drafter failed in {faulty} of {len(answers)} requests" if faulty else ""


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _added(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def _merged(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _joules(waves: Sequence[Wave]) -> float | None:
    known = _known(wave.joules for wave in waves)
    return sum(known) if len(known) == len(waves) else None
