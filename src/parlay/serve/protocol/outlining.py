"""Outlines: the field of the body, and the part of the reply."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from typing_extensions import TypedDict

from parlay.llm.outlining import OutlineParams
from parlay.serve.errors import ApiError
from parlay.serve.protocol.body import INT_LIMIT, Body
from parlay.serve.protocol.json_values import WHOLE
from parlay.serve.settings import Settings
from parlay.types import FieldError

Number = Annotated[int, Field(ge=1, le=INT_LIMIT), WHOLE]


class Outline(Body):
    """How an answer is planned: the most sections, the most tokens of the outline, and whether the model is first asked
    if its points can be written independently."""

    closed: ClassVar[bool] = True

    points: Annotated[int, WHOLE] | None = None
    outline_tokens: Number | None = None
    route: bool | None = None


class OutlineReply(TypedDict):
    """The headings of the sections; empty if the answer was written without an outline. ``note`` says why, or what was
    cut."""

    points: list[str]
    note: str


def outline_params(outline: Outline, settings: Settings) -> OutlineParams:
    """The outline's parameters. Raises ApiError for impossible ones, and for more sections or tokens than the server
    allows."""
    given = outline.model_dump(include=set(Outline.model_fields), exclude_none=True)
    given.setdefault("points", max(2, min(OutlineParams().points, settings.max_n)))
    try:
        params = OutlineParams(**given)
    except FieldError as error:
        raise ApiError(400, error.named("outline.{}".format), f"outline.{error.fields[0]}") from None
    if params.points > settings.max_n:
        message = f"outline.points is {params.points}, and this server allows at most {settings.max_n}"
        raise ApiError(400, message, "outline.points")
    most = settings.max_tokens
    if most is not None and params.outline_tokens > most:
        message = f"outline.outline_tokens must be at most {most} on this server, got {params.outline_tokens}"
        raise ApiError(400, message, "outline.outline_tokens")
    return params
