"""The loop: schedule, draft, verify, accept, commit. Speaks token ids only, and knows no concrete model or drafter."""

from parlay.engine.engine import Engine
from parlay.engine.scheduler import Limits

__all__ = ["Engine", "Limits"]
