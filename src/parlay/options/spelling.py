"""How strategies are written inside one another: ``NAME(key=value,...)``. Separators in parentheses do not count."""

from __future__ import annotations

DEPTH = 8
"""How deep strategies may stand inside one another."""

TOO_DEEP = f"more than {DEPTH} strategies stand inside one another"


def split(text: str, separator: str) -> list[str]:
    """The parts of ``text`` between the separators that no parentheses enclose; empty ones are left out."""
    parts = [""]
    depth = 0
    for character in text:
        depth += _step(character)
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def call(text: str) -> tuple[str, str] | None:
    """Name and settings of ``NAME(settings)``; None for a text of another form."""
    name, bracket, rest = text.partition("(")
    if not bracket or "=" in name or not rest.endswith(")") or complaint(rest[:-1]):
        return None
    return name.strip(), rest[:-1]


def complaint(text: str) -> str | None:
    """What is wrong with the parentheses of ``text``, if anything."""
    depth = 0
    for character in text:
        depth += _step(character)
        if depth < 0:
            return "a ) without its ("
        if depth >= DEPTH:
            return TOO_DEEP
    return None if depth == 0 else "a ( without its )"


def _step(character: str) -> int:
    return (character == "(") - (character == ")")
