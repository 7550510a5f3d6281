"""Counts of the engine, and the events that it reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple, overload

from parlay.types.base import Exactness, FinishReason

TARGET = "target"
"""The source of a token that no drafter proposed."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of a chosen token, its rank (1 = most likely), and the top alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Routed:
    """A router's use of one drafter in one sample.

    ``asked`` counts steps in which it was asked, ``verified`` those in which its draft was, ``trials`` those of them in
    which nothing was expected of it. ``expected`` are the tokens that its drafts were expected to bring when they were
    chosen, ``accepted`` those that they brought. ``seconds`` are what its proposals took (``expected_seconds``: what
    they were expected to).
    """

    drafter: str
    asked: int = 0
    verified: int = 0
    trials: int = 0
    expected: float = 0.0
    accepted: int = 0
    expected_seconds: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps of a sample that follow each other: the tokens that they committed, and those that were expected.

    ``choices`` counts the steps by the drafter whose draft was verified, or by the reason why none was.
    """

    steps: int
    tokens: int
    expected: float
    choices: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """A router's choices in one sample: by drafter, why (steps by reason), and when (``life``).

    ``kind`` is what the request was taken to ask for; empty where nothing told it. ``power`` says what the machine was
    taken to draw and how that is known, where joules or watts counted.
    """

    drafters: tuple[Routed, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)
    kind: str = ""
    life: tuple[Stretch, ...] = ()
    power: str = ""


def tokens_per_step(tokens: int, steps: int) -> float:
    """Divide committed tokens by the target's forwards that decoded; 0 without any. Plain decoding has 1."""
    return tokens / steps if steps else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Metrics:
    """Counts of one sample. Seconds are wall time of steps this sample took part in.

    ``steps`` are target forwards that decoded: an early prefill chunk is no step, and a forward of a canvas is one even
    if it commits nothing. ``rows`` are those of these forwards: one of the text, drafts, and masks. Prefill lasts until
    the first step is done, and ``first_step_tokens`` are the tokens that step committed. ``completion_tokens`` are
    those that this engine committed, without a resumed request's earlier ones. ``accepted_by_depth[d]`` counts accepted
    nodes at depth d + 1 and ``drafted_by_depth`` the nodes proposed there. ``draft_tokens`` counts nodes that the
    target verified, probes left out. ``outcomes`` counts steps by (nodes proposed, nodes accepted), steps without a
    draft as (0, 0). ``drafter_faults`` counts drafters that raised and were dropped. ``layer_rows`` are rows that
    drafting ran through the target's own layers, and ``layer_seconds`` the part of ``draft_seconds`` that this took.
    ``escaped_at``: after so many tokens of output a lossy text went on exactly. ``router`` is there for strategies that
    choose among drafters. ``lost_members`` are the models of an ensemble that failed or were late and were left out, so
    that the text is lossy.
    """

    strategy: str
    exactness: Exactness
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_step_tokens: int = 0
    steps: int = 0
    rows: int = 0
    draft_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    drafted_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_by_depth: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()
    outcomes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    drafter_faults: int = 0
    layer_rows: int = 0
    layer_seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0
    escaped_at: int | None = None
    router: RouterRecord | None = None
    lost_members: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The few numbers that are read most; all are attributes."""
        return (
            f"Metrics({self.completion_tokens} tokens in {self.steps} steps, "
            f"{self.tokens_per_step:.2f} tokens per step, "
            f"{self.accepted_tokens} of {self.draft_tokens} drafted tokens accepted, "
            f"{self.tokens_per_second:.0f} tokens/s)"
        )

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.overhead_seconds

    @property
    def tokens_per_step(self) -> float:
        return tokens_per_step(self.completion_tokens, self.steps)

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode rate: tokens after the first step, over the seconds after prefill."""
        decode_seconds = self.seconds - self.prefill_seconds
        decoded = self.completion_tokens - self.first_step_tokens
        return decoded / decode_seconds if decoded and decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of an engine, now and since it was made. Its samples are counted one by one.

    ``cache_tokens_used`` of ``cache_tokens_total`` are the tokens that running samples hold in the target's cache.
    Finished texts that could be reused count as free. ``prefix_tokens_asked`` are prompt tokens of samples that were
    admitted, less those that must all be computed (prompt logprobs), and ``prefix_tokens_found`` those of them that
    were cached already, by an earlier text or a sample of the same prompt. ``drafter_faults`` counts drafters that
    raised and were dropped for their sample. ``step_tokens`` are tokens of prompts that steps computed and tokens that
    they committed; ``steps`` counts the steps by that number, rounded up to a power of two. ``step_seconds`` is the
    time of all steps, ``step_rows`` the rows of their forwards, and ``committed_tokens`` the tokens they committed.
    ``cache_bytes`` are
    what caches and drafters' states hold, finished texts included; an `Engine` alone does not know them.
    """

    waiting: int
    running: int
    preemptions: int
    finished: Mapping[FinishReason, int]
    cache_tokens_used: int
    cache_tokens_total: int
    prefix_tokens_asked: int
    prefix_tokens_found: int
    drafter_faults: int
    step_tokens: int
    steps: Mapping[int, int]
    step_seconds: float = 0.0
    step_rows: int = 0
    committed_tokens: int = 0
    cache_bytes: int = 0


class Origin(NamedTuple):
    """The place of a datastore that speaks most for a token: a document's name, and the token's number there, from 0.

    ``share`` is the part of the token's probability that the datastore gave, from 0 to 1; the model gave the rest.
    """

    document: str
    position: int
    share: float


class Committed(NamedTuple):
    """A token that joined a sequence, and where it came from: a drafter's name, or `TARGET`.

    ``writer`` is whose choice it is, as in `CommittedTokens`; empty where there are no writers.
    """

    token: int
    source: str
    logprobs: TokenLogprobs | None = None
    writer: str = ""


@dataclass(frozen=True, slots=True)
class CommittedTokens(Sequence[Committed]):
    """The tokens that joined a sequence in one step, in columns: a `Committed` is made when one is looked at.

    ``logprobs`` are as many as tokens, or none where the request wants none. ``sources`` say what proposed a token, and
    ``writers`` whose choice it is: a model of an ensemble, a drafter whose tokens a lossy rule took, or `TARGET`. There
    are none where all are the target's own. ``origins`` are as many as tokens where the target mixes its law with a
    datastore's, else none.
    """

    tokens: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    writers: tuple[str, ...] = ()
    origins: tuple[Origin | None, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[Committed]:
        return map(Committed, self.tokens, self.sources, self.logprobs or repeat(None), self.writers or repeat(""))

    @overload
    def __getitem__(self, place: int) -> Committed: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Committed, ...]: ...
    def __getitem__(self, place: int | slice) -> Committed | tuple[Committed, ...]:
        return tuple(self)[place]


NOTHING_COMMITTED = CommittedTokens()


class Event(NamedTuple):
    """A step's result for one request. The last event of a request carries its reason, metrics and any error."""

    request: str
    committed: CommittedTokens = NOTHING_COMMITTED
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: Metrics | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
