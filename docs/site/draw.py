"""Draws how each family of strategies drafts: python docs/site/draw.py writes docs/pictures/draft-*.svg."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "pictures"
WIDTH = 680
BOX, GAP, ROW = 30, 8, 46
"""Height of a box, space between boxes, and from row to row."""
LETTER = 8.2

FILLS = {
    "text": ("#e7ebf0", "#8c959f", ""),  # committed
    "source": ("#fff3c4", "#b08800", ""),  # what is copied from
    "yes": ("#c8f0d0", "#1a7f37", ""),  # drafted and accepted
    "no": ("#ffffff", "#cf222e", "4 3"),  # drafted and rejected
    "own": ("#cfe4ff", "#0969da", ""),  # the target's own token
    "part": ("#efe3ff", "#8250df", ""),  # a module: a layer, a head, a small model
    "off": ("#ffffff", "#afb8c1", "4 3"),  # a layer that is skipped, a guess that is still open
}
LEGEND = (("text", "written"), ("yes", "drafted, accepted"), ("no", "drafted, rejected"), ("own", "the model's own"))
STYLE = (
    'text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#1f2328}'
    'text.w{font:13px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;fill:#57606a}'
    "path{fill:none;stroke:#57606a;stroke-width:1.4}"
)


@dataclass(frozen=True, slots=True)
class Box:
    """A token or a module. ``x`` and ``y`` are its upper left corner."""

    x: float
    y: float
    text: str
    kind: str

    @property
    def width(self) -> float:
        return len(self.text) * LETTER + 18

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    def svg(self) -> str:
        fill, line, dashes = FILLS[self.kind]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        return (
            f'<rect x="{self.x:.1f}" y="{self.y:.1f}" width="{self.width:.1f}" height="{BOX}" rx="6" fill="{fill}" '
            f'stroke="{line}" stroke-width="1.4"{dashed}/>'
            f'<text x="{self.middle:.1f}" y="{self.y + 20:.1f}" text-anchor="middle">{escape(self.text)}</text>'
        )


def row(x: float, y: float, *tokens: tuple[str, str]) -> list[Box]:
    """Boxes side by side, each (text, kind)."""
    boxes: list[Box] = []
    for text, kind in tokens:
        boxes.append(Box(x, y, text, kind))
        x = boxes[-1].right + GAP
    return boxes


def words(x: float, y: float, text: str) -> str:
    return f'<text class="w" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """A curve that leaves and arrives level."""
    bend = (x2 - x1) / 2
    curve = f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    return f'<path marker-end="url(#a)" d="{curve}"/>'


def drop(x1: float, y1: float, x2: float, y2: float) -> str:
    """A curve that leaves and arrives upright."""
    bend = (y2 - y1) / 2
    curve = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
    return f'<path marker-end="url(#a)" d="{curve}"/>'


def chain() -> tuple[str, int, list[str]]:
    text = row(24, 54, ("The", "text"), ("ferry", "text"), ("leaves", "text"))
    small = Box(text[-1].right + 36, 54, "small model", "part")
    draft = row(24, 120, ("at", "yes"), ("ten", "yes"), ("past", "yes"), ("noon", "no"))
    target = Box(draft[-1].right + 40, 120, "target, one forward", "part")
    own = Box(target.right + 40, 120, "seven", "own")
    return (
        "A small model writes a few tokens; one forward of the target checks them all.",
        166,
        [
            *(box.svg() for box in (*text, small, *draft, target, own)),
            arrow(text[-1].right + 4, 69, small.x - 5, 69),
            drop(small.middle, 86, draft[2].middle, 117),
            arrow(draft[-1].right + 4, 135, target.x - 5, 135),
            arrow(target.right + 4, 135, own.x - 5, 135),
        ],
    )


def copy() -> tuple[str, int, list[str]]:
    where = "prompt or past answers"
    source = row(24, 62, ("...", "text"), ("the", "source"), ("ferry", "source"), ("leaves", "text"), ("at", "text"))
    source += row(source[-1].right + GAP, 62, ("ten", "text"), ("past", "text"), ("seven", "text"), ("...", "text"))
    output = row(24, 136, ("In", "text"), ("May", "text"), ("the", "source"), ("ferry", "source"))
    draft = row(output[-1].right + 36, 136, ("leaves", "yes"), ("at", "yes"), ("ten", "no"), ("past", "no"))
    own = Box(draft[-1].right + 36, 136, "six", "own")
    return (
        "The last words stood there before: what followed them there is the draft.",
        182,
        [
            words(24, 54, where),
            words(24, 128, "answer so far"),
            *(box.svg() for box in (*source, *output, *draft, own)),
            drop(source[3].middle, 94, draft[0].middle, 133),
            drop(source[4].middle, 94, draft[1].middle, 133),
        ],
    )


def tree() -> tuple[str, int, list[str]]:
    root = Box(24, 100, "The ferry", "text")
    first = [Box(170, 62, "leaves", "yes"), Box(170, 138, "is", "no")]
    second = [Box(290, 46, "at", "yes"), Box(290, 92, "the", "no"), Box(290, 138, "late", "no")]
    third = [Box(390, 46, "noon", "no"), Box(390, 92, "ten", "yes")]
    own = Box(500, 92, "past", "own")
    links = [(root, first[0]), (root, first[1]), (first[0], second[0]), (first[0], second[1]), (first[1], second[2])]
    links += [(second[0], third[0]), (second[0], third[1])]
    return (
        "Several continuations at once: each node sees only the nodes on its own path.",
        186,
        [
            *(box.svg() for box in (root, *first, *second, *third, own)),
            *(arrow(one.right + 3, one.y + 15, other.x - 5, other.y + 15) for one, other in links),
            arrow(third[1].right + 3, 107, own.x - 5, 107),
        ],
    )


def heads() -> tuple[str, int, list[str]]:
    text = row(24, 118, ("The", "text"), ("ferry", "text"), ("leaves", "text"))
    state = Box(text[2].right + 40, 118, "target's hidden state", "part")
    names = [Box(state.right + 56, 50 + i * ROW, f"head {i + 1}", "part") for i in range(4)]
    kinds = (("at", "yes"), ("ten", "yes"), ("past", "yes"), ("noon", "no"))
    drafts = [Box(name.right + 36, name.y, text, kind) for name, (text, kind) in zip(names, kinds, strict=True)]
    return (
        "Small trained heads read the target's own hidden state and name the next tokens.",
        236,
        [
            *(box.svg() for box in (*text, state, *names, *drafts)),
            arrow(text[2].right + 4, 133, state.x - 5, 133),
            *(arrow(state.right + 3, 133, name.x - 5, name.y + 15) for name in names),
            *(
                arrow(name.right + 3, name.y + 15, one.x - 5, one.y + 15)
                for name, one in zip(names, drafts, strict=True)
            ),
        ],
    )


def fixed_point() -> tuple[str, int, list[str]]:
    lines = (
        (("a", "off"), ("a", "off"), ("the", "off"), ("the", "off")),
        (("at", "own"), ("the", "off"), ("past", "off"), ("the", "off")),
        (("at", "text"), ("ten", "own"), ("past", "off"), ("noon", "off")),
        (("at", "text"), ("ten", "text"), ("past", "yes"), ("seven", "own")),
    )
    shapes: list[str] = []
    for number, line in enumerate(lines):
        top = 48 + number * ROW
        shapes.append(words(24, top + 20, "first guess" if number == 0 else f"forward {number}"))
        shapes += [Box(130 + column * 110, top, text, kind).svg() for column, (text, kind) in enumerate(line)]
        if number:
            shapes.append(drop(100, top - 22, 100, top - 2))
    return (
        "The target corrects a whole row of guesses in every forward until they stand.",
        238,
        shapes,
    )


def skip() -> tuple[str, int, list[str]]:
    stack = [f"layer {number}" for number in range(1, 7)]
    shapes: list[str] = [words(24, 68, "drafts"), words(24, 124, "checks")]
    for top, skipped in ((48, {2, 3, 5}), (104, set[int]())):
        boxes = row(90, top, *((name, "off" if number in skipped else "part") for number, name in enumerate(stack, 1)))
        shapes += [box.svg() for box in boxes]
    return ("The target drafts with some of its own layers, and checks with all of them.", 148, shapes)


def cascade() -> tuple[str, int, list[str]]:
    boxes = [Box(24, 54, "copies", "part"), Box(150, 54, "small model", "part"), Box(330, 54, "target", "part")]
    first = row(24, 112, ("at", "yes"), ("ten", "yes"), ("to", "no"))
    second = row(250, 112, ("at", "yes"), ("ten", "yes"), ("past", "yes"))
    own = Box(480, 54, "seven", "own")
    return (
        "A cheap drafter writes for a better one, and the target checks what that one kept.",
        158,
        [
            *(box.svg() for box in (*boxes, *first, *second, own)),
            *(
                arrow(one.right + 4, 69, other.x - 5, 69)
                for one, other in zip([*boxes], [*boxes[1:], own], strict=True)
            ),
            drop(boxes[0].middle, 86, first[1].middle, 109),
            drop(boxes[1].middle + 20, 86, second[0].middle, 109),
        ],
    )


FAMILIES = {
    "chain": chain,
    "copy": copy,
    "tree": tree,
    "heads": heads,
    "fixed-point": fixed_point,
    "layers": skip,
    "cascade": cascade,
}


def legend(top: float) -> Iterable[str]:
    x = 24.0
    for kind, name in LEGEND:
        fill, line, dashes = FILLS[kind]
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<rect x="{x:.1f}" y="{top}" width="14" height="14" rx="3" fill="{fill}" stroke="{line}"{dashed}/>'
        yield words(x + 20, top + 12, name)
        x += 40 + len(name) * 6.8


def picture(title: str, height: int, shapes: Sequence[str]) -> str:
    """The whole file: a light card, so that it reads on any page."""
    whole = height + 34
    marker = (
        '<marker id="a" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M1 1L7 4L1 7" style="stroke-width:1.6"/></marker>'
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {whole}" role="img" aria-labelledby="t">',
            f'<title id="t">{escape(title)}</title>',
            f"<style>{STYLE}</style><defs>{marker}</defs>",
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{whole - 1}" rx="10" fill="#f6f8fa" stroke="#d0d7de"/>',
            words(24, 26, title),
            *shapes,
            *legend(height + 8),
            "</svg>\n",
        ]
    )


def main() -> None:
    for name, draw in FAMILIES.items():
        (PICTURES / f"draft-{name}.svg").write_text(picture(*draw()), encoding="utf-8")


if __name__ == "__main__":
    main()
