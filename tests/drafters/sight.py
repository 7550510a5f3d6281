"""Helpers for tests that drive a drafter by hand: requests, a view of a sequence, and one call of `propose`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from parlay.drafters.stores.store_files import STORE_WRITER
from parlay.types import Draft, Drafter, NoiseKey, Request, Runner, SamplingParams, SequenceView, trees

GREEDY = Request(id="r", prompt=(0,), params=SamplingParams(temperature=0), key=NoiseKey(7))
SAMPLED = replace(GREEDY, params=SamplingParams(temperature=0.8))

MakeRunner = Callable[..., Any]
"""The fixture `toy_runner`."""


@dataclass
class Sight:
    """A `SequenceView` whose tokens the test sets."""

    sequence: int = 0
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    request: Request = GREEDY
    prompt_length: int = 1
    layers: None = None


def propose(drafter: Drafter, view: SequenceView, budget: int) -> Draft:
    """Return the draft for one sequence."""
    return drafter.propose([view], [budget])[0]


def drafted(drafter: Drafter, tokens: Sequence[int], budget: int, request: Request = GREEDY) -> Draft:
    """Return the draft after these tokens."""
    return propose(drafter, Sight(0, list(tokens), request, len(request.prompt)), budget)


def no_runner(name: str) -> Runner:
    """For drafters that open no model."""
    raise AssertionError(f"{name} was opened")


def token_paths(draft: Draft) -> set[tuple[int, ...]]:
    """The tokens on the way to each node."""
    tree = draft.tree
    return {tuple(tree.tokens[step] for step in trees.path_to(tree, node)) for node in range(len(tree))}


EDITS = st.sampled_from(["grow", "cut", "replace", "fork"])


def edit(tokens: list[int], what: str, others: list[int]) -> list[int]:
    """A text after one of `EDITS`, as sequences change between two calls of a drafter; it may be the same list."""
    if what == "grow":
        tokens += others
    elif what == "cut":
        del tokens[max(1, len(tokens) - len(others)) :]
    elif what == "replace":
        tokens[:] = [0, *others]
    else:
        return [*tokens[: 1 + len(others)], *others]
    return tokens


def wait_for_store_files() -> None:
    """Wait until no store is being written."""
    for thread in threading.enumerate():
        if thread.name == STORE_WRITER:
            thread.join()
