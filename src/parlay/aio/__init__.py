"""An LLM for asyncio: one engine thread decodes for any number of tasks, event loops and threads together."""

from parlay.aio.service import AsyncLLM
from parlay.aio.stream import Busy, Closed, JobStream, Lost

__all__ = ["AsyncLLM", "Busy", "Closed", "JobStream", "Lost"]
