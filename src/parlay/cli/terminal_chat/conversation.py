"""The conversation so far, and how the next answer is decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parlay.system.terminal import short
from parlay.system.user_cache import written_whole
from parlay.types import ParlayError, SamplingParams

Message = dict[str, str]
"""The keys are ``role`` and ``content``."""


@dataclass(slots=True)
class Conversation:
    """The messages in order, of user and assistant in turn; ``system``, if not empty, precedes them."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)

    def whole(self) -> list[Message]:
        """All messages in the form of chat templates."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def add(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> bool:
        """Remove what follows the user's last message, so that it is answered again. Returns False if there is no such
        message."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return bool(self.messages)

    def drop_oldest(self) -> bool:
        """Remove the oldest message and its answer. Returns False if only the last message is left."""
        if len(self.messages) <= 1:
            return False
        later = (place for place, message in enumerate(self.messages) if place and message["role"] == "user")
        del self.messages[: next(later, 1)]
        return True

    def save(self, path: Path) -> None:
        """Write the messages as a JSON list that only this user can read; an older file stays until that is done.
        Raises OSError if that fails.

        A symbolic link stays, and its target is replaced.
        """
        with written_whole(path.resolve(), mode=0o600) as part:
            part.write_text(json.dumps(self.whole(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def read_conversation(path: Path) -> Conversation:
    """Read a file written by `Conversation.save`. Raises ParlayError for another kind of file and for an unreadable
    one."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParlayError(f"can't read the conversation {short(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ParlayError(f"can't read the conversation {path}: {error}") from None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ParlayError(f"{path} is not a conversation: it must be a list of {{'role': ..., 'content': ...}}")
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
    return Conversation(system, messages)


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping) or value.keys() != {"role", "content"}:
        return False
    return value["role"] in ("system", "user", "assistant") and is_text(value["content"])


def is_text(value: object) -> bool:
    """Whether it is valid Unicode text: JSON can contain half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How answers are decoded; ``strategy`` None: the LLM's own."""

    params: SamplingParams
    strategy: str | None = None
