"""Earlier responses, which later requests go on with: bounded for each key, and gone when the server ends."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from parlay.serve.chat.request import ChatMessage

MOST_BYTES = 16 * 1024 * 1024
"""For each key."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, the items that it answered, and the conversation up to its end."""

    reply: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[ChatMessage]

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        texts = sum(len(message.content) + len(message.reasoning or "") + 256 for message in self.messages)
        return len(to_json(self.reply)) + len(to_json(self.items)) + texts


class KeptResponses:
    """Holds the ``most`` latest responses of each owner, as long as they fit. Threads may share it."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: dict[str, OrderedDict[str, tuple[Kept, int]]] = {}
        self._lock = threading.Lock()

    def put(self, owner: str, id: str, kept: Kept) -> None:
        """The oldest ones go where there is no room; one that is too large by itself is not kept."""
        size = kept.size
        if size > self._most_bytes or not self._most:
            return
        with self._lock:
            own = self._kept.setdefault(owner, OrderedDict())
            own[id] = kept, size
            while len(own) > self._most or sum(size for _, size in own.values()) > self._most_bytes:
                own.popitem(last=False)

    def get(self, owner: str, id: str) -> Kept | None:
        with self._lock:
            found = self._kept.get(owner, OrderedDict()).get(id)
            return found[0] if found is not None else None

    def drop(self, owner: str, id: str) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._kept.get(owner, OrderedDict()).pop(id, None) is not None
