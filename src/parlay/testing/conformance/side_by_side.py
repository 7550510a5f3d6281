"""Runs the kit on many strategies, several at once. It is no part of `__main__`, because other processes can't import
that."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import torch

from parlay.testing.conformance import KitLength, Report, check_strategy


def run(specs: Sequence[str], effort: KitLength, processes: int) -> Iterator[Report]:
    """Yield a report for each strategy, in order, as soon as it is ready."""
    if processes <= 1:
        yield from (check_quietly(spec, effort) for spec in specs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(check_quietly, specs, repeat(effort))


def check_quietly(spec: str, effort: KitLength) -> Report:
    """Check a strategy without the engine's warnings, because some drafters fail on purpose."""
    logger = logging.getLogger("parlay")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return check_strategy(spec, effort=effort)
    finally:
        logger.setLevel(level)
