"""Which strategies a request may name: those of the catalogue, as long as none of their parameters opens anything, or
keeps more for later requests than the owner of the server has in mind."""

from __future__ import annotations

from parlay.drafters import catalogue, plugins
from parlay.drafters.catalogue import Parameter, StrategySpec
from parlay.drafters.parameters import Value
from parlay.serve.errors import ApiError
from parlay.types import ParlayError

_OPENERS = frozenset({"file", "model", "models", "static", "store"})
"""Parameters that name a file or a model."""
_KEPT = frozenset({"max_tokens", "remember", "tenants"})
"""Parameters that say how much is kept for later requests: less than by default may be asked for, and no more."""


def check_strategy(text: str) -> None:
    """Raises ApiError for a strategy that does not exist, would import code, open a file or model, or keep too much.

    Such strategies are for whoever starts the server.
    """
    name, colon, rest = text.partition(":")
    if ":" in rest or (colon and name.strip() not in {*catalogue.catalogue(), *plugins.installed()}):
        raise _refused(f"{name.strip()[:100]!r} is no strategy of the catalogue, and a request may name no other")
    try:
        spec = catalogue.parse(text)
    except ParlayError as error:
        raise _refused(str(error)) from None
    _check(spec)


def _check(spec: StrategySpec) -> None:
    parameters = catalogue.find(spec.name).parameters
    for key, value in spec.parameters:
        if key in _OPENERS or _is_free(parameters[key]):
            raise _refused(f"strategy {spec.name}: {key} is set by the server's owner, not by a request: leave it out")
        if key in _KEPT and _is_above(value, parameters[key].default):
            most = parameters[key].default
            raise _refused(f"strategy {spec.name}: {key} is {value}, and a request may ask for {most} at most")
    for member in catalogue.members(spec):
        _check(member)


def _is_free(parameter: Parameter) -> bool:
    """Whether it takes any text."""
    return parameter.type is str and not parameter.choices


def _is_above(value: Value, most: Value) -> bool:
    return isinstance(value, int) and isinstance(most, int) and value > most


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "strategy", "invalid_strategy")
