"""Strategies and accept rules from the catalogue, with what was measured of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from parlay.options import Option, options_of
from parlay.strategies.accept_rules import RULES
from parlay.strategies.catalogue import catalogue
from parlay.strategies.entry import StrategyEntry
from reference.markdown import code, table
from reference.measured import of_strategy

FAMILIES: Mapping[str, tuple[str, str]] = {
    "plain": ("Plain decoding", ""),
    "copy": ("Copying", "copies"),
    "store": ("Stores", "copies"),
    "retrieval": ("Retrieval", "copies"),
    "fixed point": ("Fixed point", "fixed-points"),
    "self": ("The target's own layers", "the-targets-own-layers"),
    "model": ("Draft models", "draft-models"),
    "combined": ("Combined drafters", "combined-drafters"),
    "cascade": ("Cascades", "combined-drafters"),
    "heads": ("Trained heads", "trained-heads"),
    "diffusion": ("Diffusion models", ""),
}
"""Title of a family, and where the page on drafting explains it."""


def index() -> str:
    """One line for each strategy, by family."""
    rows = [
        (f"[`{each.name}`](#{each.name})", FAMILIES[each.family][0].lower(), each.when or each.summary)
        for each in catalogue().values()
    ]
    return table(["strategy", "family", "use it if"], rows)


def strategies() -> str:
    """A section for each strategy, by family."""
    parts = []
    for family, members in groupby(catalogue().values(), key=lambda entry: entry.family):
        title, place = FAMILIES.get(family, (family.capitalize(), ""))
        parts.append(f"## {title}\n")
        parts += [f"[How they draft](../explanation/drafting.md#{place}).\n"] if place else []
        parts += ["[How to choose a selector](../how-to/diffusion.md#choose-a-selector).\n"] * (family == "diffusion")
        parts += [part for entry in members for part in _section(entry)]
    return "\n".join(parts)


def _section(entry: StrategyEntry) -> Iterator[str]:
    yield f"### {entry.name} {{#{entry.name}}}\n\n{entry.summary}\n"
    facts = [("use it if", entry.when), ("needs", entry.needs), ("training", entry.training)]
    facts += [("exactness", code(entry.exactness)), ("source", entry.reference)]
    facts += [("decoding speed over plain, SmolLM2", of_strategy(entry.name))]
    yield "\n".join(f"- **{name}:** {text}" for name, text in facts if text) + "\n"
    own = {name: each for name, each in entry.parameters.items() if "." not in name}
    if own:
        yield '??? note "Parameters"\n\n' + "".join(f"    {line}\n" for line in _parameters(own).splitlines())


def _parameters(options: Mapping[str, Option]) -> str:
    rows = [(code(name), _default(each), _help(each)) for name, each in options.items()]
    return table(["parameter", "default", "meaning"], rows)


def _default(option: Option) -> str:
    if option.required:
        return "required"
    value = option.default
    text = "+".join(value) if isinstance(value, tuple) else str(value)
    return code(text.lower() if isinstance(value, bool) else text)


def _help(option: Option) -> str:
    named = all(each in option.help for each in option.choices)
    choices = "" if named else f": {', '.join(code(each) for each in option.choices)}"
    bounds = [f"at least {option.low:,}"] if option.low is not None else []
    bounds += [f"at most {option.high:,}"] if option.high is not None else []
    return option.help + choices + (f" ({', '.join(bounds)})" if bounds else "")


def accept_rules() -> str:
    """A section for each rule."""
    parts = []
    for rule in RULES.values():
        parts.append(f"## {rule.name} {{#{rule.name}}}\n\n{rule.summary}\n")
        facts = [("exactness", code(rule.exactness)), ("drafts", code(rule.kind)), ("source", rule.reference)]
        parts.append("\n".join(f"- **{name}:** {text}" for name, text in facts if text) + "\n")
        own = _rule_options(rule.name)
        if own:
            parts.append(_parameters(own))
    return "\n".join(parts)


def _rule_options(name: str) -> dict[str, Option]:
    return {f"{name}.{key}": each for key, each in options_of(RULES[name].options).items()}
