"""The adapters of one LLM by name: loaded once, chosen by requests, and freed when unloaded and no longer in use."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parlay.models import UnsupportedModel
from parlay.models.lora import refuse_masks
from parlay.options import user_path
from parlay.ranks.leader import adapter_reader
from parlay.types import Adapter, Runner


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter by name, and the folder in PEFT's layout from which it is loaded at its first use.

    Argument names are vLLM's; ``lora_int_id`` is ignored.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str | Path = ""


Adapted = LoRARequest | str | None
"""The adapter of a request: a `LoRARequest`, the name of a loaded one, or None."""
PerPromptAdapted = Adapted | Sequence[Adapted]


class Adapters:
    """The loaded adapters by name. Any thread may use it; ``len`` and iteration are over names."""

    def __init__(self, runner: Runner) -> None:
        self._read = adapter_reader(runner)
        self._lock = threading.Lock()
        self._named: dict[str, tuple[Adapter, Path]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._named))

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def __len__(self) -> int:
        return len(self._named)

    def load(self, name: str, folder: str | Path) -> Adapter:
        """Load the adapter of a folder. If the name already has this folder's adapter, return that.

        Raises ParlayError for a folder without an adapter for this model, ValueError for a name used by another folder.
        """
        path = user_path(folder).resolve()
        if (loaded := self._loaded(name, path)) is not None:
            return loaded
        with self._lock:
            if (loaded := self._loaded(name, path)) is not None:
                return loaded
            if self._read is None:
                raise UnsupportedModel(
                    "an adapter for each request needs the native decoder: merge one at load (--lora)"
                )
            refuse_masks(path)
            adapter = self._read(path, name)
            self._named[name] = adapter, path
            return adapter

    def _loaded(self, name: str, path: Path) -> Adapter | None:
        """The loaded adapter of that name, if any. Raises ValueError if it came from another folder."""
        adapter, before = self._named.get(name, (None, path))
        if before != path:
            raise ValueError(f"an adapter {name!r:.60} is loaded from {before}: unload it, or name this another")
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Requests that use it run to their ends. Raises ValueError for an unknown name."""
        with self._lock:
            if name not in self._named:
                raise ValueError(self._unknown(name))
            del self._named[name]

    def of_all(self, requests: PerPromptAdapted) -> Adapter | list[Adapter | None] | None:
        """The adapter of one request, or the adapters of several; see `of`."""
        if requests is None or isinstance(requests, str | LoRARequest):
            return self.of(requests)
        return [self.of(request) for request in requests]

    def of(self, request: Adapted) -> Adapter | None:
        """The adapter that a request names. Raises ValueError for an unknown name, and what `load` raises."""
        if isinstance(request, LoRARequest) and request.lora_path:
            return self.load(request.lora_name, request.lora_path)
        name = request.lora_name if isinstance(request, LoRARequest) else request
        if name is None:
            return None
        found = self._named.get(name)
        if found is None:
            raise ValueError(self._unknown(name))
        return found[0]

    def _unknown(self, name: str) -> str:
        known = f"only {', '.join(self._named)}" if self._named else "none is loaded"
        return f"there is no adapter {name!r:.60}: {known}"
