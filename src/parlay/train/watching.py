"""Progress of a training run: a bar on a terminal, otherwise lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from parlay.system.progress import Progress, advance, bar

_LAYOUT = "{desc} {percentage:3.0f}% |{bar}| {remaining} left{postfix}"


@contextmanager
def counted(what: str, shards: int) -> Iterator[Callable[[int], None]]:
    """Show progress over ``shards`` shards; yields a function to call with the number of each finished shard."""
    with bar(shards, what.capitalize(), "shard") as shown:
        if shown.disable:
            print(f"{what}: {shards} shards in all", flush=True)

        def done(number: int) -> None:
            if shown.disable:
                print(f"{what}: shard {number + 1} of {shards}", flush=True)
            advance(shown, number + 1, shards)

        yield done


class Watch:
    """A context manager that shows a run's progress bar, with time left, speed, loss and the last measurement."""

    def __init__(self, what: str, wanted: Progress = None) -> None:
        """``wanted``: see `parlay.system.progress.bar`."""
        self._bar = bar(1.0, what, "", wanted, layout=_LAYOUT)
        self._measured = ""

    @property
    def shown(self) -> bool:
        """Whether the bar is shown; if not, the run prints lines."""
        return not self._bar.disable

    def step(self, share: float, seconds: float, tokens: int, loss: float) -> None:
        """Report progress: the share of the run that is done, from 0 to 1, and the seconds and tokens trained."""
        rate = tokens / max(seconds, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s, loss {loss:.3f}{self._measured}", refresh=False)
        self._bar.update(min(share, 1.0) - self._bar.n)

    def measured(self, what: str) -> None:
        """Report the latest measurement on held-out texts."""
        self._measured = f", {what}"

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
