"""Replays files of recorded answers with strategies, as rows of results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from parlay.bench.forwards import ForwardPrices
from parlay.bench.loops import first_loop, looped
from parlay.bench.records import Cell, Results, Row
from parlay.bench.replay.answers import read_answers
from parlay.bench.replay.decode import Replay, Replayed, replay
from parlay.bench.replay.tokens import Recorded, RecordedTokens, recorded
from parlay.bench.tally import drafts
from parlay.bench.workloads.files import stem
from parlay.strategies.catalogue import catalogue
from parlay.types import ParlayError

MODEL = "recorded answers"


@dataclass(frozen=True, slots=True)
class Texts:
    """Recorded answers of one file as token ids, cut at their first loop.

    ``looped`` is the share of tokens in loops before the answers were cut.
    """

    name: str
    records: tuple[Recorded, ...]
    looped: float


def read_texts(path: Path, tokens: RecordedTokens, limit: int | None = None) -> Texts:
    """Read the first ``limit`` answers of a file that are not empty. Raises ValueError if there are none."""
    made = (recorded(answer, tokens) for answer in read_answers(path) if answer.prompt)
    records = list(islice((record for record in made if record.prompt and record.output), limit))
    if not records:
        raise ValueError(f"{path} holds no recorded answer with any text")
    within = sum(looped(record.output) * len(record.output) for record in records)
    cut = (replace(record, output=record.output[: first_loop(record.output)]) for record in records)
    return Texts(stem(path), tuple(cut), within / sum(len(record.output) for record in records))


def cell(strategy: str, texts: Texts, prices: ForwardPrices | None = None) -> Cell:
    """Return the cell of a replay. Its model's name says which model's prices the forwards have, if any."""
    model = f"{MODEL}, priced as {prices.model}" if prices is not None else MODEL
    return Cell(model=model, strategy=strategy, workload=texts.name)


def measure(strategy: str, texts: Texts, tokens: RecordedTokens, prices: ForwardPrices | None = None) -> Row:
    """Replay one file of answers with one strategy. If the strategy can't be replayed, the row says why."""
    where = cell(strategy, texts, prices)
    note = f"tokens of {tokens.name}" + ("" if prices is not None else "; drafts verified whole")
    try:
        done = replay(strategy, texts.records, tokens, prices)
    except (ParlayError, ValueError) as error:
        return Row(cell=where, error=str(error), note=note)
    faulty = sum(one.metrics.drafter_faults > 0 for one in done)
    note += f"; the drafter failed in {faulty} of {len(done)} answers" if faulty else ""
    row = _counts(Row(cell=where, looped=texts.looped, note=note), texts, done)
    return _priced(row, done) if prices is not None else row


def _counts(row: Row, texts: Texts, done: Sequence[Replayed]) -> Row:
    metrics = [one.metrics for one in done]
    tokens = sum(one.completion_tokens for one in metrics)
    return replace(
        row,
        requests=len(done),
        tokens=tokens,
        fresh_tokens=tokens,
        decode_tokens=sum(one.completion_tokens - one.first_step_tokens for one in metrics),
        **drafts(metrics),
        draft_seconds=round(sum(one.draft_seconds for one in metrics), 6),
        same=sum(one.tokens == record.output for one, record in zip(done, texts.records, strict=True)),
        of=len(done),
        exactness=str(metrics[0].exactness),
    )


def _priced(row: Row, done: Sequence[Replayed]) -> Row:
    """Return the row with modelled seconds: the prices of forwards plus the measured time of drafting.

    The engine's own time is left out.
    """
    verify = sum(one.forward_seconds for one in done)
    return replace(row, decode_seconds=verify + row.draft_seconds, verify_seconds=verify, modelled=True)


def replayable(tokens: RecordedTokens) -> list[str]:
    """Return the strategies of the catalogue that can be replayed with their default options."""
    return [name for name in catalogue() if _can_replay(name, tokens)]


def _can_replay(strategy: str, tokens: RecordedTokens) -> bool:
    try:
        Replay(strategy, tokens)
    except (ParlayError, ValueError):
        return False
    return True


def lacking(
    texts: Sequence[Texts], strategies: Sequence[str], results: Results, prices: ForwardPrices | None = None
) -> list[tuple[Texts, str]]:
    """Return the pairs of texts and strategy that are not yet in ``results``."""
    return [
        (each, strategy) for each in texts for strategy in strategies if not results.of(cell(strategy, each, prices))
    ]


def run(
    pairs: Sequence[tuple[Texts, str]], tokens: RecordedTokens, results: Results, prices: ForwardPrices | None = None
) -> Iterator[Row]:
    """Replay each pair and store its row at once. Yields each row."""
    for texts, strategy in pairs:
        row = measure(strategy, texts, tokens, prices)
        results.add([row])
        yield row
