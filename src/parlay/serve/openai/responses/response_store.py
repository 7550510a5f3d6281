"""Stored responses that later requests continue: limited per key, and lost when the server ends."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import to_json

from parlay.serve.chat.request import ChatMessage

MOST_BYTES = 16 * 1024 * 1024
"""Bytes per key."""
MOST_IN_ALL = 4 * MOST_BYTES


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, the request's input items, and the conversation up to the end of the response."""

    reply: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]
    messages: Sequence[ChatMessage]

    @property
    def size(self) -> int:
        """The approximate size in bytes."""
        texts = sum(len(message.content) + len(message.reasoning or "") + 256 for message in self.messages)
        return len(to_json(self.reply)) + len(to_json(self.items)) + texts


class ResponseStore:
    """Keeps the ``most`` latest responses of each owner, within limits of bytes. Threads may share it.

    If all owners together exceed ``in_all`` bytes, the owner with the most bytes loses its oldest response.
    """

    def __init__(self, most: int, most_bytes: int = MOST_BYTES, in_all: int = MOST_IN_ALL) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._in_all = in_all
        self._sizes: Counter[str] = Counter()
        self._kept: dict[str, OrderedDict[str, tuple[StoredResponse, int]]] = {}
        self._lock = threading.Lock()

    def put(self, owner: str, id: str, kept: StoredResponse) -> None:
        """Store a response; the oldest ones are dropped to make room, and one that is too large is not stored."""
        size = kept.size
        if size > self._most_bytes or not self._most:
            return
        with self._lock:
            own = self._kept.setdefault(owner, OrderedDict())
            self._drop(owner, id)  # a stream that is resumed here again comes with the same id
            own[id] = kept, size
            self._sizes[owner] += size
            while len(own) > self._most or self._sizes[owner] > self._most_bytes:
                self._drop_oldest(owner)
            while self._sizes.total() > self._in_all:
                self._drop_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def _drop_oldest(self, owner: str) -> None:
        _, (_, size) = self._kept[owner].popitem(last=False)
        self._sizes[owner] -= size

    def get(self, owner: str, id: str) -> StoredResponse | None:
        with self._lock:
            found = self._kept.get(owner, OrderedDict()).get(id)
            return found[0] if found is not None else None

    def drop(self, owner: str, id: str) -> bool:
        """Delete a response; returns whether it existed."""
        with self._lock:
            return self._drop(owner, id)

    def _drop(self, owner: str, id: str) -> bool:
        found = self._kept.get(owner, OrderedDict()).pop(id, None)
        self._sizes[owner] -= found[1] if found is not None else 0
        return found is not None
