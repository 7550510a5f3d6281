"""The one loop of every comparison: systems decode the same requests in turns, wave by wave, round after round.

Who begins changes from wave to wave, and a ratio of two systems is taken within a round, so that it is one of the same
minute: a slow minute of the machine spoils no system alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

from parlay.bench.busy import burning
from parlay.bench.loops import FEWEST_TOKENS
from parlay.bench.prepare import in_groups
from parlay.bench.records import Cell, Row, System
from parlay.bench.tally import row_of
from parlay.bench.wave import Ask, Decoder, Prepared, Wave
from parlay.types import ParlayError


class Rounds:
    """Measures rounds of systems that ``decoders`` run, by engine. What fails is a row that says so.

    In a round everyone goes through the requests once, or again and again until ``seconds`` have passed. Before its
    first round a system is warmed up, unless ``warm_up`` is False.
    """

    def __init__(self, decoders: Mapping[str, Decoder], seconds: float = 0.0, *, warm_up: bool = True) -> None:
        self._decoders = decoders
        self._seconds = seconds
        self._warms_up = warm_up
        self._warm: dict[tuple[System, int], str] = {}
        """What warming up a system at a concurrency raised; empty where it went well."""

    def measure(self, cells: Sequence[Cell], prepared: Prepared, number: int) -> list[Row]:
        """One round, numbered so, of cells that differ in nothing but who decodes."""
        if not prepared.asks:
            return [Row(cell=cell, round=number, looped=prepared.looped, note=prepared.note) for cell in cells]
        size = cells[0].concurrency
        prepared = prepared.filled(size)
        waves = list(in_groups(prepared.asks, size))
        failed = {cell.system: error for cell in cells if (error := self._warm_up(cell, waves[0]))}
        found = self._take_turns([cell for cell in cells if cell.system not in failed], waves, number, failed)
        return [
            Row(cell=cell, round=number, error=failed[cell.system])
            if cell.system in failed
            else row_of(cell, number, found[cell.system], prepared)
            for cell in cells
        ]

    def _take_turns(
        self, cells: Sequence[Cell], waves: Sequence[Sequence[Ask]], number: int, failed: dict[System, str]
    ) -> dict[System, list[Wave]]:
        """Every wave by everyone, and all again while there is time; who raises is out, and ``failed`` says why."""
        found: dict[System, list[Wave]] = {cell.system: [] for cell in cells}
        with burning(cells[0].busy if cells else 0):
            ends = time.monotonic() + self._seconds
            for turn, asks in enumerate(chain.from_iterable(repeat(waves))):
                if turn and turn % len(waves) == 0 and time.monotonic() >= ends:
                    break
                for cell in rotated(cells, number + turn):
                    if cell.system not in failed:
                        self._decode(cell, asks, found, failed)
        return found

    def _decode(
        self, cell: Cell, asks: Sequence[Ask], found: dict[System, list[Wave]], failed: dict[System, str]
    ) -> None:
        try:
            decoder = self._decoders[cell.engine]
            found[cell.system].append(decoder.decode(cell.strategy, asks, cell.temperature))
        except Exception as error:  # the row says so
            failed[cell.system] = one_line(error)

    def _warm_up(self, cell: Cell, asks: Sequence[Ask]) -> str:
        """Run a wave, the first time at this concurrency, a little and then whole; what raised is an error for good.

        Compiled systems compile in the first run and may compile again in the second.
        """
        key = (cell.system, cell.concurrency)
        if self._warms_up and key not in self._warm:
            found: dict[System, list[Wave]] = {cell.system: []}
            failed: dict[System, str] = {}
            for wave in ([replace(ask, most=min(ask.most, FEWEST_TOKENS)) for ask in asks], asks):
                if not failed:
                    self._decode(cell, wave, found, failed)
            self._warm[key] = failed.get(cell.system, "")
        return self._warm.get(key, "")


def rotated(cells: Sequence[Cell], by: int) -> Sequence[Cell]:
    """The same, another one first."""
    shift = by % max(len(cells), 1)
    return [*cells[shift:], *cells[:shift]]


def one_line(error: Exception) -> str:
    """The beginning of an error's message, and its type where the message was not written for users."""
    message = " ".join(str(error).split())
    return (message if isinstance(error, ParlayError) else f"{type(error).__name__}: {message}")[:300]
