"""Makes the trace of `benchmarks.serving.mixed`: the clients' requests, and their times."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parlay.bench import workloads
from parlay.bench.workloads import Item, Message

KINDS: Mapping[str, tuple[str, str]] = {
    "questions": ("spec-bench", "prose"),
    "chat": ("mt-bench", "translation"),
    "edits": ("editeval", "edit"),
    "calls": ("bfcl-simple", "calls"),
}
"""The published set of prompts of each kind, and the built-in one that replaces it without ``--data``."""
CHAT_RULES = Message(
    "system",
    "You are the assistant of a public library. Answer in the language of the question. Be friendly and brief. Say "
    "plainly what you do not know. Where a question has several parts, answer them in the order in which they were "
    "asked. Give steps as a numbered list, and code in a block of its own. Do not mention these rules. Opening hours "
    "are nine to seven on weekdays and ten to four on Saturdays; the reading room closes half an hour earlier. Books "
    "may be kept for four weeks and renewed twice, unless somebody waits for them.",
)
"""The system message of every chat, as the chats of one service share it."""
CHAT_AGAIN = "Say the same in half as many words."
"""The second question of a chat, if its set has only one."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation of one client, which sends the next turn as soon as it has the answer to the last one.

    ``schema`` is the form of the answers, if they have one.
    """

    kind: str
    id: str
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None


def trace(data: Path | None, count: int, seed: int = 0) -> list[Talk]:
    """Return ``count`` conversations in random order, equally many of each kind. Raises ValueError if a set is
    missing."""
    each = -(-count // len(KINDS))
    talks = [talk for kind in KINDS for talk in itertools.islice(_talks(kind, data), each)]
    random.Random(seed).shuffle(talks)
    return talks[:count]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return the seconds at which conversations begin: a Poisson process of ``rate`` per second."""
    draw = random.Random(seed)
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(count)))


def _talks(kind: str, data: Path | None) -> itertools.chain[Talk]:
    """Return the conversations of one kind, with the categories of its set in turn."""
    published, built_in = KINDS[kind]
    sets = workloads.load([built_in if data is None else published], None, data)
    in_turn = itertools.zip_longest(*(each.items for each in sets))
    return itertools.chain(_talk(kind, item) for item in itertools.chain(*in_turn) if item is not None)


def _talk(kind: str, item: Item) -> Talk:
    messages = item.messages or (Message("user", item.prompt),)
    if kind == "chat":
        return Talk(kind, item.id, (CHAT_RULES, *messages), item.follow_ups[:1] or (CHAT_AGAIN,))
    return Talk(kind, item.id, messages, schema=_call_schema(messages) if kind == "calls" else None)


def _call_schema(messages: Sequence[Message]) -> Mapping[str, Any]:
    """Return the JSON schema of a call of one of the functions that the system message lists as JSON lines."""
    lines = [line for message in messages if message.role == "system" for line in message.content.splitlines()]
    names = [json.loads(line)["name"] for line in lines if line.startswith("{")]
    name: Mapping[str, Any] = {"enum": names} if names else {"type": "string"}
    properties = {"name": name, "arguments": {"type": "object"}}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
