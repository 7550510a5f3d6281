"""Votes between several chains of thought: the field of the body, and the part of the reply."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from typing_extensions import TypedDict

from parlay.llm.voting import Ended, VoteOutput, VoteParams
from parlay.serve.errors import ApiError
from parlay.serve.protocol.body import INT_LIMIT, Body, conflict
from parlay.serve.protocol.json_values import WHOLE
from parlay.serve.settings import Settings
from parlay.types import FieldError

Chains = Annotated[int, Field(ge=1, le=INT_LIMIT), WHOLE]


class Vote(Body):
    """How many chains of thought vote, how the answer is found in each, and when the others are stopped."""

    closed: ClassVar[bool] = True

    n: Annotated[int, Field(ge=2, le=INT_LIMIT), WHOLE] | None = None
    answer: str | None = None
    by: Literal["votes", "score"] | None = None
    early: bool | None = None
    confidence: float | None = None
    at_once: Chains | None = None
    refill: bool | None = None


def vote_params(vote: Vote | None, settings: Settings) -> VoteParams | None:
    """The vote's parameters. Raises ApiError for impossible ones, and for more chains than the server allows."""
    if vote is None:
        return None
    try:
        params = VoteParams(**vote.model_dump(include=set(Vote.model_fields), exclude_none=True))
    except FieldError as error:
        raise ApiError(400, str(error), error.fields[0]) from None
    if params.n > settings.max_n:
        raise ApiError(400, f"vote.n must be at most {settings.max_n} on this server, got {params.n}", "vote.n")
    return params


def check_vote(vote: Vote | None, n: int | None) -> None:
    """Raises ApiError for a vote together with several choices."""
    if vote is not None and (n or 1) > 1:
        raise conflict("vote gives one choice: remove n, and set vote.n, the number of chains", "n")


class VoteReply(TypedDict):
    """The outcome of a vote; ``answer`` is null if no chain has one. ``chain`` is the one whose text is returned;
    ``votes`` are the answers with their votes, most first; ``answers`` are those of the chains, and ``stopped`` the
    chains that were stopped."""

    answer: str | None
    chain: int
    votes: dict[str, int]
    agreement: float
    answers: list[str | None]
    stopped: list[int]
    ended: Ended


def vote_reply(vote: VoteOutput) -> VoteReply:
    """The outcome as JSON."""
    return {
        "answer": vote.answer,
        "chain": vote.index,
        "votes": dict(vote.votes),
        "agreement": vote.agreement,
        "answers": list(vote.answers),
        "stopped": list(vote.stopped),
        "ended": vote.ended,
    }
