"""The models of one server by name. What a request calls a model is looked up here, and used for nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parlay.aio import AsyncLLM
from parlay.serve.errors import ApiError

_SHOWN = 100  # characters of an unknown name that the error repeats


@dataclass(frozen=True, slots=True)
class Served:
    """A model under its name. ``created`` is when the server took it up, in Unix seconds, and ``max_model_len`` how
    many tokens of prompt and output it holds together.
    """

    name: str
    engine: AsyncLLM
    created: int
    max_model_len: int
    vocab_size: int


class Registry:
    """Raises ValueError where there is no model at all."""

    def __init__(self, served: Mapping[str, AsyncLLM]) -> None:
        if not served:
            raise ValueError("a server needs at least one model")
        now = int(time.time())
        self._models = {name: _describe(name, engine, now) for name, engine in served.items()}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._models.values())

    def get(self, name: str | None) -> Served:
        """The model of that name; None asks for the only one.

        Raises ApiError 404 for a name that is not there, and for none where there are several.
        """
        if name is None and len(self._models) > 1:
            message = f"there are several models here: name one of {', '.join(self._models)}"
            raise ApiError(404, message, "model", "model_not_found")
        if name is None:
            return next(iter(self))
        model = self._models.get(name)
        if model is None:
            shown = name if len(name) <= _SHOWN else name[:_SHOWN] + "..."
            known = ", ".join(self._models)
            raise ApiError(404, f"there is no model {shown!r} here, only {known}", "model", "model_not_found")
        return model

    async def close(self, drain_seconds: float) -> None:
        """Take no more requests; those under way have that long to finish. May be called again."""
        await asyncio.gather(*(model.engine.close(drain_seconds) for model in self))


def _describe(name: str, engine: AsyncLLM, now: int) -> Served:
    llm = engine.llm
    return Served(name, engine, now, llm.engine.max_context, llm.runner.spec.vocab_size)
