"""Compiles constraints first in a process of their own, where a crash does no harm to the server.

The program is started with the number of a socket. The first message that it reads is the vocabulary. Each further
message asks for a constraint; the answer is the definition to compile, or an error. All messages are JSON.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from parlay.structured.definition import definition, matcher
from parlay.structured.limits import limit_reached
from parlay.system.bounded_process import Answer, serve
from parlay.types import FieldError, StructuredOutputsParams

STACK = 64 << 20
"""Bytes of stack. The server compiles the same definition later with four times as much."""
MEMORY = 1 << 30
"""Bytes of memory, in addition to the vocabulary's."""
CALL_SECONDS = 0.025
"""Seconds of CPU time for one call of the compiled grammar. The call holds the GIL, so all threads wait."""
_SLOW_CALLS = 3
"""A grammar is refused after this many slow calls. A busy machine may cause fewer."""
_FORM = "structured_outputs"
_WALKS = 4
_STEPS = 12

T = TypeVar("T")


def main() -> None:
    serve(_answering, memory=MEMORY, stack=STACK)


def _answering(first: bytes) -> Answer:
    vocabulary = LLTokenizer(**json.loads(first))

    def answer(question: bytes) -> bytes:
        return json.dumps(_answer(vocabulary, StructuredOutputsParams(**json.loads(question)))).encode()

    return answer


def _answer(vocabulary: LLTokenizer, wanted: StructuredOutputsParams) -> dict[str, Any]:
    try:
        text = definition(wanted)
        compiled = matcher(vocabulary, text)
        _check_beginning(compiled, vocabulary)
        pace = _CallTimer()
        for seed in range(_WALKS):
            _walk(compiled.deep_copy(), vocabulary, random.Random(seed), pace)
    except FieldError as error:
        return {"error": str(error), "field": error.fields[0]}
    except ValueError as error:
        return {"error": str(error), "field": _FORM}
    except (MemoryError, RecursionError):
        return {"error": f"{_FORM} is more than its compiler can hold: make it simpler", "field": _FORM}
    return {"definition": text}


def _check_beginning(compiled: LLMatcher, vocabulary: LLTokenizer) -> None:
    """Raise ValueError if the grammar allows no first token."""
    may_end = compiled.is_accepting()
    if len(_following(compiled.deep_copy(), vocabulary)):
        return
    if may_end:
        raise FieldError("structured_outputs", "allows only the empty text: change it to allow others")
    raise FieldError("structured_outputs", "allows no text that this model's tokens can write: change it")


class _CallTimer:
    """Times calls, and counts the slow ones."""

    def __init__(self) -> None:
        self._slow = 0

    def timed(self, call: Callable[[], T]) -> T:
        """Return the call's result. Raises ValueError once too many calls took longer than `CALL_SECONDS`."""
        began = time.thread_time()
        result = call()
        self._slow += time.thread_time() - began > CALL_SECONDS
        if self._slow >= _SLOW_CALLS:
            limit = f"{1000 * CALL_SECONDS:.0f} ms of CPU time for one token, which is the limit"
            raise FieldError("structured_outputs", f"takes more than {limit}: make it simpler")
        return result


def _walk(at: LLMatcher, vocabulary: LLTokenizer, choose: random.Random, pace: _CallTimer) -> None:
    """Write some random tokens that the grammar allows. Raises ValueError if too many calls are slow, or if the library
    reaches one of its limits.

    A dead end is not an error.
    """
    for _ in range(_STEPS):
        pace.timed(at.compute_bitmask)
        following = _following(at, vocabulary)
        if len(following):
            pace.timed(partial(at.try_consume_tokens, [int(choose.choice(following))]))
        limit = limit_reached(at)
        if limit is not None:
            raise FieldError("structured_outputs", f"is too complex ({limit}): make it simpler")
        if not len(following) or at.is_stopped():
            return


def _following(at: LLMatcher, vocabulary: LLTokenizer) -> NDArray[np.intp]:
    """Return the ids that may come next, without those that end the text."""
    allowed_V = np.unpackbits(np.frombuffer(at.compute_bitmask(), np.uint8), bitorder="little")
    allowed_V[vocabulary.eos_tokens] = 0
    return np.flatnonzero(allowed_V)


if __name__ == "__main__":
    main()
