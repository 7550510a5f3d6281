"""A prompt or conversation that is given to a model (an item), and a set of them (a workload)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_TOKENS = 128
"""The longest answer to an item that names no length of its own."""


class Message(NamedTuple):
    """One turn of a conversation; ``role`` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Either a ``prompt`` to continue, or ``messages`` to answer; ``follow_ups`` are then asked one by one.

    ``references`` are texts that the answer may repeat, ``prediction`` is what it will mostly be. ``category`` parts
    the items of one file.
    """

    id: str
    category: str = ""
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    references: tuple[str, ...] = ()
    prediction: str | None = None

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("the prompt is empty" if not self.prompt else "a prompt or messages, not both")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Items of one kind, under the name that tables give it."""

    name: str
    items: tuple[Item, ...]
