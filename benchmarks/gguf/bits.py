"""Checks that logits have the same bits, whatever other rows run in the forward and however earlier tokens were
cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, cycle
from pathlib import Path

import torch
from torch import Tensor

from parlay import models
from parlay.bench.records import Cell, Row
from parlay.options import LoadOptions
from parlay.system import threads
from parlay.types import Runner, Segment, trees

PART = "bits"
TOKENS = 160
SIZES = (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 17, 31)
"""The numbers of rows of successive forwards."""


class Reader:
    """Reads one text in several ways. Each way gives the logits ``[N, V]`` of all its tokens, or of the last N."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._names = count()
        self._text = tuple(7 + 31 * place % 997 for place in range(TOKENS))

    def ways(self) -> Mapping[str, Callable[[], Tensor]]:
        """Return the ways by name. The first is the one that the others are compared with."""
        return {
            "alone": lambda: self._fed(cycle([TOKENS])),
            "again": lambda: self._fed(cycle([TOKENS])),
            "rows": lambda: self._fed(cycle(SIZES)),
            "row by row": lambda: self._fed(cycle([1])),
            "chunks of 64": lambda: self._fed(cycle([64])),
            "mates": self._beside_others,
            "one thread": lambda: self._with_threads(1),
            "three threads": lambda: self._with_threads(3),
            "drafted": self._drafted,
            "reused": self._reused,
        }

    def _open(self, salt: str | None = None) -> tuple[int, int]:
        """Open a sequence of the text with room for all of it. Return its number and how many of its tokens are
        cached already."""
        name = next(self._names)
        cached = self._runner.open(name, self._text, salt or f"alone {name}")
        self._runner.reserve(name, TOKENS + 1)
        return name, cached

    def _fed(self, sizes: Iterator[int], salt: str | None = None) -> Tensor:
        name, at = self._open(salt)
        parts: list[Tensor] = []
        while at < TOKENS:
            tokens = self._text[at : at + next(sizes)]
            parts.append(self._runner.forward([Segment(name, tokens)]).logits_RV)
            at = self._runner.keep(name, ())
        self._runner.release(name)
        return torch.cat(parts)

    def _with_threads(self, number: int) -> Tensor:
        with threads.using(number):
            return self._fed(cycle([TOKENS]))

    def _beside_others(self) -> Tensor:
        """Read the text in one forward with two others of different lengths, between them."""
        names = [self._open()[0] for _ in range(3)]
        texts = (self._text[5:], self._text, self._text[::-1])
        segments = [Segment(name, tokens) for name, tokens in zip(names, texts, strict=True)]
        logits_RV = self._runner.forward(segments).logits_RV[TOKENS - 5 : 2 * TOKENS - 5]
        for name in names:
            self._runner.release(name)
        return logits_RV

    def _drafted(self) -> Tensor:
        """Read the first half as pending tokens and the second half as a drafted chain."""
        name, _ = self._open()
        pending, chain = self._text[: TOKENS // 2], self._text[TOKENS // 2 :]
        logits_RV = self._runner.forward([Segment(name, pending, trees.chain_tree(chain))]).logits_RV
        self._runner.release(name)
        return logits_RV

    def _reused(self) -> Tensor:
        """Read the text behind a prefix that another sequence has left in the cache."""
        self._fed(cycle([TOKENS]), "shared")
        return self._fed(cycle([TOKENS]), "shared")


def measure(path: Path) -> Iterator[Row]:
    """Yield a row for each way: how many logits differ from those of the text read in one forward."""
    runner = models.load(str(path), LoadOptions(), cache_tokens=16 * TOKENS)
    reader = Reader(runner)
    first: Tensor | None = None
    for way, read in reader.ways().items():
        logits_NV = read()
        first = logits_NV if first is None else first
        differing = int((logits_NV != first[len(first) - len(logits_NV) :]).sum())
        cell = Cell(part=PART, model=path.stem, strategy=way, workload="a text")
        yield Row(cell=cell, tokens=len(logits_NV), values={"differing": differing, "compared": logits_NV.numel()})


def table_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return table lines with the number of differing logits for each file and way; the first line is the head."""
    own = [row for row in rows if row.cell.part == PART]
    found = {(row.cell.model, row.cell.strategy): int(row.values["differing"]) for row in own}
    ways = dict.fromkeys(row.cell.strategy for row in own)
    models_ = dict.fromkeys(row.cell.model for row in own)
    return [("file", *ways), *((model, *(str(found.get((model, way), "-")) for way in ways)) for model in models_)]
