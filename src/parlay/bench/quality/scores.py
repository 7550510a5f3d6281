"""Scores answers: whether an answer is right, and which share of it is."""

from __future__ import annotations

from dataclasses import dataclass

from parlay.bench.quality.tasks import Problem, Words

_EDGES = ".,;:!?\"'()[]"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of an answer. ``right``: its first line is a right answer. ``loose``: one of its lines is.

    ``places`` is the share of the first line's words that equal the word in the same place of the nearest right answer.
    For a summary, it is the share of the wanted words that the line has.
    """

    right: bool
    loose: bool
    places: float


def score(problem: Problem, text: str) -> Score:
    """Score an answer as text. Case and punctuation at the ends of words do not count."""
    lines = [words for line in text.splitlines() if (words := words_of(line))] or [()]
    return Score(_right(problem, lines[0]), any(_right(problem, line) for line in lines), _places(problem, lines[0]))


def words_of(text: str) -> Words:
    """Return the words of a line, in lower case and without punctuation at their ends."""
    return tuple(word for each in text.lower().split() if (word := each.strip(_EDGES)))


def _right(problem: Problem, words: Words) -> bool:
    if problem.wanted:
        return _share(problem, words) == 1 and len(words) <= problem.most
    return words in problem.accepted


def _places(problem: Problem, words: Words) -> float:
    if problem.wanted:
        return _share(problem, words)
    if words in problem.accepted:
        return 1.0
    return max(sum(map(str.__eq__, words, answer)) / max(len(words), len(answer)) for answer in problem.accepted)


def _share(problem: Problem, words: Words) -> float:
    return sum(word.lower() in words for word in problem.wanted) / len(problem.wanted)
