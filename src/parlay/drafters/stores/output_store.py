"""Past outputs, looked up by later requests of the same tenant: the store behind several drafters."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from parlay.drafters.stores.store_files import Saving, StoreFile
from parlay.drafters.stores.suffixes import Suffixes
from parlay.options import Options, option
from parlay.types import Observation, Request, SequenceView


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions(Options):
    """How much is kept, and in which file."""

    store: str = option("", "file in which past outputs outlive the process; empty: none", opens=True)
    max_tokens: int = option(
        250_000, "past outputs to keep, in tokens; the oldest go first", low=1, high=1e9, keeps=True
    )
    save_every: int = option(8, "requests after which the file is written", low=1, high=1e6)


class OutputStore:
    """The outputs of one tenant's past requests, first in, first out, and their suffixes.

    An automaton can't shrink. So once outputs are dropped, new ones are also added to a successor. It replaces the
    automaton when all outputs that are kept are in it. Nothing is ever rebuilt at once, and memory never exceeds about
    three times what is kept, at 80 to 100 bytes a token.
    """

    def __init__(self, depth: int) -> None:
        self.suffixes = Suffixes(depth)
        self.texts: deque[array[int]] = deque()
        self._successor: Suffixes | None = None
        self._young = 0  # texts that the successor holds too

    def add(self, text: array[int]) -> None:
        self.texts.append(text)
        self.suffixes.add(text)
        if self._successor is not None:
            self._successor.add(text)
            self._young += 1

    def drop_oldest(self) -> int:
        """Forget one text; returns its length."""
        text = self.texts.popleft()
        self.suffixes.remove(text)
        if self._successor is None:
            self._successor = Suffixes(self.suffixes.depth)
        elif len(self.texts) == self._young:
            self.suffixes, self._successor, self._young = self._successor, None, 0
        return len(text)


class OutputStores:
    """The outputs of each tenant's past requests, together at most ``max_tokens``; the oldest are dropped first.

    An output joins when its request ends and was observed: committed tokens only. Requests with ``store=False`` are
    never learned from, and a tenant (the requests of one ``salt``) sees its own outputs only.
    """

    def __init__(self, depth: int, options: StoreOptions, vocab_size: int, strategy: str) -> None:
        self._depth = depth
        self._max_tokens = options.max_tokens
        self._stores: dict[str, OutputStore] = {}
        self._order: deque[str] = deque()  # the tenant of each output, oldest first
        self._tokens = 0
        self._views: dict[int, SequenceView] = {}
        file = StoreFile(Path(options.store), "outputs", vocab_size, strategy) if options.store else None
        self._saving = Saving(file, options.save_every, self._texts)
        if file is not None:
            self._load(file)

    def of(self, request: Request) -> Suffixes | None:
        """The suffixes of what the request's tenant has put out so far; None if that is nothing."""
        store = self._stores.get(request.salt)
        return store.suffixes if store is not None else None

    def observe(self, observations: Sequence[Observation]) -> None:
        """Remembers the views, to learn their outputs when the requests end."""
        for observation in observations:
            view = observation.view
            if view.request.store:
                self._views[view.sequence] = view

    def release(self, sequence: int) -> None:
        """The request is over: its output, up to its first stop token, joins the store."""
        view = self._views.pop(sequence, None)
        if view is None:
            return
        self._learn(view.request.salt, _output(view))
        self._saving.changed()

    def save(self) -> None:
        """Write what is new to the file, if one is named."""
        self._saving.save()

    def _texts(self) -> dict[str, list[array[int]]]:
        return {salt: list(store.texts) for salt, store in self._stores.items()}

    def _load(self, file: StoreFile) -> None:
        texts = [(salt, text) for salt, tenant in file.load().items() for text in tenant]
        surplus = sum(len(text) for _, text in texts) - self._max_tokens
        for salt, text in texts:
            if surplus <= 0:
                self._learn(salt, text)
            surplus -= len(text)

    def _learn(self, salt: str, text: array[int]) -> None:
        text = text[-self._max_tokens :]
        if not text:
            return
        while self._tokens + len(text) > self._max_tokens:
            self._drop_oldest()
        if salt not in self._stores:
            self._stores[salt] = OutputStore(self._depth)
        self._stores[salt].add(text)
        self._order.append(salt)
        self._tokens += len(text)

    def _drop_oldest(self) -> None:
        salt = self._order.popleft()
        store = self._stores[salt]
        self._tokens -= store.drop_oldest()
        if not store.texts:
            del self._stores[salt]


def _output(view: SequenceView) -> array[int]:
    text = array("i", view.tokens[view.prompt_length :])
    stop = next((place for place, token in enumerate(text) if token in view.request.stop_ids), len(text))
    return text[: stop + 1]
