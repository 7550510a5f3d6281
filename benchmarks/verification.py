"""Measures the cost of a forward by its rows, after short and long texts, in bfloat16 and int8, and that of reading
weights.

    python -m benchmarks.verification

The model is SmolLM2, on all threads and on one. Rows are a chain of drafted tokens. All are timed in turn in each pass,
so a ratio compares the same seconds. The model was not trained on texts this long, so only its costs are meaningful
there.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import add_cache_flag, add_threads_flag, command_parser
from benchmarks.pages import about, table
from benchmarks.setup import FULL, SMOLLM2_BF16, Setup
from parlay import models
from parlay.bench.forwards import TimedModel, measure, weight_bytes
from parlay.bench.provenance import provenance
from parlay.bench.records import Results, Row
from parlay.options import LoadOptions
from parlay.system import threads

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 4096, 16384)
PASSES = 15
BF16, INT8 = "bfloat16", "int8"
ONE = ", one thread"
"""The ending of a name of weights if a forward had one thread."""

TIMES = """Milliseconds of one row, and what more rows take of that: the median over passes of the ratio to one row of
the same pass. Goals: 8 rows at most 1.25 times one row, 16 at most 1.5, at 256 tokens in bfloat16."""
FLOOR = """One row against only reading as many bytes as the weights have, on as many threads, and against one row of
bfloat16; medians over passes of ratios within a pass. Goals, in bfloat16: within 1.25 times the reading; int8 1.6 times
as fast as bfloat16."""

Seconds = Mapping[tuple[str, int], Mapping[int, Sequence[float]]]
"""Seconds of each pass, by weights and context and then by rows; 0 rows is the reading."""


def longer(folder: Path, made: Path, context: int) -> Path:
    """Copy a checkpoint, with room for ``context`` tokens."""
    shutil.copytree(folder, made)
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = context
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def grouped(rows: Iterable[Row]) -> Seconds:
    """Group the rows of results by what was timed."""
    found: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.seconds > 0:
            found[row.cell.model, row.cell.context][row.tokens].append(row.seconds)
    return found


def by_rows(seconds: Seconds) -> Iterator[tuple[str, ...]]:
    """Yield milliseconds of one row, and the ratios of other row counts to it."""
    for (weights, context), own in seconds.items():
        ratios = (_ratio(own[count], own[1]) for count in ROWS[1:])
        yield weights, str(context), f"{1e3 * statistics.median(own[1]):.1f}", *ratios


def against_floor(seconds: Seconds) -> Iterator[tuple[str, ...]]:
    """Yield the time of one row after the shortest text, and its ratios to the reading of its weights and to
    bfloat16."""
    shortest = min((context for _, context in seconds), default=0)
    for (weights, context), own in seconds.items():
        if context == shortest:
            plain = seconds[BF16 + ONE if weights.endswith(ONE) else BF16, context]
            median = f"{1e3 * statistics.median(own[1]):.2f}"
            yield weights, median, _ratio(own[1], own[0]), _ratio(plain[1], own[1])


def _ratio(these: Sequence[float], those: Sequence[float]) -> str:
    return f"{statistics.median(this / that for this, that in zip(these, those, strict=True)):.2f}"


def page(record: dict[str, Any], seconds: Seconds) -> str:
    """Write the results as Markdown."""
    head = ("weights", "context", "ms of 1 row", *(f"{count} rows" for count in ROWS[1:]))
    floor = ("weights", "ms of 1 row", "times the reading", "speed against bfloat16")
    parts = ["# What verifying costs", "", f"{SMOLLM2_BF16}. {about(record)}", "", TIMES, ""]
    parts += [*table(head, list(by_rows(seconds))), "", "## Against the memory", "", FLOOR, ""]
    return "\n".join([*parts, *table(floor, list(against_floor(seconds)))])


@one_line_errors("verification")
def main() -> None:
    """Run the command."""
    parser = command_parser("verification", __doc__)
    add_threads_flag(parser)
    add_cache_flag(parser)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS / "verification.jsonl", metavar="FILE")
    options = parser.parse_args()
    threads.use(options.threads)
    record = provenance("python -m benchmarks.verification")
    results = Results(options.out, record, fresh=True)
    longest = max(options.contexts) + max(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        dense = Setup(data=None, cache=options.cache, scale=FULL).directory(SMOLLM2_BF16)
        checkpoint = longer(dense, Path(folder) / SMOLLM2_BF16, longest)
        timed: dict[str, TimedModel] = {}
        for name in (BF16, INT8):
            quantize = INT8 if name == INT8 else None
            runner = models.load(str(checkpoint), LoadOptions(dtype=BF16, quantize=quantize), cache_tokens=3 * longest)
            size = weight_bytes(checkpoint, name)
            timed |= {name: TimedModel(runner, size), name + ONE: TimedModel(runner, size, threads=1)}
        for context in options.contexts:
            shown = timed if context == min(options.contexts) else {name: timed[name] for name in (BF16, INT8)}
            results.add(list(measure(shown, ROWS, (context,), PASSES)))
    text = page(record, grouped(results.rows))
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
