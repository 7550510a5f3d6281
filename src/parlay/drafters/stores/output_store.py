"""Past outputs, looked up by later requests of the same tenant: the store behind several drafters."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parlay.drafters.resources import Resources
from parlay.drafters.state_room import most_tenants
from parlay.drafters.step_budget import STEP_TOKENS
from parlay.drafters.stores.live_texts import LiveText, LiveTexts
from parlay.drafters.stores.store_files import Saving, StoreFile
from parlay.drafters.stores.suffixes import Suffixes
from parlay.options import Options, option, user_path
from parlay.types import Observation, Request, SequenceView

_OVER = object()
"""Marks the end of an iterator that works token by token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions(Options):
    """Options of stores of past outputs: how much is kept, and the file."""

    store: str = option("", "file that keeps past outputs between runs; empty: none", opens=True)
    max_tokens: int = option(
        250_000,
        "tokens of past outputs to keep; if there are more, the tenant with most loses its oldest",
        low=1,
        high=1e9,
        keeps=True,
    )
    save_every: int = option(8, "write the file after so many requests", low=1, high=1e6)


class OutputStore:
    """The outputs of one tenant's past requests, first in, first out, and their suffixes.

    An automaton can't shrink. So once outputs are dropped, new ones are also added to a successor, which replaces the
    automaton when it has all kept outputs. Nothing is ever rebuilt at once, and memory stays below about three times
    what is kept, at 80 to 100 bytes per token. `add` and `drop_oldest` do their work as they are iterated over, one
    token of one automaton at a time; each must end before the next begins.
    """

    def __init__(self, depth: int) -> None:
        self.suffixes = Suffixes(depth)
        self.texts: deque[array[int]] = deque()
        self.tokens = 0
        self._successor: Suffixes | None = None
        self._young = 0  # how many texts the successor has, too

    def add(self, text: array[int]) -> Iterator[None]:
        self.texts.append(text)
        self.tokens += len(text)
        yield from self.suffixes.adding(text)
        if self._successor is not None:
            yield from self._successor.adding(text)
            self._young += 1

    def drop_oldest(self) -> Iterator[None]:
        """Forget the oldest text."""
        text = self.texts.popleft()
        self.tokens -= len(text)
        yield from self.suffixes.removing(text)
        if self._successor is None:
            self._successor = Suffixes(self.suffixes.depth)
        elif len(self.texts) == self._young:
            self.suffixes, self._successor, self._young = self._successor, None, 0


class OutputStores:
    """The outputs of each tenant's past requests, at most ``max_tokens`` together.

    An output is added when its request ends, if it was observed: only committed tokens, `STEP_TOKENS` of them per step.
    If there are too many, the tenant with the most loses its oldest output, so no tenant can push out the outputs of
    one that has fewer. If there are too many tenants (`most_tenants`), the one without a new output for longest is
    dropped. Nothing is learned from requests with ``store=False``, and a tenant (the requests of one ``salt``) sees
    only its own outputs.
    """

    def __init__(self, depth: int, options: StoreOptions, vocab_size: int, strategy: str) -> None:
        self._depth = depth
        self._max_tokens = options.max_tokens
        self._stores: dict[str, OutputStore] = {}  # the latest to learn last
        self._kept = 0
        self._views: dict[int, SequenceView] = {}
        self._waiting: deque[tuple[str, array[int]]] = deque()
        self._work: Iterator[None] = iter(())
        file = StoreFile(user_path(options.store), "outputs", vocab_size, strategy) if options.store else None
        self._saving = Saving(file, options.save_every, self._texts)
        if file is not None:
            self._waiting.extend(
                (salt, text[-options.max_tokens :]) for salt, tenant in file.load().items() for text in tenant
            )
            self.advance(sys.maxsize)

    def of(self, request: Request) -> Suffixes | None:
        """The suffixes of the outputs of the request's tenant; None if there are none."""
        store = self._stores.get(request.salt)
        return store.suffixes if store is not None else None

    def observe(self, observations: Sequence[Observation]) -> None:
        """Remember the views, to learn their outputs when the requests end."""
        for observation in observations:
            view = observation.view
            if view.request.store:
                self._views[view.sequence] = view

    def release(self, sequence: int) -> None:
        """Queue the output of a request that has ended, up to its first stop token."""
        view = self._views.pop(sequence, None)
        if view is None:
            return
        text = _output(view)[-self._max_tokens :]
        if text and sum([len(waiting) for _, waiting in self._waiting]) <= self._max_tokens:
            self._waiting.append((view.request.salt, text))
        self.advance()
        self._saving.changed()

    def save(self) -> None:
        """Write unsaved outputs to the file, if there is one."""
        self._saving.save()

    def _texts(self) -> dict[str, list[array[int]]]:
        """Copies of all texts, by tenant. Any thread may call this: each copy is one operation of the interpreter."""
        return {salt: list(store.texts) for salt, store in list(self._stores.items())}

    def advance(self, most: int = STEP_TOKENS) -> None:
        """Add queued outputs, up to ``most`` tokens."""
        for _ in range(most):
            while next(self._work, _OVER) is _OVER:
                if not self._waiting:
                    return
                self._work = self._learning(*self._waiting.popleft())

    def _learning(self, salt: str, text: array[int]) -> Iterator[None]:
        while self._kept + len(text) > self._max_tokens:
            most = max(self._stores, key=lambda each: self._stores[each].tokens + len(text) * (each == salt))
            self._kept -= len(self._stores[most].texts[0])
            yield from self._stores[most].drop_oldest()
            if not self._stores[most].texts:
                del self._stores[most]
        store = self._stores.pop(salt, None) or OutputStore(self._depth)
        self._stores[salt] = store
        if len(self._stores) > most_tenants(self._max_tokens):
            self._kept -= self._stores.pop(next(iter(self._stores))).tokens
        self._kept += len(text)
        yield from store.add(text)


class KnownTexts:
    """The texts that a drafter copies from: each request's own, and the past outputs of its tenant.

    In both, substrings of up to ``depth`` tokens are counted. The outputs are saved when the resources are closed.
    """

    def __init__(self, depth: int, resources: Resources, options: StoreOptions, strategy: str) -> None:
        self._live = LiveTexts(depth, resources.room)
        self._stores = OutputStores(depth, options, resources.vocab_size, strategy)
        resources.closing.callback(self._stores.save)

    def begin(self, budgets: Sequence[int]) -> None:
        """Begin a step in which the sequences with a budget draft."""
        self._live.begin(budgets)
        self._stores.advance()

    def own(self, view: SequenceView) -> LiveText | None:
        """The request's references, prompt and output; None while they are being indexed."""
        return self._live.of(view)

    def past(self, request: Request) -> Suffixes | None:
        """The past outputs of the request's tenant; None if there are none."""
        return self._stores.of(request)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Remember the views, to learn their outputs when the requests end."""
        self._stores.observe(observations)

    def release(self, sequence: int) -> None:
        """Forget a sequence, and learn its output."""
        self._live.release(sequence)
        self._stores.release(sequence)


def _output(view: SequenceView) -> array[int]:
    text = array("i", view.tokens[view.prompt_length :])
    stop = next((place for place, token in enumerate(text) if token in view.request.stop_ids), len(text))
    return text[: stop + 1]
