"""LoRA adapters that requests name in place of a model, each with its base model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from parlay.serve.errors import ApiError
from parlay.serve.hosted import Served
from parlay.types import ParlayError

MOST_ADAPTERS = 256
"""The most named adapters of one server, as each takes memory."""


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter in a folder, for the model named ``base``. Replies show ``shown`` in place of the folder's path."""

    name: str
    base: str
    folder: Path
    created: int = field(default_factory=lambda: int(time.time()))
    shown: str = ""

    def on(self, served: Served) -> Served:
        """The base model with the adapter; the model is loaded first if necessary. Raises ApiError if the adapter can't
        be loaded. This blocks."""
        try:
            adapter = served.llm.adapters.load(self.name, self.folder)
        except (ParlayError, ValueError) as error:
            message = str(error).replace(str(self.folder), self.shown or str(self.folder))
            raise ApiError(400, message, "lora_path") from None
        return replace(served, name=self.name, adapter=adapter)


class NamedAdapters:
    """The adapters that requests may name. All calls belong to one event loop."""

    def __init__(self) -> None:
        self._named: dict[str, NamedAdapter] = {}

    def __iter__(self) -> Iterator[NamedAdapter]:
        return iter(list(self._named.values()))

    def get(self, name: str | None) -> NamedAdapter | None:
        """The adapter of that name; None if there is none."""
        return self._named.get(name) if name is not None else None

    def add(self, adapter: NamedAdapter) -> None:
        """Let requests name this adapter."""
        self._named[adapter.name] = adapter

    def remove(self, adapter: NamedAdapter) -> None:
        """Let no further request name it; those under way keep it."""
        if self._named.get(adapter.name) is adapter:
            del self._named[adapter.name]

    def check_free(self, name: str) -> None:
        """Raises ApiError if the name is taken, or if there are `MOST_ADAPTERS` already."""
        if name in self._named:
            raise ApiError(400, f"the adapter {name!r:.100} is already loaded: unload it first", "lora_name")
        if len(self._named) >= MOST_ADAPTERS:
            raise ApiError(
                400, f"{MOST_ADAPTERS} adapters are loaded, which is the limit: unload one first", "lora_name"
            )
