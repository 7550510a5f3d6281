"""Many strategies through the kit, several at once; apart from the command: processes can't import a main module."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import torch

from parlay.testing.conformance import KitLength, Report, check_strategy


def run(specs: Sequence[str], effort: KitLength, processes: int) -> Iterator[Report]:
    """A report for each strategy, in order, as they come."""
    if processes <= 1:
        yield from (check_quietly(spec, effort) for spec in specs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(check_quietly, specs, repeat(effort))


def check_quietly(spec: str, effort: KitLength) -> Report:
    """Silence the engine's warnings: drafters that fail on purpose are no news."""
    logger = logging.getLogger("parlay")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return check_strategy(spec, effort=effort)
    finally:
        logger.setLevel(level)
