"""Generates tasks like ParallelBench's (Kang et al. 2025, arXiv:2510.04767): questions and their right answers.

A seed determines all problems; none are taken from the published set. A problem lists all its right answers if it can,
and each of them counts the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

from parlay.options import UsageError, nearest

Words = tuple[str, ...]

ITEMS = 6
"""Number of words in a list."""
SIDE = 4
"""Number of rows, and of columns, of a square, which so has 16 places."""
EXAMPLES = 2
"""Default number of solved problems before each question."""


@dataclass(frozen=True)
class Problem:
    """A question and its right answers, each as words. There is at least one.

    If there are too many to list, ``answers`` has only one of them. Then an answer is right if it has all words in
    ``wanted`` and at most ``most`` words.
    """

    question: str
    answers: tuple[Words, ...]
    wanted: frozenset[str] = frozenset()
    most: int = 0

    @cached_property
    def accepted(self) -> frozenset[Words]:
        """The listed right answers in lower case."""
        return frozenset(lower(answer) for answer in self.answers)


def lower(words: Words) -> Words:
    """Return the words in lower case."""
    return tuple(word.lower() for word in words)


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of problem. An oracle is asked ``laws`` of its problems: one, if problems differ only in their words.

    ``closed`` is a formula, if there is one, for the share of right answers of a target that decides any k places in
    each step and knows the distribution of the right answers; see `parlay.bench.quality.laws`.
    """

    name: str
    instruction: str
    make: Callable[[random.Random], Problem]
    closed: Callable[[int], float] | None = None
    laws: int = 1

    @property
    def listed(self) -> bool:
        """Whether problems list all right answers, so that an oracle can be asked."""
        return not self.problems(1, 0)[0].wanted

    def problems(self, count: int, seed: int) -> list[Problem]:
        """Make ``count`` problems. The same seed gives the same problems on every machine."""
        return [self.make(random.Random(f"{self.name} {seed} {number}")) for number in range(count)]

    def prompt(self, problem: Problem, examples: int = EXAMPLES) -> str:
        """Return the prompt: the instruction, ``examples`` solved problems that are never asked, and the question."""
        solved = self.problems(examples, -1)
        shown = [f"{each.question}\nAnswer: {' '.join(each.answers[0])}\n" for each in solved]
        return "\n".join([f"{self.instruction}\n", *shown, f"{problem.question}\nAnswer:"])


# ------------------------------------------------------------------------------------------------------ closed forms


def certain(k: int) -> float:
    """Return the share of right answers if there is one right answer: 1, because every place is certain."""
    return 1.0


def permutation(k: int) -> float:
    """Return the share of right answers if any order of n items is right.

    A step with m items left draws k of them independently, and they are distinct with the probability
    m (m - 1) ... (m - k + 1) / m^k. The share is the product over steps.
    """
    chance = 1.0
    for left in range(ITEMS, 0, -k):
        for drawn in range(min(k, left)):
            chance *= (left - drawn) / left
    return chance


def one_of_the_places(k: int) -> float:
    """Return the share of right answers if exactly one of n places must get a new word.

    Let m places be open, and no decided place have the word. Then each of the k places of a step draws it with the
    probability 1/m. So none of them gets it with the probability (1 - 1/m)^k, and exactly one with the probability
    k/m (1 - 1/m)^(k - 1). Once one has it, all other places are certain.
    """
    chance, none = 0.0, 1.0
    for left in range(ITEMS, 0, -k):
        size = min(k, left)
        chance += none * size / left * (1 - 1 / left) ** (size - 1)
        none *= (1 - 1 / left) ** size
    return chance


def one_of(lines: int) -> Callable[[int], float]:
    """Return the share of right answers if any of ``lines`` lines is right and no two share a word in any place.

    The k places of the first step must all come from the same line. After that, all other places are certain.
    """
    return lambda k: (1 / lines) ** (min(k, ITEMS) - 1)


# -------------------------------------------------------------------------------------------------------------- lists

NAMES = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Irene"),
    *("Jack", "Karen", "Leo", "Mona", "Nils", "Olga", "Paul", "Rosa", "Tom"),
)
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")


def _names(draw: random.Random, count: int = ITEMS) -> Words:
    return tuple(draw.sample(NAMES, count))


def _list(names: Words, answers: Sequence[Words], more: str = "") -> Problem:
    return Problem(f"Names: {' '.join(names)}{more}", tuple(answers))


def _copy(draw: random.Random) -> Problem:
    names = _names(draw)
    return _list(names, [names])


def _reverse(draw: random.Random) -> Problem:
    names = _names(draw)
    return _list(names, [names[::-1]])


def _sort(draw: random.Random) -> Problem:
    names = _names(draw)
    return _list(names, [tuple(sorted(names))])


def _shuffle(draw: random.Random) -> Problem:
    names = _names(draw)
    others = [order for order in itertools.permutations(names) if order != names]
    return _list(names, draw.sample(others, len(others)))


def _permutation(draw: random.Random) -> Problem:
    digits = draw.sample("123456789", ITEMS)
    orders = list(itertools.permutations(digits))
    return Problem(f"Digits: {' '.join(digits)}", tuple(draw.sample(orders, len(orders))))


def _replace(draw: random.Random) -> Problem:
    *names, new = _names(draw, ITEMS + 1)
    answers = [(*names[:place], new, *names[place + 1 :]) for place in range(ITEMS)]
    return _list(tuple(names), draw.sample(answers, ITEMS), f"\nNew name: {new}")


def _replace_at(draw: random.Random) -> Problem:
    *names, new = _names(draw, ITEMS + 1)
    place = draw.randrange(ITEMS)
    answer = (*names[:place], new, *names[place + 1 :])
    return _list(tuple(names), [answer], f"\nNew name: {new}\nPlace: {PLACES[place]}")


def _choice(draw: random.Random) -> Problem:
    names = _names(draw, 2 * ITEMS)
    first, second = names[:ITEMS], names[ITEMS:]
    answers = draw.sample([first, second], 2)
    return Problem(f"One: {' '.join(first)}\nOther: {' '.join(second)}", tuple(answers))


# ------------------------------------------------------------------------------------------------------------ puzzles


@cache
def latin_squares() -> tuple[Words, ...]:
    """Return all 576 squares of four digits in which no row and no column has a digit twice, each row by row."""
    rows = list(itertools.permutations("1234"))
    return tuple(
        tuple(itertools.chain(*square))
        for square in itertools.product(rows, repeat=SIDE)
        if all(len(set(column)) == SIDE for column in zip(*square, strict=True))
    )


def _boxes(square: Words) -> list[Words]:
    corners = [SIDE * row + column for row in (0, 2) for column in (0, 2)]
    return [tuple(square[corner + place] for place in (0, 1, SIDE, SIDE + 1)) for corner in corners]


@cache
def sudokus() -> tuple[Words, ...]:
    """Return the 288 latin squares whose four boxes of two by two also have every digit."""
    return tuple(square for square in latin_squares() if all(len(set(box)) == SIDE for box in _boxes(square)))


def _latin(draw: random.Random) -> Problem:
    digits = draw.sample("123456789", SIDE)
    named = dict(zip("1234", digits, strict=True))
    squares = [tuple(named[digit] for digit in square) for square in latin_squares()]
    return Problem(f"Digits: {' '.join(digits)}", tuple(draw.sample(squares, len(squares))))


CLUES = 5


def _sudoku(draw: random.Random) -> Problem:
    solution = draw.choice(sudokus())
    clues = set(draw.sample(range(SIDE * SIDE), CLUES))
    answers = [each for each in sudokus() if all(each[place] == solution[place] for place in clues)]
    shown = " ".join(solution[place] if place in clues else "_" for place in range(SIDE * SIDE))
    return Problem(f"Puzzle: {shown}", (solution, *(each for each in answers if each != solution)))


STARTS = 5


def _arithmetic(draw: random.Random) -> Problem:
    """Make a chain of numbers: each follows from the number before it, and several first numbers are allowed."""
    step = draw.randint(2, 9)
    starts = draw.sample(range(1, STARTS + 1), STARTS)
    chains = [tuple(str(start * 10 + step * place) for place in range(ITEMS)) for start in starts]
    first = ", ".join(str(10 * start) for start in range(1, STARTS + 1))
    return Problem(f"First: any of {first}\nAdd: {step}", tuple(chains))


# -------------------------------------------------------------------------------------------------------------- texts

ANIMALS = (("dog", "dogs"), ("cat", "cats"), ("horse", "horses"), ("bird", "birds"), ("goat", "goats"))
VERBS = (("sees", "see"), ("likes", "like"), ("hears", "hear"), ("follows", "follow"), ("knows", "know"))
THIS, THAT = ("this", "these"), ("that", "those")


def _grammar(draw: random.Random) -> Problem:
    """Make a sentence whose subject and object may be singular or plural. Article, noun and verb must agree."""
    (subject, other), verb = draw.sample(ANIMALS, 2), draw.choice(VERBS)
    numbers = draw.sample(list(itertools.product((0, 1), repeat=2)), 4)
    answers = [(THIS[one], subject[one], verb[one], THAT[two], other[two]) for one, two in numbers]
    words = " ".join([*THIS, *subject, *verb, *THAT, *other])
    return Problem(f"Words to choose from: {words}", tuple(answers))


COLOURS = ("tall", "young", "black", "white", "small", "big")


def _sentence(draw: random.Random) -> Problem:
    """Make a sentence of two nouns and a verb. Articles and adjectives may go with either noun."""
    (one, _), (other, _) = draw.sample(ANIMALS, 2)
    verb, colours = draw.choice(VERBS)[0], draw.sample(COLOURS, 2)
    answers = [
        (articles[0], adjectives[0], nouns[0], verb, articles[1], adjectives[1], nouns[1])
        for articles in (("the", "a"), ("a", "the"))
        for adjectives in itertools.permutations(colours)
        for nouns in ((one, other), (other, one))
    ]
    words = ["the", "a", verb, one, other, *colours]
    return Problem(f"Words: {' '.join(draw.sample(words, len(words)))}", tuple(draw.sample(answers, len(answers))))


GOODS = ("apples", "candles", "clocks", "letters", "blankets", "oars")
DEEDS = ("sold", "lost", "mended", "carried", "counted")
WHERE = ("mill", "harbour", "school", "market", "bridge", "ferry")
WEATHER = ("It rained until noon.", "The road was bad.", "Nobody asked why.", "The dog waited outside.")


def _summary(draw: random.Random) -> Problem:
    """Make a text of two facts and two remarks. A summary must say of each fact who did what, to what, and where."""
    names, goods, deeds, where = (draw.sample(words, 2) for words in (NAMES, GOODS, DEEDS, WHERE))
    facts = list(zip(names, deeds, goods, where, strict=True))
    remarks = draw.sample(WEATHER, 2)
    told = [f"{name} {deed} the {good} at the {place}." for name, deed, good, place in facts]
    answer = " and ".join(f"{name} {deed} {good} at the {place}" for name, deed, good, place in facts)
    text = f"{told[0]} {remarks[0]} {told[1]} {remarks[1]}"
    wanted = frozenset(itertools.chain(*facts))
    return Problem(f"Text: {text}", (tuple(answer.split()),), wanted, 16)


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task("copy", "Write the names as they are.", _copy, certain),
            Task("reverse", "Write the names in reverse order.", _reverse, certain),
            Task("sort", "Write the names in alphabetical order.", _sort, certain),
            Task("shuffle", "Write the names in any other order, each once.", _shuffle),
            Task("permutation", "Write the digits in any order, each once.", _permutation, permutation),
            Task("replace-at", "Write the names, with the new one in the given place.", _replace_at, certain),
            Task("replace", "Write the names, with the new one in any one of the places.", _replace, one_of_the_places),
            Task("choose", "Write one of the two lists, as you like.", _choice, one_of(2)),
            Task("arithmetic", "Write six numbers: each adds to the one before it.", _arithmetic, one_of(STARTS)),
            Task("latin", "Write a square of four rows, in which no row and no column has a digit twice.", _latin),
            Task(
                "sudoku",
                "Fill the square: rows, columns and boxes of two by two have each digit once.",
                _sudoku,
                laws=4,
            ),
            Task("grammar", "Write a sentence of five words that is grammatical.", _grammar),
            Task("sentence", "Write a sentence of all these words, each once.", _sentence),
            Task("summary", "Say in at most 16 words who did what, and where.", _summary),
        )
    }
)


def find(names: Sequence[str]) -> tuple[Task, ...]:
    """Return the tasks of these names. Raises UsageError for a name that does not exist."""
    for name in names:
        if name not in TASKS:
            raise UsageError(f"there is no task {name!r}: {nearest(name, TASKS)}")
    return tuple(TASKS[name] for name in dict.fromkeys(names))
