"""Has constraints compiled in a process of their own before this one compiles them.

A definition can exhaust the compiler's stack, which ends the process that compiles it. So another process goes first.
"""

from __future__ import annotations

import json

from parlay.structured.limits import schema_of
from parlay.system.bounded_process import BoundedProcess, LimitMet
from parlay.types import StructuredOutputsParams

CPU_SECONDS = 2.0
"""Computing time for one constraint."""


class Checker:
    """Asks `parlay.structured.checker`. ``vocabulary`` is as `LLTokenizer` takes it. Any thread may use it."""

    def __init__(self, vocabulary: dict[str, object]) -> None:
        first = json.dumps(vocabulary).encode()
        self._process = BoundedProcess("parlay.structured.checker", first, "structured output")

    def end(self) -> None:
        """End the process, if it runs."""
        self._process.end()

    def check(self, question: bytes) -> str:
        """The definition for what `spelled` gave, which has been compiled once.

        Raises ValueError for what is not valid or is too large.
        """
        try:
            answer = json.loads(self._process.ask(question, CPU_SECONDS))
        except LimitMet as error:
            raise ValueError(f"structured_outputs took more than {error} to compile: ask for less") from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["definition"])


def spelled(wanted: StructuredOutputsParams) -> bytes:
    """Write what is asked as JSON; a schema given as text and one given as data are the same."""
    schema = None if wanted.json is None else schema_of(wanted.json)
    others = {"regex": wanted.regex, "choice": wanted.choice, "grammar": wanted.grammar}
    return json.dumps({"json": schema, "json_object": wanted.json_object, **others}).encode()
