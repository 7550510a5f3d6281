"""Draws the race as an animated SVG without scripts; it stands still for readers who asked for less motion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.race.record import Lane, Recording, Step, median

WIDTH, HEIGHT, EDGE = 860, 372, 24
COLUMNS = 88
LINE = 21
SLOWER = 12
"""How many times slower the picture plays than the answers were decoded."""
PAUSE = 3.0
"""Seconds between the end of the animation and its next start."""
PROCESSORS = {
    "EPYC (cpu family 25, model 1)": "AMD EPYC (Zen 3)",
    "EPYC (cpu family 25, model 17)": "AMD EPYC (Zen 4)",
    "EPYC (cpu family 26, model 2)": "AMD EPYC (Zen 5)",
}
"""Well-known names of processors, by what the system calls them."""
LANES = {"none": "plain decoding", "auto": "Parlay's default"}
STYLE = """\
text{font:15px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#e6edf3}
.sans,.sans tspan{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
.head{font-size:17px;font-weight:600}
.note{font-size:13px;fill:#9da7b3}
.d{fill:#7ee787}
.bar{transform-box:fill-box;transform-origin:left}
.u{fill-opacity:.25}
.still{display:inline}.moving{display:none}"""


@dataclass(frozen=True, slots=True)
class Run:
    """Letters of one line that come from one step and one source."""

    text: str
    step: int
    drafted: bool


def picture(recording: Recording, header: Mapping[str, Any]) -> str:
    """Return the whole SVG file."""
    period = recording.plain.seconds * SLOWER + PAUSE
    body = [
        _line(EDGE, 36, "One model, one answer, decoded twice: SmolLM2-135M (4-bit) corrects a message", "sans head"),
        *_lane(recording.plain, recording, top=66),
        *_lane(recording.fast, recording, top=204),
        *_notes(header, top=HEIGHT - 18),
    ]
    moves = "".join(_moves(lane, period) for lane in (recording.plain, recording.fast))
    still = "@media(prefers-reduced-motion:no-preference){.u{fill-opacity:1}.still{display:none}.moving{display:inline}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="t d">',
            f'<title id="t">{escape(_title(recording))}</title>',
            f'<desc id="d">{escape(_description(recording))}</desc>',
            f"<style>{STYLE}\n{still}\n{moves}}}</style>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#0d1117"/>',
            *body,
            "</svg>\n",
        ]
    )


def _title(recording: Recording) -> str:
    return f"The same answer, {median(recording):.1f} times as fast"


def _description(recording: Recording) -> str:
    plain, fast = recording.plain, recording.fast
    return (
        f"Plain decoding needs {len(plain.steps)} steps and {plain.seconds:.2f} seconds, Parlay's default strategy "
        f"{len(fast.steps)} steps and {fast.seconds:.2f} seconds. The text: {plain.text}"
    )


def _lane(lane: Lane, recording: Recording, top: int) -> Iterator[str]:
    """Yield the elements of one lane: its name, figures, a bar as long as its time, and the text."""
    room = WIDTH - 2 * EDGE
    figures = f"{len(lane.steps)} steps, {lane.seconds:.2f} s"
    if lane is recording.fast:
        figures += f", {recording.plain.seconds / lane.seconds:.1f} times as fast"
    colour = "#3fb950" if lane is recording.fast else "#8b949e"
    yield _line(EDGE, top + 6, LANES[lane.strategy], "sans")
    yield f'<text x="{WIDTH - EDGE}" y="{top + 6}" class="sans" text-anchor="end">{figures}</text>'
    yield f'<rect x="{EDGE}" y="{top + 16}" width="{room}" height="6" rx="3" fill="#21262d"/>'
    length = room * lane.seconds / recording.plain.seconds
    yield (
        f'<rect class="bar b-{lane.strategy}" x="{EDGE}" y="{top + 16}" width="{length:.1f}" height="6" rx="3" '
        f'fill="{colour}"/>'
    )
    for number, runs in enumerate(_lines(lane)):
        spans = "".join(_span(run, lane, recording.fast.seconds) for run in runs)
        yield f'<text x="{EDGE}" y="{top + 46 + number * LINE}" xml:space="preserve">{spans}</text>'


def _span(run: Run, lane: Lane, done: float) -> str:
    """Return a run's element. If it is later than the moment ``done``, the still picture shows it faintly."""
    names = [f"{lane.strategy}-{run.step}"]
    names += ["d"] if run.drafted else []
    names += ["u"] if lane.steps[run.step].seconds > done else []
    return f'<tspan class="{" ".join(names)}">{escape(run.text)}</tspan>'


def _lines(lane: Lane) -> Iterator[list[Run]]:
    """Yield the answer in lines of at most `COLUMNS` letters, broken at spaces."""
    letters = [
        (letter, number, source != "target")
        for number, step in enumerate(lane.steps)
        for text, source in step.pieces
        for letter in text
    ]
    while letters:
        end = _line_end("".join(letter for letter, _, _ in letters))
        yield _runs(letters[:end])
        letters = letters[end:]


def _line_end(text: str) -> int:
    if len(text) <= COLUMNS:
        return len(text)
    space = text.rfind(" ", 0, COLUMNS)
    return space + 1 if space > 0 else COLUMNS


def _runs(letters: list[tuple[str, int, bool]]) -> list[Run]:
    runs: list[Run] = []
    for letter, step, drafted in letters:
        if runs and (runs[-1].step, runs[-1].drafted) == (step, drafted):
            runs[-1] = Run(runs[-1].text + letter, step, drafted)
        else:
            runs.append(Run(letter, step, drafted))
    return runs


def _moves(lane: Lane, period: float) -> str:
    """Return the CSS rules and animations of each step and of the bar."""
    end = 100 * lane.seconds * SLOWER / period
    rules = [
        f"@keyframes b-{lane.strategy}{{0%{{transform:scaleX(0)}}{end:.2f}%,to{{transform:none}}}}",
        f".b-{lane.strategy}{{animation:b-{lane.strategy} {period:.2f}s linear infinite}}",
    ]
    for number, step in enumerate(lane.steps):
        if not _text(step):
            continue
        name, at = f"{lane.strategy}-{number}", 100 * step.seconds * SLOWER / period
        rules.append(f"@keyframes {name}{{0%{{fill-opacity:.15}}{at:.2f}%,to{{fill-opacity:1}}}}")
        rules.append(f".{name}{{animation:{name} {period:.2f}s step-end infinite}}")
    return "\n".join(rules) + "\n"


def _text(step: Step) -> str:
    return "".join(text for text, _ in step.pieces)


def _notes(header: Mapping[str, Any], top: int) -> Iterator[str]:
    machine = header["machine"]
    cpu = next((name for family, name in PROCESSORS.items() if family in machine["cpu"]), machine["cpu"])
    where = f"Measured on {machine['cores']} cores: {cpu}, {machine['capability']}. Weights: GGUF, Q4_1. Greedy."
    yield (
        f'<text x="{EDGE}" y="{top - 20}" class="sans note"><tspan class="d">Green</tspan>: drafted, then accepted by '
        f'the model. <tspan class="moving">Played {SLOWER} times slower than it ran.</tspan>'
        '<tspan class="still">Faint: not yet written when the second was done.</tspan></text>'
    )
    yield _line(EDGE, top, where, "sans note")


def _line(x: int, y: int, text: str, names: str) -> str:
    return f'<text x="{x}" y="{y}" class="{names}">{escape(text)}</text>'
