"""Measures an editor's completions: somebody types in the middle of a file, and each keystroke asks `/infill` again.

Each server is timed on the same keystrokes: for instance three of `parlay serve`, one for each `--infill-order`, and a
llama-server. Suggestions are compared with those of the first server and with the rest of the line in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.commands import one_line_errors
from benchmarks.options import command_parser

KEYSTROKES, TOKENS, SUFFIX = 10, 16, 0.21


@dataclass(frozen=True, slots=True)
class Keystroke:
    """The file before and after the cursor. ``first``: the cursor has just come to this place."""

    before: str
    behind: str
    rest_of_line: str
    first: bool


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A server's answer, and the seconds that it took."""

    text: str
    seconds: float
    read: int | None
    """Tokens of the prompt that were not cached, if the server reports them."""


def keystrokes(text: str, places: int) -> Iterator[Keystroke]:
    """Yield the keystrokes of typing in ``places`` lines, each with about a fifth of ``text`` after it."""
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


def ask(client: httpx.Client, stroke: Keystroke) -> Suggestion:
    """Send an editor's request: whole lines as prefix, and the current line up to the cursor as prompt."""
    at = stroke.before.rfind("\n") + 1
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


def table(strokes: Sequence[Keystroke], found: dict[str, list[Suggestion]]) -> list[str]:
    """Write a table row for each server."""
    usual = next(iter(found.values()))
    lines = [
        "| server | keystroke, median | 90 % | new place | tokens read | same as the first | rest of the line right |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, suggestions in found.items():
        later = sorted(one.seconds for one, stroke in zip(suggestions, strokes, strict=True) if not stroke.first)
        first = [one.seconds for one, stroke in zip(suggestions, strokes, strict=True) if stroke.first]
        read = [one.read for one, stroke in zip(suggestions, strokes, strict=True) if not stroke.first and one.read]
        same = [one.text == other.text for one, other in zip(suggestions, usual, strict=True)]
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
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command's options."""
    parser = command_parser("serving.infill", __doc__)
    parser.add_argument("servers", help="names and addresses, as psm=http://127.0.0.1:8000,line=http://127.0.0.1:8001")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="source files to type in")
    parser.add_argument("--characters", type=int, default=6000, help="how much of each file (default: 6000)")
    parser.add_argument("--places", type=int, default=3, help="lines to type in, in each file (default: 3)")
    parser.add_argument("--json", type=Path, help="write every suggestion there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    options = parse(arguments)
    with one_line_errors("serving.infill"):
        run(options)


def run(options: argparse.Namespace) -> None:
    """Ask every server, and print the table."""
    texts = [path.read_text(encoding="utf-8")[: options.characters] for path in options.files]
    strokes = [stroke for text in texts for stroke in keystrokes(text, options.places)]
    found: dict[str, list[Suggestion]] = {}
    for server in options.servers.split(","):
        name, _, address = server.partition("=")
        try:
            with httpx.Client(base_url=address, timeout=120) as client:
                found[name] = [ask(client, stroke) for stroke in strokes]
        except httpx.HTTPError as error:
            raise ValueError(f"the server {name} at {address or 'no address'} gives no answer: {error}") from None
    print("\n".join(table(strokes, found)))
    if options.json is not None:
        rows = {name: [[one.text, one.seconds, one.read] for one in each] for name, each in found.items()}
        options.json.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
