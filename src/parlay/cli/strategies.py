"""`parlay strategies`: the catalogue, as text or JSON."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby

from parlay.options import Option, UsageError, options_of
from parlay.strategies import accept_rules, imported
from parlay.strategies.accept_rules import RULES, RuleEntry
from parlay.strategies.catalogue import catalogue, find, listing
from parlay.strategies.entry import DEFAULT_STRATEGY, StrategyEntry
from parlay.types import Exactness

WIDTH = 80
_NAME_WIDTH = 20
LEVELS = {
    Exactness.BITS: "same tokens as plain decoding, to the last bit where the model's kernels allow it",
    Exactness.SEED: "same tokens as plain decoding for the same seed, up to numerical noise",
    Exactness.DISTRIBUTION: "same distribution of text as plain decoding",
    Exactness.LOSSY: "no promise about the text",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="strategies or accept rules to describe; with --json strategies"
    )
    parser.add_argument("--json", action="store_true", help="print them, or the whole catalogue, as one JSON array")


def run(options: argparse.Namespace) -> int:
    for name in options.names:
        _check_bare(name)
    if options.json:
        wanted = [find(name).name for name in options.names] or catalogue()
        print(json.dumps([entry for entry in listing() if entry["name"] in wanted], indent=2))
    elif options.names:
        print("\n\n".join(map(_described, options.names)))
    else:
        _overview(list(catalogue().values()))
    return 0


def _described(name: str) -> str:
    """A strategy or an accept rule, by its name or by the path of its class."""
    if name in RULES or (":" in name and imported.is_rule(name)):
        return _describe_rule(accept_rules.find(name))
    return _describe(find(name))


def _check_bare(name: str) -> None:
    """Raises UsageError for a strategy's name with parameters, which would be taken for the path of a class."""
    bare, colon, _ = name.partition(":")
    if colon and bare in catalogue():
        raise UsageError(f"{name} has parameters, and this command lists them: write parlay strategies {bare}")


def _overview(entries: list[StrategyEntry]) -> None:
    """A line or two for each strategy, by family, and for each accept rule; the default comes first."""
    default = find(DEFAULT_STRATEGY)
    print(f"the default, which needs no choice of yours:\n{_brief_entry(default)}\n")
    entries = [entry for entry in entries if entry is not default]
    for family, members in groupby(entries, key=lambda entry: entry.family):
        print(f"{family}:")
        print("\n".join(map(_brief_entry, members)), end="\n\n")
    print("accept rules (rule=NAME):")
    print("\n".join(_brief(rule.name, f"{rule.summary} [{rule.exactness}]") for rule in RULES.values()))
    print("\nExactness is `bits` unless said otherwise; it follows the rule:")
    for level in dict.fromkeys([*(entry.exactness for entry in entries), *(rule.exactness for rule in RULES.values())]):
        print(_wrap(f"{level}: {LEVELS[level]}"))
    print("\nParameters: parlay strategies NAME")
    print("Use one:    parlay generate --strategy NAME[:KEY=VALUE,...]")


def _brief_entry(entry: StrategyEntry) -> str:
    level = "" if entry.exactness is Exactness.BITS else f" [{entry.exactness}]"
    return _brief(entry.name, entry.summary + level)


def _brief(name: str, summary: str) -> str:
    return _wrap(f"{name:{_NAME_WIDTH}} {summary}", hang=_NAME_WIDTH + 3)


def _describe(entry: StrategyEntry) -> str:
    facts = f"family {entry.family}; exactness {entry.exactness}; training: {entry.training}; needs: {entry.needs}"
    lines = [entry.name, _wrap(entry.summary)]
    if entry.when:
        lines.append(_wrap(f"use it if: {entry.when}"))
    lines.append(_wrap(facts))
    if entry.reference:
        lines.append(_wrap(entry.reference))
    own = {name: parameter for name, parameter in entry.parameters.items() if "." not in name}  # rules describe theirs
    return "\n".join([*lines, *_describe_parameters(own)])


def _describe_rule(rule: RuleEntry) -> str:
    lines = [
        rule.name,
        _wrap(rule.summary),
        _wrap(f"exactness {rule.exactness}; drafts: {rule.kind.replace('_', ' ')}"),
    ]
    if rule.reference:
        lines.append(_wrap(rule.reference))
    own = {f"{rule.name}.{name}": option for name, option in options_of(rule.options).items()}
    return "\n".join([*lines, *_describe_parameters(own)])


def _describe_parameters(parameters: Mapping[str, Option]) -> Iterator[str]:
    width = max(map(len, parameters), default=0)
    for name, parameter in parameters.items():
        yield _wrap(f"{name:{width}}  {parameter.help} ({_values(parameter)})", indent=4, hang=width + 6)


def _values(parameter: Option) -> str:
    """The choices, unless the help names them, and the default."""
    choices = "" if all(each in parameter.help for each in parameter.choices) else ", ".join(parameter.choices)
    default = "+".join(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    return "; ".join(filter(None, (choices, f"default: {'empty' if default == '' else default}")))


def _wrap(text: str, indent: int = 2, hang: int | None = None) -> str:
    rest = indent if hang is None else hang
    return textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * rest)
