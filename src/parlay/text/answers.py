r"""Finds the answer in a text with reasoning: the last number, the last ``\boxed{}``, or a pattern's last match.

A pattern comes from a user, and its search may never end. So it runs in a process of its own, which is killed if it
takes too much time or memory.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import lru_cache

from parlay.system.bounded_process import Answer, BoundedProcess, LimitMet, serve
from parlay.types import FieldError

NUMBER, BOXED = "number", "boxed"
LONGEST_PATTERN = 1024
"""The most characters of a pattern."""
LONGEST_TEXT = 1 << 18
"""A pattern is searched for in this many characters at the end of a text."""
LONGEST_ANSWER = 1024
"""The most characters of an answer; anything longer is not an answer."""
CPU_SECONDS = 0.05
"""Seconds of CPU time for one search. The engine waits for the search."""
MEMORY = 256 << 20
STACK = 16 << 20

_NUMBER = re.compile(r"(?<![\w.])[-+]?\$?\s?(\d{1,3}(?:,\d{3})+|\d{1,40})(\.\d{1,40})?(?!\d)", re.ASCII)
_BOX = "\\boxed{"


class PatternFailed(Exception):
    """A pattern took too much time or memory; the message says so in one line."""


def check_rule(rule: str) -> None:
    """Check the rule that finds answers, and start the process that searching needs.

    Raises ValueError for a pattern that is too long or invalid, and for one that is too slow even on an empty text.
    """
    if rule in (NUMBER, BOXED):
        return
    if not rule or len(rule) > LONGEST_PATTERN:
        raise FieldError(
            "vote.answer",
            f"has {len(rule)} characters: give {NUMBER}, {BOXED}, or a regular expression of at most {LONGEST_PATTERN}",
        )
    try:
        _ask(rule, "")
    except PatternFailed as error:
        raise FieldError("vote.answer", f": {error}") from None


def find_answer(rule: str, text: str) -> str | None:
    """Find the answer, and return it in a normal form: equal answers are equal strings. None if the text has no answer.

    Numbers with the same value are the same answer: 1,000 and 1000.0. A pattern's answer is its first group, or the
    whole match. All rules take the last match. Raises PatternFailed for a pattern that takes too much time or memory.
    """
    if rule == NUMBER:
        return _last_number(text)
    found = _last_box(text) if rule == BOXED else _ask(rule, text[-LONGEST_TEXT:])
    plain = " ".join((found or "").split())
    return (_as_number(plain) or plain) if 0 < len(plain) <= LONGEST_ANSWER else None


def _last_number(text: str) -> str | None:
    *_, last = [None, *_NUMBER.finditer(text)]
    return None if last is None else _value(last)


def _as_number(text: str) -> str | None:
    """Return the value if the text is only a number with marks of currency, percent or mathematics; else None."""
    match = _NUMBER.fullmatch(text.strip("$%.! "))
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> str:
    """Spell the value in one way, without thousands separators and trailing zeros."""
    number = Decimal(match[1].replace(",", "") + (match[2] or ""))
    whole = f"{number:f}"
    plain = whole.rstrip("0").rstrip(".") if "." in whole else whole
    return f"-{plain}" if match[0].startswith("-") and number else plain


def _last_box(text: str) -> str | None:
    """Return the content of the last box, up to the brace that closes it."""
    begin = text.rfind(_BOX)
    depth = 1
    for place in range(begin + len(_BOX), len(text)) if begin >= 0 else ():
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[begin + len(_BOX) : place]
    return None


# ------------------------------------------------------------------------------------------------- patterns of users


def _ask(pattern: str, text: str) -> str | None:
    try:
        answer = json.loads(_process().ask(json.dumps([pattern, text]).encode(), CPU_SECONDS))
    except LimitMet as error:
        raise PatternFailed(f"the regular expression took more than {error}: give a simpler one") from None
    if "error" in answer:
        raise FieldError("vote.answer", f"is not a regular expression: {answer['error']}")
    found: str | None = answer["found"]
    return found


@lru_cache(maxsize=1)
def _process() -> BoundedProcess:
    return BoundedProcess("parlay.text.answers", b"", "a regular expression")


def _answering(first: bytes) -> Answer:
    return _answer


def _answer(question: bytes) -> bytes:
    pattern, text = json.loads(question)
    try:
        *_, last = [None, *re.finditer(pattern, text)]
    except (re.error, OverflowError, RecursionError) as error:
        return json.dumps({"error": str(error)}).encode()
    return json.dumps({"found": None if last is None else last[1 if last.re.groups else 0]}).encode()


if __name__ == "__main__":
    serve(_answering, memory=MEMORY, stack=STACK)
