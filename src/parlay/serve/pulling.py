"""Downloads models on request, if the server's owner allows it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from parlay.models.fetch.bringing import bring
from parlay.models.fetch.pulled import Progress
from parlay.serve.errors import ApiError
from parlay.serve.hosted import Loader
from parlay.serve.registry import Registry
from parlay.types import ParlayError

logger = logging.getLogger(__name__)


class Puller:
    """Brings what `parlay pull` can, one model at a time, and serves it from then on. Lives in one event loop."""

    def __init__(self, registry: Registry, loader_of: Callable[[str], Loader]) -> None:
        self._registry = registry
        self._loader_of = loader_of
        self._turn = asyncio.Lock()

    async def pull(self, name: str, progress: Progress) -> None:
        """``progress`` is called in a thread. Raises ApiError for a model that can't be brought."""
        async with self._turn:
            try:
                await asyncio.to_thread(bring, name, progress)
            except (ParlayError, ValueError) as error:
                logger.warning("%s was not pulled: %s", name, error)
                raise ApiError(400, f"{name[:100]} can't be pulled; the server's log says why", "model") from None
        self._registry.add(name, self._loader_of(name))
