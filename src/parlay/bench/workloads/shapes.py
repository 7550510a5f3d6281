"""Items (prompts and conversations), and the shapes of records in published sets, told apart by the records' fields.

A record that asks a question becomes a user's message. A text to continue becomes a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_TOKENS = 128
"""Limit on the tokens of an answer to an item that has no limit of its own."""

Record = Mapping[str, Any]


class Message(NamedTuple):
    """One turn of a conversation; ``role`` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Either a ``prompt`` to continue, or ``messages`` to answer; ``follow_ups`` are then asked one by one.

    ``references`` are texts that the answer may quote. ``prediction`` is a guess of the whole answer. Items of one file
    are grouped by ``category``. With ``framed``, the prompt is already in a model's chat template, as
    `parlay serve --record` stores it.
    """

    id: str
    category: str = ""
    prompt: str = ""
    messages: tuple[Message, ...] = ()
    follow_ups: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    references: tuple[str, ...] = ()
    prediction: str | None = None
    framed: bool = False

    def __post_init__(self) -> None:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("the prompt is empty" if not self.prompt else "a prompt or messages, not both")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, slots=True)
class Workload:
    """Items of one kind, with the name that tables show."""

    name: str
    items: tuple[Item, ...]


class RecordShape(NamedTuple):
    """The shape of a set's records. ``fields`` are the fields that tell it from others.

    ``item(record, number)`` makes an item; the number is used as its id if the record has none.
    """

    name: str
    fields: frozenset[str]
    item: Callable[[Record, str], Item]


def shape_of(record: Record) -> RecordShape:
    """Return the first shape whose ``fields`` the record has. Raises ValueError if there is none."""
    for shape in SHAPES:
        if shape.fields <= record.keys():
            return shape
    published = [shape for shape in SHAPES if shape.item is not _plain]
    sets = "; ".join(f"{', '.join(sorted(shape.fields))} ({shape.name})" for shape in published)
    own = ", ".join(record) or "none"
    raise ValueError(f"no known shape (fields: {own}): give prompt or messages, or a published set's fields: {sets}")


def _turns(record: Record, number: str) -> Item:
    """Convert a record of Spec-Bench or MT-bench: questions that are asked one after another."""
    first, *later = _texts(record, "turns")
    return Item(
        id=_id(record, "question_id", number),
        category=_text(record, "category") if "category" in record else "",
        messages=(Message("user", first),),
        follow_ups=tuple(later),
    )


def _human_eval(record: Record, number: str) -> Item:
    """Convert a record of HumanEval: the head and docstring of a function to complete."""
    return Item(id=_id(record, "task_id", number), prompt=_text(record, "prompt"))


def _edit(record: Record, number: str) -> Item:
    """Convert a record of EditEval: code, and what to change in it. Most of the code stays as it is."""
    code = _text(record, "input")
    question = f"{_text(record, 'instruction').strip()}\n\n{code}"
    return Item(id=_id(record, "task_id", number), messages=(Message("user", question),), prediction=code)


def _mbpp(record: Record, number: str) -> Item:
    """Convert a record of MBPP: a small task, and the tests that its function must pass."""
    task = _text(record, "text" if "text" in record else "prompt").strip()
    tests = "\n".join(_texts(record, "test_list"))
    question = f"{task}\n\nWrite it in Python. These must hold:\n\n{tests}"
    return Item(id=_id(record, "task_id", number), messages=(Message("user", question),))


def _function_calls(record: Record, number: str) -> Item:
    """Convert a record of BFCL: functions, and a question that function calls answer. Later questions follow up."""
    functions = "\n".join(json.dumps(each) for each in _list(record, "function"))
    first, *later = _list(record, "question")
    system = Message("system", f"Answer with calls of these functions, as JSON.\n{functions}")
    own = _messages(first)
    follow_ups = tuple(message.content for each in later for message in _messages(each) if message.role == "user")
    return Item(id=_id(record, "id", number), messages=(system, *own), follow_ups=follow_ups)


def _share_gpt(record: Record, number: str) -> Item:
    """Convert a record of ShareGPT: the first question of a conversation. The recorded answers are not used."""
    for turn in _list(record, "conversations"):
        if not isinstance(turn, Mapping):
            raise ValueError("a turn of conversations is not an object")
        if _text(turn, "from") in ("human", "user"):
            return Item(id=_id(record, "id", number), messages=(Message("user", _text(turn, "value")),))
    raise ValueError("conversations has no turn of a user")


def _with_documents(record: Record, number: str) -> Item:
    """Convert a record of LLMA: documents, and a question whose answer quotes them.

    Documents that the question does not quote are put before it.
    """
    documents, query = _texts(record, "docs"), _text(record, "query")
    question = "\n\n".join([*(document for document in documents if document not in query), query])
    return Item(id=number, messages=(Message("user", question),), references=tuple(documents))


def _maths(record: Record, number: str) -> Item:
    """Convert a record of GSM8K: a mathematical question."""
    return Item(id=number, messages=(Message("user", _text(record, "question")),))


def _plain(record: Record, number: str) -> Item:
    """Convert a record in Parlay's own format: a prompt or messages, and any other fields of an item."""
    return Item(
        id=_id(record, "id", number),
        category=_text(record, "category") if "category" in record else "",
        prompt=_text(record, "prompt") if "prompt" in record else "",
        messages=_messages(record["messages"]) if "messages" in record else (),
        max_tokens=_length(record.get("max_tokens", MAX_TOKENS)),
        references=tuple(_texts(record, "references")) if record.get("references") else (),
        prediction=_text(record, "prediction") if record.get("prediction") is not None else None,
        framed=record.get("framed") is True,
    )


SHAPES = (
    RecordShape("Spec-Bench, MT-bench", frozenset({"turns"}), _turns),
    RecordShape("HumanEval", frozenset({"prompt", "entry_point"}), _human_eval),
    RecordShape("MBPP", frozenset({"test_list"}), _mbpp),
    RecordShape("BFCL", frozenset({"question", "function"}), _function_calls),
    RecordShape("EditEval", frozenset({"instruction", "input", "output"}), _edit),
    RecordShape("ShareGPT", frozenset({"conversations"}), _share_gpt),
    RecordShape("LLMA", frozenset({"query", "docs"}), _with_documents),
    RecordShape("GSM8K", frozenset({"question", "answer"}), _maths),
    RecordShape("plain", frozenset({"messages"}), _plain),
    RecordShape("plain", frozenset({"prompt"}), _plain),
)
"""If a record has the fields of several shapes, the first of these is taken."""


def _id(record: Record, field: str, number: str) -> str:
    return str(record.get(field, number))


def _text(record: Record, field: str) -> str:
    value = record[field]
    if not isinstance(value, str):
        raise ValueError(f"{field} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{field} is not valid Unicode") from None
    return value


def _list(record: Record, field: str) -> list[Any]:
    value = record[field]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{field} is not a list, or is empty")
    return value


def _texts(record: Record, field: str) -> list[str]:
    return [_text({field: each}, field) for each in _list(record, field)]


def _messages(value: object) -> tuple[Message, ...]:
    turns = _list({"messages": value}, "messages")
    if not all(isinstance(turn, Mapping) for turn in turns):
        raise ValueError("a message is not an object")
    return tuple(Message(_text(turn, "role"), _text(turn, "content")) for turn in turns)


def _length(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("max_tokens is not a whole number")
    return value
