"""Strategies inside strategies, as they are written on the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from parlay.drafters.resources import Resources
from parlay.options import Options, UsageError, option
from parlay.strategies.building import build
from parlay.strategies.entry import StrategyEntry
from parlay.strategies.spelling import DEPTH, parse
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView
from tests.drafters.sight import no_runner

RESOURCES = Resources(vocab_size=8, open_runner=no_runner)


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoOptions(Options):
    times: int = option(2, "how often")
    words: tuple[str, ...] = option(("a",), "what")


class Echo:
    """Remembers its budgets."""

    needs = Needs()

    def __init__(self, resources: Resources, options: EchoOptions) -> None:
        self.options = options

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT for _ in views]

    def observe(self, observations: Sequence[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SnakeOptions(Options):
    of: tuple[str, ...] = option(("toy_nested:SNAKE",), "itself", strategies=True)


SNAKE = StrategyEntry(
    name="snake",
    family="toys",
    training="none",
    needs="nothing",
    summary="Its default names itself.",
    options=SnakeOptions,
    factory=f"{__name__}:Echo",
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "toy_nested", sys.modules[__name__])


@pytest.mark.parametrize(
    "text",
    [
        "union:of=prompt-lookup(max_ngram=3)+draft-model(min_p=0.3)",
        "union:k=4,of=prompt-lookup(max_ngram=3,min_ngram=2,pick=leftmost)+draft-model",
        "union:of=union(k=3,of=prompt-lookup(k=2)+draft-model(model=a))+draft-model(model=b)",
        "union:of=toy_nested:Echo(times=3,words=x+y)+prompt-lookup",
        "union:of=toy_nested:Echo+prompt-lookup",
        "draft-model:model=odd(1)/a+b",
    ],
)
def test_nested_specs_survive_a_round_trip(text: str) -> None:
    spec = parse(text)
    assert str(spec) == text
    assert parse(str(spec)) == spec
    assert parse(spec.nested) == spec
    assert all(parse(str(member)) == member for member in spec.members)


def test_commas_and_plusses_in_parentheses_belong_to_the_member() -> None:
    spec = parse("union:k=9,of=toy_nested:Echo(words=x+y,times=3)+draft-model(model=a+b)")
    assert spec.settings["k"] == 9
    assert [(member.name, dict(member.parameters)) for member in spec.members] == [
        ("toy_nested:Echo", {"times": 3, "words": ("x", "y")}),
        ("draft-model", {"model": "a+b"}),
    ]


def test_equal_members_are_equal_however_they_are_written() -> None:
    """Defaults, spaces and order say nothing, inside as outside."""
    one = parse("union:of=prompt-lookup(max_ngram=1048576) + draft-model( shape=tree, min_p=0.20 )")
    other = parse("union(of=prompt-lookup+draft-model(min_p=0.2,shape=tree))")
    assert one == other
    assert parse("union:of=prompt-lookup()+draft-model") == parse("union")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("union:of=promt-lookup(k=1)+draft-model", ["'promt-lookup'", "did you mean prompt-lookup"]),
        ("union:of=prompt-lookup(ngram=2)+draft-model", ["prompt-lookup has no parameter 'ngram'"]),
        (
            "union:of=prompt-lookup(max_ngram=none)+draft-model",
            ["max_ngram must be a whole number, got none", "whole number"],
        ),
        ("union:of=prompt-lookup(max_ngram)+draft-model", ["key=value", "'max_ngram'"]),
        ("union:of=prompt-lookup(policy=adaptive)+draft-model", ["policy", "whole strategy"]),
        ("union:of=prompt-lookup(k=1+draft-model", ["a ( without its )"]),
        ("union:of=prompt-lookup(k=1))+draft-model", ["a ) without its ("]),
        ("prompt-lookup(k=1", ["a ( without its )"]),
        ("prompt-lookup(k=1)(k=2)", ["unknown strategy"]),
        ("prompt-lookup(k=1)x", ["unknown strategy"]),
        ("union:of=" + "union(of=" * 400 + "x" + ")" * 400, [f"more than {DEPTH}"]),
        ("union:of=" + "union(of=" * (DEPTH - 1) + "draft-model" + ")" * (DEPTH - 1), [f"more than {DEPTH}"]),
        ("eagle3:policy=fixed:k=1", ["commas separate parameters: write eagle3:policy=fixed,k=1"]),
        ("eagle3:head=user/repo : k=1; depth=2,width=3", ["write eagle3:head=user/repo,k=1,depth=2,width=3"]),
        ("union:of=prompt-lookup(k=3 min_ngram=2)", ["write prompt-lookup(k=3,min_ngram=2)"]),
        ("toy_nested:SNAKE", ["more than", "toy_nested:SNAKE"]),
        ("toy_nested:Echo(time=3)", ["no parameter 'time'", "times"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_as_deep_as_is_allowed() -> None:
    spec = parse("union:of=" + "union(of=" * (DEPTH - 2) + "draft-model" + ")" * (DEPTH - 2))
    for _ in range(DEPTH - 1):
        (spec,) = spec.members
    assert spec.name == "draft-model"


def test_parameters_reach_a_member() -> None:
    with pytest.raises(UsageError, match="min_ngram 9 is more than max_ngram 3"):
        build(parse("union:of=prompt-lookup(min_ngram=9,max_ngram=3)+toy_nested:Echo"), RESOURCES)


def test_capitals_and_slips_are_told_apart_from_other_words() -> None:
    with pytest.raises(UsageError, match="did you mean auto"):
        parse("AUTO")


@pytest.mark.parametrize("text", ["x" * 100_000, "auto:" + "k" * 100_000, "auto:k" * 50_000 + "=1", "auto:of=\nx("])
def test_whatever_is_named_the_error_is_one_short_line(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
