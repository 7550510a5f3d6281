"""Runs the rounds of every comparison: systems take turns to decode the same requests, wave by wave.

The order of the systems changes from wave to wave. Ratios of two systems are taken within a round, so that a slow
minute of the machine affects both alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

from parlay.bench.host import burning
from parlay.bench.loops import FEWEST_TOKENS
from parlay.bench.prepare import in_groups
from parlay.bench.records import Cell, Row, System
from parlay.bench.tally import row_of
from parlay.bench.wave import Ask, Decoder, Prepared, Wave
from parlay.types import ParlayError


class Rounds:
    """Measures rounds. ``decoders`` run the systems, by engine. If a system fails, its row holds the error.

    In a round every system decodes all requests once, and again until ``seconds`` have passed. A system is warmed up
    before its first round, unless ``warm_up`` is False.
    """

    def __init__(self, decoders: Mapping[str, Decoder], seconds: float = 0.0, *, warm_up: bool = True) -> None:
        self._decoders = decoders
        self._seconds = seconds
        self._warms_up = warm_up
        self._warm: dict[tuple[System, int], str] = {}
        """The error of warming up each system at each concurrency; empty if there was none."""

    def measure(self, cells: Sequence[Cell], prepared: Prepared, number: int) -> list[Row]:
        """Measure round ``number`` of cells that differ only in the system."""
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
        """Decode every wave with every system, and again while there is time. A system that fails joins ``failed``."""
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
        """Warm up a system before its first round at a concurrency. Returns its error, or an empty text.

        One wave is decoded twice, first with short answers. Compiled systems compile in the first run and may compile
        again in the second.
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
    """Return the cells in the same cyclic order, but beginning ``by`` places later."""
    shift = by % max(len(cells), 1)
    return [*cells[shift:], *cells[:shift]]


def one_line(error: Exception) -> str:
    """Return the beginning of an error's message. The error's type comes first unless it is a ParlayError."""
    message = " ".join(str(error).split())
    return (message if isinstance(error, ParlayError) else f"{type(error).__name__}: {message}")[:300]
