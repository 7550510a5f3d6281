"""Signals while something must stay whole, and what a terminal is taken for."""

from __future__ import annotations

import signal
import sys

import pytest

from parlay.system.terminal import Interrupt, undivided, wants_colour


@pytest.mark.usefixtures("signals_as_before")
def test_a_terminal_that_closes_divides_nothing_though_it_sends_its_signal_twice() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGHUP, lambda signum, _: heard.append(signum))
    with undivided():
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert not heard
    assert heard == [signal.SIGHUP]


@pytest.mark.usefixtures("signals_as_before")
def test_a_signal_that_is_ignored_stays_so() -> None:
    """As jobs in the background of a shell ignore Ctrl-C, which is for others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
    assert interrupt.noted is None
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_terminal_of_which_nothing_is_known_gets_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for term, colour in [("xterm", True), ("dumb", False)]:
        monkeypatch.setenv("TERM", term)
        assert wants_colour(sys.stdout) is colour
    monkeypatch.delenv("TERM")
    assert not wants_colour(sys.stdout)
