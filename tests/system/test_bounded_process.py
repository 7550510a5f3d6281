"""A second process: whoever asks gets the answer to the own question, whatever has ended the one before."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from parlay.system.bounded_process import BoundedProcess, LimitMet
from parlay.text.answers import MEMORY

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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            process.ask(SLOW, 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert json.loads(process.ask(question(2), 60)) == {"found": "2"}


def test_a_process_that_ends_before_it_was_told_anything_is_a_limit_met() -> None:
    made = BoundedProcess("parlay.no_such_module", bytes(1 << 22), "a test")
    with pytest.raises(LimitMet):
        made.ask(question(1), 60)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited where the system tells how much")
def test_a_limit_that_is_set_already_stays() -> None:
    """As by ulimit -v."""
    limited = f"""
import json, resource
from parlay.system.bounded_process import BoundedProcess
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
print(BoundedProcess("parlay.text.answers", b"", "a test").ask({question(3)!r}, 60))
"""
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=120, check=False)
    assert "3" in done.stdout, done.stderr
