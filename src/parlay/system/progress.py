"""Progress bars: shown in terminals and notebooks, elsewhere only if asked for."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm

Progress = bool | Callable[..., "tqdm[Any]"] | None
"""Whether to show a bar; None: only in a terminal or notebook. A function makes the bar; it is called as tqdm is."""


def bar(
    total: float | None,
    what: str,
    unit: str,
    wanted: Progress = None,
    *,
    scale: bool = False,
    delay: float = 0,
    layout: str | None = None,
) -> tqdm[Any]:
    """Make a bar that counts to ``total``, for use in a `with` statement. ``scale`` shortens large numbers, as in 12k.

    The bar is shown after ``delay`` seconds. ``layout``: the line in tqdm's notation; None: tqdm's own.
    """
    options: dict[str, Any] = {"total": total, "desc": what, "unit": unit, "unit_scale": scale, "delay": delay}
    options |= {"leave": False, "dynamic_ncols": True, "bar_format": layout}
    if callable(wanted):
        return wanted(**options)
    if wanted is False or (wanted is None and not watched()):
        from tqdm import tqdm

        return tqdm(**options, disable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm warns if it must fall back on a terminal's bar
        from tqdm.auto import tqdm as fitting

        return fitting(**options)


class Ticker:
    """Shows the progress of long work: a bar in a terminal or notebook, elsewhere a line on standard error every few
    seconds."""

    def __init__(self, total: int, what: str, unit: str, every: float = 15.0) -> None:
        """``every``: seconds between two lines."""
        self._bar = bar(total, what, unit)
        self._what, self._unit, self._every = what, unit, every
        self._total, self._done = total, 0
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def step(self, count: int = 1, note: str = "") -> None:
        """Count ``count`` more units as done.

        ``note`` is shown next to the bar. If more units are done than the total, the total grows.
        """
        self._done += count
        self._total = max(self._total, self._done)
        if not self._bar.disable:
            self._bar.set_postfix_str(note, refresh=False)
            advance(self._bar, self._done, self._total)
        elif time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            suffix = f"; {note}" if note else ""
            print(f"{self._what}: {self._done} of {self._total} {self._unit}s{suffix}", file=sys.stderr, flush=True)


def advance(shown: tqdm[Any], done: int, total: int) -> None:
    """Set the bar to ``done`` of ``total``."""
    shown.total = total
    shown.update(done - shown.n)


def above_bars(line: str) -> None:
    """Print a line on standard error, above all bars."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def watched() -> bool:
    """Whether standard error goes to a terminal or a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and "IPKernelApp" in running.config
