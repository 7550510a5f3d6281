"""Which strategies a request may name: those of the catalogue, as long as none of their parameters opens anything."""

from __future__ import annotations

from parlay.drafters import catalogue, plugins
from parlay.drafters.catalogue import Parameter, StrategySpec
from parlay.serve.errors import ApiError
from parlay.types import ParlayError

_OPENERS = frozenset({"file", "model", "models", "static", "store"})
"""Parameters that name a file or a model."""


def check_strategy(text: str) -> None:
    """Raises ApiError for a strategy that does not exist, that would import code, or that would open a file or model.

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
    for key, _ in spec.parameters:
        if key in _OPENERS or _is_free(parameters[key]):
            raise _refused(f"strategy {spec.name}: {key} is set by the server's owner, not by a request: leave it out")
    for member in catalogue.members(spec):
        _check(member)


def _is_free(parameter: Parameter) -> bool:
    """Whether it takes any text."""
    return parameter.type is str and not parameter.choices


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "strategy", "invalid_strategy")
