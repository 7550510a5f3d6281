"""A second process: whoever asks gets the answer to the own question, whatever has ended the one before."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator

import pytest

from parlay.system.bounded_process import BoundedProcess, LimitMet

SLOW = json.dumps(["(a|b|ab)*c", "ab" * 23]).encode()
"""A pattern that takes seconds to find nothing."""


def question(number: int) -> bytes:
    return json.dumps(["[0-9]+", f"number {number}"]).encode()


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    made = BoundedProcess("parlay.text.answers", b"", "a regular expression")
    yield made
    made.end()


def test_after_an_interrupt_the_next_question_gets_its_own_answer(process: BoundedProcess) -> None:
    """As Ctrl-C in a notebook, while a schema is compiled or a chat template rendered."""
    assert json.loads(process.ask(question(1), 60)) == {"found": "1"}
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        process.ask(SLOW, 60)
    assert json.loads(process.ask(question(2), 60)) == {"found": "2"}


def test_a_process_that_ends_before_it_was_told_anything_is_a_limit_met() -> None:
    made = BoundedProcess("parlay.no_such_module", bytes(1 << 22), "a test")
    with pytest.raises(LimitMet):
        made.ask(question(1), 60)
