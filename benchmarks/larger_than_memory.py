"""Measures a model that is larger than its memory: how fast forwards read the disk, what rows cost, and what drafts
gain.

    python -m benchmarks.larger_than_memory --model FILE

Each round reads the file without the system's cache, as fast as one thread can, and then times forwards of several row
counts. All run in turn, so a slow moment of the disk affects both. Then the model copies a source file of this
repository with one name changed, plainly and with drafts. The texts must equal those of the same model in memory.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.commands import RESULTS, one_line_errors
from benchmarks.options import command_parser
from benchmarks.pages import about, table
from parlay import LLM, SamplingParams
from parlay.bench.plan.streaming import measure_disk
from parlay.bench.provenance import provenance
from parlay.cost.timing import some_tokens, time_forward
from parlay.types import Segment

ROWS, STRATEGIES = (1, 8, 16, 64), ("none", "prompt-lookup", "auto")
COPIED = Path("src/parlay/types/layer_split.py")
ASKED = "Copy this file, and rename `split_layers` to `divide_layers`:\n{0}\nThe new file:\nfrom __future__ import"


@dataclass(frozen=True, slots=True)
class Forwards:
    """One round: the disk's speed in bytes per second, and the seconds of a forward of each of `ROWS`."""

    disk: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """Tokens per second of one strategy, and whether its text equals that of the model in memory."""

    strategy: str
    speed: float
    same: bool


def rounds(llm: LLM, model: str, count: int) -> Iterator[Forwards]:
    """Time the disk and forwards of all row counts in turn."""
    runner = llm.runner
    runner.open(-1, (0,))
    runner.reserve(-1, max(ROWS))
    for _ in range(count):
        disk, _path = measure_disk(model)
        time_forward(runner, [Segment(-1, some_tokens(runner, 1))])  # starts reading ahead again
        found = [time_forward(runner, [Segment(-1, some_tokens(runner, rows))]) for rows in ROWS]
        yield Forwards(disk, tuple(found))
    runner.release(-1)


def texts(llm: LLM, strategies: Sequence[str], tokens: int) -> Iterator[tuple[str, float, str]]:
    """Yield each strategy, its tokens per second and its text, for a copy of a file with one name changed."""
    prompt, params = ASKED.format(COPIED.read_text(encoding="utf-8")), SamplingParams(temperature=0, max_tokens=tokens)
    for strategy in strategies:
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), strategy=strategy)  # reads the prompt
        began = time.perf_counter()
        (output,) = llm.generate(prompt, params, strategy=strategy)
        answer = output.outputs[0]
        yield strategy, len(answer.token_ids) / (time.perf_counter() - began), answer.text


def page(found: Sequence[Forwards], copied: Sequence[Copied], streamed: int) -> list[str]:
    """Return the lines of both tables."""
    one = statistics.median(each.seconds[0] for each in found)
    disk = statistics.median(each.disk for each in found)
    head = ("rows", "ms", "times one row", "GB/s", "of the disk's")
    lines = []
    for place, rows in enumerate(ROWS):
        seconds = statistics.median(each.seconds[place] for each in found)
        speed = streamed / seconds
        lines.append(
            (str(rows), f"{1000 * seconds:.0f}", f"{seconds / one:.2f}", f"{speed / 1e9:.2f}", f"{speed / disk:.2f}")
        )
    plain = next(each.speed for each in copied if each.strategy == "none")
    speeds = [
        (each.strategy, f"{each.speed:.2f}", f"{each.speed / plain:.2f}", "yes" if each.same else "NO")
        for each in copied
    ]
    return [
        f"{streamed / 1e9:.2f} GB are read in every forward; direct reads alone give {disk / 1e9:.2f} GB/s.",
        "",
        *table(head, lines),
        *table(("strategy", "tokens/s", "times plain", "text as in memory"), speeds),
    ]


@one_line_errors("larger_than_memory")
def main() -> None:
    """Run the command."""
    parser = command_parser("larger_than_memory", __doc__)
    parser.add_argument("--model", required=True, metavar="FILE")
    parser.add_argument(
        "--share", type=float, default=2 / 3, help="share of the file's bytes that weights may use in memory"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--tokens", type=int, default=128, metavar="N")
    parser.add_argument("--out", type=Path, default=RESULTS / "larger-than-memory.json", metavar="FILE")
    options = parser.parse_args()
    room = int(options.share * Path(options.model).stat().st_size)
    with LLM(options.model, device="cpu", router_memory="off") as llm:
        ((_, _, expected),) = texts(llm, ["none"], options.tokens)
    with LLM(options.model, device="cpu", memory=f"weights={room}", router_memory="off") as llm:
        streamed = llm.runner.spec.streamed_bytes
        found = list(rounds(llm, options.model, options.rounds))
        copied = [Copied(name, speed, text == expected) for name, speed, text in texts(llm, STRATEGIES, options.tokens)]
    what = f"--model {Path(options.model).name} --share {options.share:.3g} --rounds {options.rounds}"
    record = provenance(f"python -m benchmarks.larger_than_memory {what} --tokens {options.tokens}")
    content = {"origin": record, "room": room, "streamed": streamed}
    content |= {"forwards": [asdict(one) for one in found], "copied": [asdict(one) for one in copied]}
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    title = ["# A model larger than its memory", "", f"{Path(options.model).name}. {about(record)}", ""]
    text = "\n".join([*title, *page(found, copied, streamed)])
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
