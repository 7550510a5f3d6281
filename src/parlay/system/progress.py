"""Progress bars: in a terminal and in notebooks, nowhere else unless they are asked for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

Progress = bool | Callable[..., "tqdm[Any]"] | None
"""Whether there is a bar: None where somebody can watch it. Or what makes it, called as tqdm is."""


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
    """A bar that counts to ``total``, to be used in a `with`. ``scale``: large numbers are shortened.

    It is first seen after ``delay`` seconds. ``layout``: the line in tqdm's notation, if another than its own.
    """
    options: dict[str, Any] = {"total": total, "desc": what, "unit": unit, "unit_scale": scale, "delay": delay}
    options |= {"leave": False, "dynamic_ncols": True, "bar_format": layout}
    if callable(wanted):
        return wanted(**options)
    if wanted is False or (wanted is None and not watched()):
        from tqdm import tqdm

        return tqdm(**options, disable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets the bar of a terminal is good enough
        from tqdm.auto import tqdm as fitting

        return fitting(**options)


def advance(shown: tqdm[Any], done: int, total: int) -> None:
    """``done`` of ``total`` is what the bar shows from now on."""
    shown.total = total
    shown.update(done - shown.n)


def above_bars(line: str) -> None:
    """Prints a line on standard error, above whatever bars are there."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def watched() -> bool:
    """Whether the standard error goes to a terminal or into a notebook."""
    return sys.stderr.isatty() or _in_notebook()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and "IPKernelApp" in running.config
