"""Signals while something must stay whole."""

from __future__ import annotations

import signal

import pytest

from parlay.system.terminal import Interrupt, undivided


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
