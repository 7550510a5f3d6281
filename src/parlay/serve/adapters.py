"""Adapters that requests name like models: which there are, and the model beneath each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.types import ParlayError

MOST_ADAPTERS = 256
"""That one server has by name at most, for each takes memory."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter in a folder, for the model called ``base``. Clients may know the folder as ``shown``."""

    name: str
    base: str
    folder: Path
    created: int = field(default_factory=lambda: int(time.time()))
    shown: str = ""

    def on(self, served: Served) -> Served:
        """The model with the adapter, loaded if it is not. Raises ApiError for one that can't be. Blocks."""
        try:
            adapter = served.llm.llm.adapters.load(self.name, self.folder)
        except (ParlayError, ValueError) as error:
            message = str(error).replace(str(self.folder), self.shown or str(self.folder))
            raise ApiError(400, message, "lora_path") from None
        return replace(served, name=self.name, adapter=adapter)


class NamedAdapters:
    """By name. Lives in one event loop."""

    def __init__(self) -> None:
        self._named: dict[str, NamedAdapter] = {}

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(list(self._named.values()))

    def get(self, name: str | None) -> NamedAdapter | None:
        """The adapter of that name, if there is one."""
        return self._named.get(name) if name is not None else None

    def add(self, adapter: NamedAdapter) -> None:
        """Let requests name it."""
        self._named[adapter.name] = adapter

    def remove(self, adapter: NamedAdapter) -> None:
        """Let requests name it no more; those under way go on with it."""
        if self._named.get(adapter.name) is adapter:
            del self._named[adapter.name]

    def check_free(self, name: str) -> None:
        """Raises ApiError for a name that is taken, and where there is no room for another adapter."""
        if name in self._named:
            raise ApiError(400, f"the adapter {name!r:.100} is loaded already: unload it first", "lora_name")
        if len(self._named) >= MOST_ADAPTERS:
            raise ApiError(400, f"there are {MOST_ADAPTERS} adapters, the most: unload one first", "lora_name")
