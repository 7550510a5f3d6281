"""Which strategies a request may name: those of the catalogue, as long as none of their parameters opens anything, or
keeps more for later requests than the owner of the server has in mind."""

from __future__ import annotations

from parlay.certificates.requirement import Allowed
from parlay.certificates.requirement import parse as allowed_by
from parlay.options import Option, UsageError, Value
from parlay.serve.errors import ApiError
from parlay.strategies import plugins
from parlay.strategies.catalogue import catalogue, find
from parlay.strategies.spelling import StrategySpec, parse
from parlay.types import ParlayError


def read_strategy(text: str) -> StrategySpec:
    """The strategy that a request names.

    Raises ApiError for one that does not exist, would import code, open a file or model, or keep too much for later
    requests. Such strategies are for whoever starts the server.
    """
    name, colon, rest = text.partition(":")
    if ":" in rest or (colon and name.strip() not in {*catalogue(), *plugins.installed()}):  # nothing is imported
        raise _refused(f"{name.strip()[:100]!r} is no strategy of the catalogue, and a request may name no other")
    try:
        spec = parse(text)
    except ParlayError as error:
        raise _refused(str(error)) from None
    _check(spec)
    return spec


def read_exactness(text: str) -> Allowed:
    """What a request allows. Raises ApiError for what says nothing."""
    try:
        return allowed_by(text)
    except UsageError as error:
        raise ApiError(400, str(error), "exactness", "invalid_exactness") from None


def _check(spec: StrategySpec) -> None:
    options = find(spec.name).parameters
    for key, value in spec.parameters:
        if options[key].opens or _is_free(options[key]):
            raise _refused(f"strategy {spec.name}: {key} is set by the server's owner, not by a request: leave it out")
        if options[key].keeps and _is_above(value, options[key].default):
            most = options[key].default
            raise _refused(f"strategy {spec.name}: {key} is {value}, and a request may ask for {most} at most")
    for member in spec.members:
        _check(member)


def _is_free(option: Option) -> bool:
    """Whether it takes any text."""
    return option.type is str and not option.choices


def _is_above(value: Value, most: Value) -> bool:
    return isinstance(value, int) and isinstance(most, int) and value > most


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "strategy", "invalid_strategy")
