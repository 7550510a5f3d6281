"""Strategies by name: what is understood, what is refused, and how third parties join."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from parlay.drafters.resources import Resources
from parlay.options import Options, UsageError, option
from parlay.strategies import plugins
from parlay.strategies.building import build, resolve
from parlay.strategies.catalogue import Unlisted, catalogue, find, listing
from parlay.strategies.entry import StrategyEntry
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import NO_DRAFT, Draft, Needs, Observation, SequenceView
from tests.drafters.sight import no_runner

RESOURCES = Resources(vocab_size=8, open_runner=no_runner)


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoOptions(Options):
    times: int = option(2, "how often", low=1)
    words: tuple[str, ...] = option(("a",), "what")
    fast: bool = option(False, "at once")


class Echo:
    """Repeats the last token.

    Needs nothing.
    """

    needs = Needs()

    def __init__(self, resources: Resources, options: EchoOptions) -> None:
        self.options = options

    def propose(self, views: list[SequenceView], budgets: list[int]) -> list[Draft]:
        return [NO_DRAFT for _ in views]

    def observe(self, observations: list[Observation]) -> None: ...

    def release(self, sequence: int) -> None: ...


class Keywords(Echo):
    def __init__(self, resources: Resources, *, times: int = 2) -> None:
        """Options as keywords."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOptions(Options):
    times: bytes = option(b"", "a type that no text gives")


class Listed(Echo):
    def __init__(self, resources: Resources, options: ListOptions) -> None:
        """Never made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsetOptions(Options):
    times: int = option(help="has no default")


class Unset(Echo):
    def __init__(self, resources: Resources, options: UnsetOptions) -> None:
        """Never made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClashingOptions(Options):
    k: int = option(2, "the budget's own name")


class Clashing(Echo):
    def __init__(self, resources: Resources, options: ClashingOptions) -> None:
        """Never made."""


MADE = StrategyEntry(
    name="made",
    family="toys",
    training="none",
    needs="nothing",
    summary="Made by hand.",
    options=EchoOptions,
    factory=f"{__name__}:Echo",
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "toy_drafters", sys.modules[__name__])


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_factory_is_there_and_documented(name: str) -> None:
    entry = find(name)
    assert entry.summary.endswith(".")
    for parameter in entry.parameters.values():
        assert parameter.help
    if entry.factory:
        drafter = resolve(entry.factory)
        assert drafter.__doc__
        assert {"k", "policy"} <= entry.parameters.keys()
    for toy in entry.toys:
        parse(f"{name}:{toy}")


@pytest.mark.parametrize(
    "text",
    ["none", "prompt-lookup", "prompt-lookup:k=8,min_ngram=3", "draft-model:min_p=0.25,model=some/where,shape=tree"],
)
def test_specs_survive_a_round_trip(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_equal_strategies_have_equal_specs_however_they_are_written() -> None:
    assert parse(" prompt-lookup: min_ngram=3 ,k=8") == parse("prompt-lookup:k=8,min_ngram=3")
    assert parse("prompt-lookup:min_ngram=1") == parse("prompt-lookup:") == StrategySpec("prompt-lookup")
    assert parse("prompt-lookup:k=8").settings["k"] == 8
    assert parse("union:of=none+prompt-lookup").settings["of"] == ("none", "prompt-lookup")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("promt-lookup", ["promt-lookup", "did you mean prompt-lookup"]),
        ("zzz", ["unknown strategy 'zzz'", "parlay strategies lists them"]),
        ("", ["unknown strategy"]),
        ("prompt-lookup:ngram=2", ["no parameter 'ngram'", "max_ngram"]),
        ("prompt-lookup:max_ngram=9999999", ["must be at most 1048576"]),
        ("none:k=2", ["no parameter 'k'"]),
        ("prompt-lookup:k", ["key=value", "'k'"]),
        ("prompt-lookup:k=2,k=3", ["twice"]),
        ("prompt-lookup:k=two", ["k must be a whole number, got two", "whole number"]),
        ("prompt-lookup:k=-1", ["k must be at least 0, got -1", "at least 0"]),
        ("prompt-lookup:k=100000", ["at most 1024"]),
        ("draft-model:min_p=nan", ["min_p must be at least 0, got nan", "at least 0"]),
        ("draft-model:shape=bush", ["shape=bush", "chain, tree"]),
        ("prompt-lookup:policy=never", ["adaptive, fixed"]),
        ("no_such_module_x:Thing", ["no_such_module_x"]),
        ("json:Thing", ["json has no 'Thing'"]),
        ("json:dumps", ["is not a drafter class"]),
        ("json:JSONDecoder", ["lacks", "propose"]),
        ("toy_drafters:Keywords", ["takes times", "one argument, options", "parlay.options.Options"]),
        ("toy_drafters:Listed", ["'times'", "int, float, bool, str"]),
        ("toy_drafters:Unset", ["'times' needs a default"]),
        ("toy_drafters:Echo:times=0", ["times must be at least 1, got 0", "at least 1"]),
        ("toy_drafters:Clashing", ["k", "policy"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "problem", "command"),
    [
        ("zzz", "unknown strategy 'zzz'", "parlay strategies"),
        ("union:of=zzz", "unknown strategy 'zzz'", "parlay strategies"),
        ("jacobi:zzz=1", "strategy jacobi has no parameter 'zzz'", "parlay strategies jacobi"),
    ],
)
def test_an_error_can_name_another_place_that_lists_the_names(text: str, problem: str, command: str) -> None:
    """A client of a server may have no command line."""
    with pytest.raises(Unlisted) as caught:
        parse(text)
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value))) == f"{problem}: {command} lists them"
    assert caught.value.listed_by("GET /strategies") == f"{problem}: GET /strategies lists them"


def test_plain_decoding_has_no_drafter() -> None:
    assert build(parse("none"), RESOURCES) is None


def test_parameters_reach_the_drafter_but_the_budget_does_not() -> None:
    with pytest.raises(UsageError, match="min_ngram 9 is more than max_ngram 3"):
        build(parse("prompt-lookup:min_ngram=9,max_ngram=3,k=4,policy=fixed"), RESOURCES)


def test_a_class_by_path_becomes_a_strategy() -> None:
    spec = parse("toy_drafters:Echo:times=5,words=x+y,fast=yes,k=3")
    entry = find(spec.name)
    assert entry.summary == "Repeats the last token."
    assert spec.settings["k"] == 3
    drafter = build(spec, RESOURCES)
    assert vars(drafter) == {"options": EchoOptions(times=5, words=("x", "y"), fast=True)}
    assert parse(str(spec)) == spec


def test_an_entry_by_path_says_more_about_itself() -> None:
    assert find("toy_drafters:MADE").summary == "Made by hand."


def test_an_installed_entry_point_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"echo": EntryPoint("echo", "toy_drafters:Echo", plugins.GROUP)}
    monkeypatch.setattr(plugins, "installed", lambda: points)
    assert str(parse("echo:times=3")) == "echo:times=3"
    assert vars(build(parse("echo:times=3"), RESOURCES))["options"].times == 3
    with pytest.raises(UsageError, match="did you mean echo"):
        parse("ecko")


def test_the_listing_is_plain_data() -> None:
    rows = json.loads(json.dumps(listing()))
    assert [row["name"] for row in rows] == list(catalogue())
    assert {"name", "family", "exactness", "training", "needs", "summary", "reference", "parameters"} <= rows[0].keys()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prompt-lookup", False),
        ("suffix-decoding", True),
        ("lookahead", True),
        ("lookahead:window=0", False),
        ("horizontal:levels=adaptive-ngram+prompt-lookup", False),
        ("horizontal:levels=adaptive-ngram+jacobi", True),
        ("prediction", False),
        ("prediction:fallback=token-recycling", True),
        ("union:of=adaptive-ngram+prompt-lookup", True),  # splits the budget by what was accepted
        ("suffix-automaton:fallback=prompt-lookup", True),  # stores outputs, which its fallback does not
    ],
)
def test_a_drafter_is_told_of_steps_if_it_or_one_inside_it_learns_from_them(text: str, told: bool) -> None:
    drafter = build(parse(text), RESOURCES)
    assert drafter is not None
    assert drafter.needs.outcomes == told
