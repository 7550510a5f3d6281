"""Which strategies of the catalogue work for a target as they stand. Loads neither draft models nor heads' layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

from parlay.drafters.resources import Resources
from parlay.strategies.building import build
from parlay.strategies.catalogue import catalogue
from parlay.strategies.spelling import parse
from parlay.types import Needs, ParlayError


class _Found(Exception):
    """Raised when a drafter is about to load the target's default draft model or head."""


def offered(resources: Resources, check: Callable[[str, Needs], None]) -> tuple[str, ...]:
    """The names of those that need no parameter, file or model beyond what the target has, in the catalogue's order.

    ``check`` raises ValueError for needs that the target can't meet. A draft model of the wrong vocabulary is not
    noticed, because that shows only when it is loaded.
    """
    return tuple(name for name in catalogue() if works(name, resources, check))


def works(name: str, resources: Resources, check: Callable[[str, Needs], None] = lambda name, needs: None) -> bool:
    """Whether the strategy is one of those: builds its drafter as far as its first model."""
    with ExitStack() as closing:
        trial = replace(
            resources,
            open_runner=_stop,
            open_tokenizer=_stop,
            find_head=lambda method, name: _stop_if(resources, method, name),
            closing=closing,
        )
        try:
            drafter = build(parse(name), trial)
            if drafter is not None:
                check(name, drafter.needs)
        except _Found:
            return True
        except (ParlayError, ValueError):
            return False
    return True


def _stop(name: str) -> NoReturn:
    raise _Found(name)


def _stop_if(resources: Resources, method: str, name: str) -> None:
    if resources.find_head is not None and resources.find_head(method, name) is not None:
        raise _Found(name)
