"""Keeps one failure from ending others: a call for many members that raises is made again for each alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

Member = TypeVar("Member")

logger = logging.getLogger(__name__)


def isolated(
    call: Callable[[list[Member]], None],
    members: list[Member],
    failed: Callable[[Member, Exception], None],
    *,
    again: bool = True,
) -> None:
    """Make the call for all members together. If it raises, make it for each member alone.

    ``failed`` is called with each member that raises when it is alone. With ``again=False``, for calls that can't be
    repeated, there is one call only: if it raises, all members have failed.
    """
    try:
        call(members)
    except Exception as error:
        if len(members) == 1 or not again:
            for member in members:
                failed(member, error)
            return
        logger.warning("a call for %d requests failed (%s): each is tried alone", len(members), named(error))
        for member in members:
            isolated(call, [member], failed)


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
