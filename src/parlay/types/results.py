"""The engine's events, and counts of samples and of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    """How a router used one drafter in one sample.

    ``asked``: steps in which the drafter was asked. ``verified``: steps in which its draft was verified; of these,
    ``trials`` were verified although no gain was expected. ``expected``: tokens that its verified drafts were expected
    to bring; ``accepted``: tokens that they brought. ``seconds``: time that its proposals took; ``expected_seconds``:
    time that they were expected to take.
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
    """Several consecutive steps of a sample: the tokens that they committed, and the tokens expected.

    ``choices`` counts steps by the drafter whose draft was verified, or by the reason why none was.
    """

    steps: int
    tokens: int
    expected: float
    choices: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouterRecord:
    """A router's choices in one sample: by drafter, by reason (number of steps), and over time (``life``).

    ``kind``: the kind of task that the prompt seemed to ask for; empty if unknown. ``power``: the machine's assumed
    power and its source, if the goal or a limit needs it.
    """

    drafters: tuple[Routed, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)
    kind: str = ""
    life: tuple[Stretch, ...] = ()
    power: str = ""

    def as_data(self, *, whole: bool) -> dict[str, object]:
        """The record as plain data, numbers to four digits; ``life``, perhaps an entry per token, only if ``whole``."""
        data = asdict(self if whole else replace(self, life=()), dict_factory=_to_four_digits)
        return data if whole else {name: value for name, value in data.items() if name != "life"}


def _to_four_digits(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in fields}


def tokens_per_step(tokens: int, steps: int) -> float:
    """Committed tokens per forward that decoded; 0 if there were none. Plain decoding has 1."""
    return tokens / steps if steps else 0.0


@dataclass(frozen=True, slots=True, repr=False)
class Metrics:
    """Counts of one sample. Seconds are wall time of the steps that it took part in.

    ``steps``: target forwards that decoded. An early prefill chunk is not a step; a forward of a canvas is one even if
    it commits nothing. ``rows``: rows of these forwards, for text, drafts and masks. Prefill lasts until the first step
    is done, which committed ``first_step_tokens``. ``completion_tokens``: tokens that this engine committed; a resumed
    request's earlier ones are not included. ``accepted_by_depth[d]``: accepted nodes at depth d + 1;
    ``drafted_by_depth``: nodes proposed there. ``draft_tokens``: nodes that the target verified, without probes.
    ``outcomes`` counts steps by (nodes proposed, nodes accepted); steps without a draft are (0, 0). ``drafter_faults``:
    drafters that raised and were dropped. ``layer_rows``: rows that drafters ran through the target's own layers;
    ``layer_seconds``: the part of ``draft_seconds`` that this took. ``escaped_at``: the output length at which a lossy
    text changed to the exact rule. ``router``: only for strategies that choose among drafters. ``lost_members``: models
    of an ensemble that failed or were late and were left out, which makes the text lossy.
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
        """Show the numbers that are read most; all are attributes."""
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
        """Decode rate: tokens after the first step, per second after prefill."""
        decode_seconds = self.seconds - self.prefill_seconds
        decoded = self.completion_tokens - self.first_step_tokens
        return decoded / decode_seconds if decoded and decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts of an engine, now and since it was made. Each sample counts as one request.

    ``cache_tokens_used`` of ``cache_tokens_total``: tokens that running samples hold in the target's cache; finished
    texts that could be reused count as free. ``prefix_tokens_asked``: prompt tokens of admitted samples, without those
    that must be computed anyway for prompt logprobs. ``prefix_tokens_found``: those of them that an earlier text or a
    sample of the same prompt had cached. ``drafter_faults``: drafters that raised and were dropped for their sample.
    ``step_tokens``: prompt tokens that steps computed, plus tokens that they committed; ``steps`` counts steps by that
    number, rounded up to a power of two. ``step_seconds``, ``step_rows``, ``committed_tokens``: totals over all steps.
    ``cache_bytes``: bytes of caches and drafters' states, finished texts included; an `Engine` alone does not know
    them.
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
    """The place in a datastore that contributes most to a token's probability: document and token number, from 0.

    ``share``: the part of the token's probability, from 0 to 1, that the datastore gave; the model gave the rest.
    """

    document: str
    position: int
    share: float


class Committed(NamedTuple):
    """A token that joined a sequence, and its source: a drafter's name, or `TARGET`.

    ``writer``: who chose the token, as in `CommittedTokens`; empty if there are no writers.
    """

    token: int
    source: str
    logprobs: TokenLogprobs | None = None
    writer: str = ""


@dataclass(frozen=True, slots=True)
class CommittedTokens(Sequence[Committed]):
    """The tokens that joined a sequence in one step, stored in columns; a `Committed` is made on access.

    ``sources``: who proposed each token. ``writers``: who chose it: a model of an ensemble, a drafter whose tokens a
    lossy rule took, or `TARGET`; empty if the target chose all. ``logprobs``: one per token, or none if the request
    wants none. ``origins``: one per token if the target mixes in a datastore's distribution, else none.
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
