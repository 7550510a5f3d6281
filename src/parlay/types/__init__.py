"""Plain data and protocols that every part of Parlay shares. Imports nothing of ours, and torch for
type checkers only, so that a usage error on the command line is instant.

Words (one per idea): a *drafter* proposes a *draft*, a tree of *nodes* below the *root*, which is the last committed
token. The *target* verifies it in one forward; a *rule* picks the *path*; the tokens of the path and one more are
*committed*. *Pending* tokens are committed, but their keys and values are not cached yet; the root is the last of them.
"""

from __future__ import annotations

from parlay.types.base import (
    DraftKind,
    Exactness,
    FinishReason,
    LogitsProcessor,
    MachineBusy,
    NoiseKey,
    OutOfRoom,
    ParlayError,
    show_number,
)
from parlay.types.canvas import ONE_CANVAS, Canvas, CanvasLayout, Decided, Fill, Guesses, Selector
from parlay.types.drafts import NO_DRAFT, NO_TREE, Draft, Fault, Features, Join, Prefix, Tree, Verdict
from parlay.types.params import SamplingParams, StructuredOutputsParams
from parlay.types.requests import Constraint, Layers, Request, SequenceView, StopChecker
from parlay.types.results import (
    NOTHING_COMMITTED,
    TARGET,
    Committed,
    CommittedTokens,
    EngineStats,
    Event,
    Metrics,
    Routed,
    RouterRecord,
    Stretch,
    TokenLogprobs,
    tokens_per_step,
)
from parlay.types.runners import NO_SKIP, CanvasSpec, Output, Runner, RunnerSpec, Segment, Skip, Sublayer
from parlay.types.strategy import (
    NO_COST,
    NOTHING_NEEDED,
    NOTHING_SPENT,
    AcceptRule,
    Budgets,
    Cost,
    Drafter,
    Escape,
    KeptCost,
    Needs,
    Observation,
    Policy,
    PowerModel,
    Spent,
    Strategy,
)
from parlay.types.tokenizer import Tokenizer

__all__ = [
    "NOTHING_COMMITTED",
    "NOTHING_NEEDED",
    "NOTHING_SPENT",
    "NO_COST",
    "NO_DRAFT",
    "NO_SKIP",
    "NO_TREE",
    "ONE_CANVAS",
    "TARGET",
    "AcceptRule",
    "Budgets",
    "Canvas",
    "CanvasLayout",
    "CanvasSpec",
    "Committed",
    "CommittedTokens",
    "Constraint",
    "Cost",
    "Decided",
    "Draft",
    "DraftKind",
    "Drafter",
    "EngineStats",
    "Escape",
    "Event",
    "Exactness",
    "Fault",
    "Features",
    "Fill",
    "FinishReason",
    "Guesses",
    "Join",
    "KeptCost",
    "Layers",
    "LogitsProcessor",
    "MachineBusy",
    "Metrics",
    "Needs",
    "NoiseKey",
    "Observation",
    "OutOfRoom",
    "Output",
    "ParlayError",
    "Policy",
    "PowerModel",
    "Prefix",
    "Request",
    "Routed",
    "RouterRecord",
    "Runner",
    "RunnerSpec",
    "SamplingParams",
    "Segment",
    "Selector",
    "SequenceView",
    "Skip",
    "Spent",
    "StopChecker",
    "Strategy",
    "Stretch",
    "StructuredOutputsParams",
    "Sublayer",
    "TokenLogprobs",
    "Tokenizer",
    "Tree",
    "Verdict",
    "show_number",
    "tokens_per_step",
]
