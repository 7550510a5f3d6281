"""`parlay strategies`: the catalogue, for people or as JSON."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Mapping

from parlay.drafters.accept_rules import RULES, RuleEntry
from parlay.drafters.catalogue import Entry, Parameter, catalogue, listing
from parlay.types import Exactness

WIDTH = 80
LEVELS = {
    Exactness.BITS: "same tokens as plain decoding, to the last bit where the model's kernels allow it",
    Exactness.SEED: "same tokens as plain decoding for the same seed, up to numerical noise",
    Exactness.DISTRIBUTION: "same distribution of text as plain decoding",
    Exactness.LOSSY: "no promise about the text",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the catalogue as one JSON array")


def run(options: argparse.Namespace) -> int:
    entries = list(catalogue().values())
    if options.json:
        print(json.dumps(listing(), indent=2))
        return 0
    print("\n\n".join(_describe(entry) for entry in entries))
    print("\nUse one: parlay generate --strategy NAME[:KEY=VALUE,...]\n\nAccept rules (rule=NAME):\n")
    print("\n\n".join(_describe_rule(rule) for rule in RULES.values()))
    print("\nExactness:")
    for level in dict.fromkeys([*(entry.exactness for entry in entries), *(rule.exactness for rule in RULES.values())]):
        print(_wrap(f"{level}: {LEVELS[level]}"))
    return 0


def _describe(entry: Entry) -> str:
    facts = f"family {entry.family}; exactness {entry.exactness}; training: {entry.training}; needs: {entry.needs}"
    lines = [entry.name, _wrap(entry.summary), _wrap(facts)]
    if entry.reference:
        lines.append(_wrap(entry.reference))
    own = {name: parameter for name, parameter in entry.parameters.items() if "." not in name}  # the rules' stand there
    return "\n".join([*lines, *_describe_parameters(own)])


def _describe_rule(rule: RuleEntry) -> str:
    lines = [rule.name, _wrap(rule.summary), _wrap(f"exactness {rule.exactness}; drafts: {rule.law.replace('_', ' ')}")]
    if rule.reference:
        lines.append(_wrap(rule.reference))
    own = {f"{rule.name}.{name}": parameter for name, parameter in rule.parameters.items()}
    return "\n".join([*lines, *_describe_parameters(own)])


def _describe_parameters(parameters: Mapping[str, Parameter]) -> Iterator[str]:
    width = max(map(len, parameters), default=0)
    for name, parameter in parameters.items():
        default = "+".join(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        yield _wrap(f"{name:{width}}  {parameter.help} (default: {default})", indent=4, hang=width + 6)


def _wrap(text: str, indent: int = 2, hang: int | None = None) -> str:
    rest = indent if hang is None else hang
    return textwrap.fill(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * rest)
