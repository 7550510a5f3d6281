"""An editor's completions: somebody types in the middle of a file, and asks `/infill` anew after each keystroke.

The text before the cursor may be cut in three places (`parlay serve --infill-order`); a client cuts by what it sends as
prefix and as prompt. Each cut is timed on the same keystrokes, and its suggestions are held against those of the usual
one, and against what the file goes on with. Speaks to any server with llama-server's `/infill`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import httpx

Cut = Literal["psm", "line", "spm"]
CUTS: tuple[Cut, ...] = get_args(Cut)
KEYSTROKES, TOKENS, SUFFIX = 10, 16, 0.21


@dataclass(frozen=True, slots=True)
class Keystroke:
    """The file before and behind the cursor. ``first``: the cursor has just come to this place."""

    before: str
    behind: str
    rest_of_line: str
    first: bool


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A server's answer, after so many seconds."""

    text: str
    seconds: float
    read: int | None
    """Tokens of the prompt that were not cached, if the server says it."""


def keystrokes(text: str, places: int) -> Iterator[Keystroke]:
    """Type the middles of ``places`` lines, all with about a fifth of ``text`` behind them."""
    lines = text.splitlines(keepends=True)
    start = int(len(lines) * (1 - SUFFIX)) - places
    typed = [at for at in range(start, len(lines)) if len(lines[at].strip()) >= 2 * KEYSTROKES][:places]
    for at in typed:
        line = lines[at].rstrip("\n")
        begin = len(line) - len(line.lstrip())
        behind = "\n" + "".join(lines[at + 1 :])
        for column in range(begin + 1, begin + 1 + KEYSTROKES):
            before = "".join(lines[:at]) + line[:column]
            yield Keystroke(before, behind, line[column:], column == begin + 1)


def ask(client: httpx.Client, stroke: Keystroke, cut: Cut) -> Suggestion:
    """Send the request of an editor that cuts so."""
    at = {"psm": len(stroke.before), "line": stroke.before.rfind("\n") + 1, "spm": 0}[cut]
    body = {
        "input_prefix": stroke.before[:at],
        "prompt": stroke.before[at:],
        "input_suffix": stroke.behind,
        "n_predict": TOKENS,
        "temperature": 0,
        "samplers": ["temperature"],
        "cache_prompt": True,
    }
    began = time.perf_counter()
    reply = client.post("/infill", json=body)
    seconds = time.perf_counter() - began
    reply.raise_for_status()
    answer = reply.json()
    return Suggestion(answer["content"], seconds, answer.get("timings", {}).get("prompt_n"))


def table(strokes: Sequence[Keystroke], found: dict[Cut, list[Suggestion]]) -> list[str]:
    """A line for each cut."""
    lines = ["| cut | keystroke, median | 90 % | new place | tokens read | same as psm | rest of the line right |"]
    lines.append("|---|---|---|---|---|---|---|")
    for cut, suggestions in found.items():
        later = sorted(one.seconds for one, stroke in zip(suggestions, strokes, strict=True) if not stroke.first)
        first = [one.seconds for one, stroke in zip(suggestions, strokes, strict=True) if stroke.first]
        read = [one.read for one, stroke in zip(suggestions, strokes, strict=True) if not stroke.first and one.read]
        same = [one.text == usual.text for one, usual in zip(suggestions, found["psm"], strict=True)]
        right = [
            one.text.partition("\n")[0].rstrip() == stroke.rest_of_line.rstrip()
            for one, stroke in zip(suggestions, strokes, strict=True)
        ]
        times = [statistics.median(later), later[int(0.9 * len(later))], statistics.median(first)]
        tokens = f"{statistics.median(read):g}" if read else "-"
        cells = [
            *(f"{each:.3f} s" for each in times),
            tokens,
            *(f"{statistics.mean(each):.0%}" for each in (same, right)),
        ]
        lines.append(f"| {cut} | {' | '.join(cells)} |")
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.infill", description=__doc__)
    parser.add_argument("url", help="the server's address, as http://127.0.0.1:8000")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="source files to type in")
    parser.add_argument("--characters", type=int, default=6000, help="how much of each file (default: 6000)")
    parser.add_argument("--places", type=int, default=3, help="lines to type in, in each file (default: 3)")
    parser.add_argument("--cuts", nargs="+", choices=CUTS, default=list(CUTS), help="default: all")
    parser.add_argument("--json", type=Path, help="write every suggestion there")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, and print the table."""
    options = parse()
    texts = [path.read_text(encoding="utf-8")[: options.characters] for path in options.files]
    strokes = [stroke for text in texts for stroke in keystrokes(text, options.places)]
    found: dict[Cut, list[Suggestion]] = {}
    with httpx.Client(base_url=options.url, timeout=120) as client:
        for cut in ("psm", *(each for each in options.cuts if each != "psm")):
            found[cut] = [ask(client, stroke, cut) for stroke in strokes]
    print("\n".join(table(strokes, found)))
    if options.json is not None:
        rows = {cut: [[one.text, one.seconds, one.read] for one in each] for cut, each in found.items()}
        options.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
