"""Draws a report's plot: each strategy's speed as a multiple of plain decoding's, by workload. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping

from parlay.types import ParlayError

_STYLE = {"svg.hashsalt": "parlay", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def check() -> None:
    """Raise ParlayError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401  # here, because it is an extra
    except ImportError as error:
        raise ParlayError(f"plots need {error.name}: pip install 'parlay[plot]', or --no-plots") from None


def dots(ratios: Mapping[str, Mapping[str, float]], title: str) -> str:
    """Draw the plot as SVG: a line for each strategy, a dot for each workload. Equal ratios give equal SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    names = sorted(ratios, key=lambda name: sum(ratios[name].values()) / len(ratios[name]))
    kinds = list(dict.fromkeys(kind for own in ratios.values() for kind in own))
    with matplotlib.rc_context(dict(_STYLE)):
        figure = Figure(figsize=(9.6, 1.2 + 0.27 * len(names)), layout="constrained")
        axes = figure.subplots()
        for kind in kinds:
            points = [(ratios[name][kind], place) for place, name in enumerate(names) if kind in ratios[name]]
            axes.scatter(*zip(*points, strict=True), s=22, label=kind, zorder=3)
        axes.set_yticks(range(len(names)), names)
        axes.axvline(1, color="#888888", linewidth=0.8, linestyle="--")
        axes.set_xlim(left=0)
        axes.set_xlabel("times as fast as plain decoding")
        axes.set_title(title)
        figure.legend(loc="outside right upper", frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :].strip() + "\n"
