"""Plain data and protocols that every part of Parlay shares. Imports nothing of ours.

Words (one per idea): a *drafter* proposes a *draft*, a tree of *nodes* below the *root*, which is the last committed
token. The *target* verifies it in one forward; a *rule* picks the *path*; the tokens of the path and one more are
*committed*. *Pending* tokens are committed, but their keys and values are not cached yet; the root is the last of them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

Law = Literal["point", "iid", "without_replacement"]
"""How the children of a node were chosen: fixed guesses, independent draws, or draws without replacement, in order."""

FinishReason = Literal["stop", "length", "abort", "error"]

LogitsProcessor = Callable[[list[int], Tensor], Tensor]
"""``(ids_of_prompt_output_and_path, logits_V) -> logits_V``; pure: it runs at every node that the walk visits."""


class Exactness(enum.StrEnum):
    """What equals plain decoding, strongest first: each logit, each token for the same seed, the law, or nothing."""

    BITS = "bits"
    SEED = "seed"
    DISTRIBUTION = "distribution"
    LOSSY = "lossy"

    @staticmethod
    def weakest(*levels: Exactness) -> Exactness:
        order = list(Exactness)
        return max(levels, key=order.index)


class ParlayError(Exception):
    """A failure that a user can act on: its message is one line that says what to do."""


class OutOfRoom(ParlayError):
    """A runner's cache can never hold what was asked of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Field names and defaults are vLLM's.

    ``seed=None`` draws one seed per request and reports it. ``top_k`` 0 or -1 keeps the whole vocabulary.
    ``temperature=0`` is greedy. Raises ValueError for a value out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"

    def __post_init__(self) -> None:
        _check_range("n", self.n, 1)
        _check_range("temperature", self.temperature, 0)
        _check_range("top_k", self.top_k, -1)
        _check_range("min_p", self.min_p, 0, 1)
        _check_range("presence_penalty", self.presence_penalty, -2, 2)
        _check_range("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_range("max_tokens", self.max_tokens, 0)
        _check_range("min_tokens", self.min_tokens, 0)
        _check_range("logprobs", self.logprobs, 0)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0)
        if not 0 < self.top_p <= 1 or not 0 < self.typical_p <= 1:
            raise ValueError(f"top_p and typical_p must be in (0, 1], got {self.top_p:g} and {self.typical_p:g}")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty:g}")
        if "" in self.stops:
            raise ValueError("stop holds an empty string, which would stop before the first token")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whatever shape they were given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def _check_range(name: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Raises ValueError for a number outside [low, high], NaN and infinity included; None passes."""
    if value is None or (low <= value <= high and math.isfinite(value)):
        return
    limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
    raise ValueError(f"{name} must be {limit}, got {value:g}")


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Which stream of the shared noise a sequence draws from: token = f(logits, key, absolute position)."""

    seed: int
    sample_index: int = 0


# ---------------------------------------------------------------------------------------------------------- drafts


@dataclass(frozen=True, slots=True)
class Tree:
    """Proposed tokens below the root: ``parents[i] < i`` is the index of a node, or -1 for a child of the root.

    Node i sees the committed text, its ancestors and itself; its position is that of the root plus its depth.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree and what rules and policies must know of its nodes.

    ``sources`` names, per node, the drafter that proposed it. ``scores`` are the drafter's own estimates of each
    node's conditional acceptance, in [0, 1]; empty when it has none. ``probs`` ``[n, V]`` is the law each node was
    drawn from; rules that accept fixed guesses (``point``) need none. The last ``probes`` nodes are computed for the
    drafter's sake and can never be accepted; no other node descends from one.
    """

    tree: Tree = Tree()
    law: Law = "point"
    sources: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    probs: Tensor | None = None
    probes: int = 0

    def __len__(self) -> int:
        return len(self.tree)


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule decided for one sequence: the accepted nodes, root side first, and one more token after them.

    ``sampled`` gives, per row of the walk (root, then each accepted node), the token chosen there; its last entry is
    the correction or bonus, so ``len(sampled) == len(path) + 1``.
    """

    path: tuple[int, ...]
    sampled: tuple[int, ...]


# ---------------------------------------------------------------------------------------------------------- runners


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner is and can do, as data. ``exactness`` is the level its shared-noise verification reaches."""

    name: str
    vocab_size: int
    max_context: int
    tree: Literal["tree", "chain", "none"]
    exactness: Exactness
    hidden_size: int
    num_layers: int
    device: str
    dtype: str
    kernels: str
    """One line: which kernels run and why."""
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """What one sequence feeds into one forward: its pending tokens, then a tree below the last of them.

    Rows are numbered pending first, then tree nodes. Logits are computed for the rows from ``logits_from`` on, so an
    early prefill chunk says ``len(pending)``, plain decoding ``len(pending) - 1``, prompt logprobs 0.
    """

    sequence: int
    pending: tuple[int, ...]
    tree: Tree = Tree()
    logits_from: int = 0

    @property
    def rows(self) -> int:
        return len(self.pending) + len(self.tree)


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a forward over segments.

    ``logits_RV`` holds the wanted rows of all segments in order; those of segment i are
    ``logits_RV[starts[i]:starts[i + 1]]``. ``taps[layer]`` ``[N, H]`` is the hidden state that enters that layer
    (``num_layers``: the final hidden state, which the LM head reads), for every row of every segment.
    """

    logits_RV: Tensor
    starts: tuple[int, ...]
    taps: Mapping[int, Tensor] = field(default_factory=dict)


class Runner(Protocol):
    """A model with its cache. Draft models, cascade levels and targets are all runners."""

    @property
    def spec(self) -> RunnerSpec: ...

    def open(self, sequence: int, tokens: Sequence[int], salt: str = "") -> int:
        """Begin a sequence and return how many of ``tokens`` are cached already (fewer than all of them).

        ``salt`` scopes prefix reuse. The name must be free.
        """
        ...

    def reserve(self, sequence: int, tokens: int) -> bool:
        """Make room for the sequence to hold ``tokens`` in all, scratch included; False when it can't be had now.

        Raises OutOfRoom when even an empty cache could not hold so many.
        """
        ...

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Output:
        """Run the rows of all segments. Changes no committed state: `keep` does. No sequence appears twice."""
        ...

    def keep(self, sequence: int, path: Sequence[int]) -> int:
        """Cache the last forward's pending rows and the nodes of ``path``, drop its other rows.

        Returns how many tokens are cached now; a runner that had to cut its state back may return less than
        expected, and the engine then feeds the rest again as pending.
        """
        ...

    def truncate(self, sequence: int, length: int) -> int:
        """Forget cached tokens from ``length`` on; returns how many are cached now (never more than ``length``)."""
        ...

    def fork(self, sequence: int, copy: int) -> None:
        """Begin ``copy`` with the cached tokens of ``sequence``."""
        ...

    def release(self, sequence: int) -> None:
        """End a sequence; its cached prefix may stay reusable. Unknown names are ignored."""
        ...

    def room(self) -> int:
        """How many more tokens could be reserved now."""
        ...

    def check(self) -> None:
        """Prove the cache's own invariants; AssertionError names the broken one."""
        ...


# --------------------------------------------------------------------------------------------------------- requests


class StopChecker(Protocol):
    """Watches the committed tokens of one sample for stop strings. Made at the edge, where text is known."""

    def push(self, token: int) -> bool:
        """Take one committed token; True when a stop string is complete."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample to decode: ids in, ids out. ``references`` are token texts worth copying from."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    key: NoiseKey
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sample, `ignore_eos` already applied. Masked until ``min_tokens`` are out."""
    stop_checker: StopChecker | None = None
    references: tuple[tuple[int, ...], ...] = ()
    salt: str = ""
    group: str = ""
    """Samples of one prompt carry one name here: they may share its cache."""
    priority: int = 0
    """Lower is more urgent."""


class View(Protocol):
    """A drafter's read-only sight of a sequence. ``tokens`` is live: prompt, then committed output."""

    @property
    def sequence(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_length(self) -> int: ...


# --------------------------------------------------------------------------------------------------------- strategy


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter asks of the engine: layers to tap, and whether it wants to see the tokens of rejected rows."""

    taps: tuple[int, ...] = ()
    rejected: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """What a drafter is told after a step of one of its sequences, when the tokens are already committed.

    ``taps`` holds rows for the tokens that became cached by the step (pending, then the path) and ``argmax`` the
    target's top token per row of root and nodes; each only if the drafter's needs name it.
    """

    view: View
    draft: Draft
    verdict: Verdict
    taps: Mapping[int, Tensor] = field(default_factory=dict)
    argmax: tuple[int, ...] = ()


class Drafter(Protocol):
    """Proposes. Its state is a cache keyed by the tokens: `propose` compares what it holds with the sequence and
    truncates or catches up, so forks, preemption, skipped steps and failures need no further calls.
    """

    @property
    def needs(self) -> Needs: ...

    def propose(self, views: Sequence[View], budgets: Sequence[int]) -> list[Draft]:
        """One draft per view, of at most its budget of nodes; `NO_DRAFT` when there is nothing worth proposing."""
        ...

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from committed tokens (and from rejected rows, if asked for)."""
        ...

    def release(self, sequence: int) -> None:
        """The sequence is over: free what is held for it. Unknown names are ignored."""
        ...


class Rule(Protocol):
    """Accepts: a pure function from logits to verdicts. It refuses drafts whose law it can't handle."""

    @property
    def exactness(self) -> Exactness: ...

    @property
    def laws(self) -> frozenset[Law]: ...

    def accept(
        self, views: Sequence[View], drafts: Sequence[Draft], logits_RV: Tensor, roots: Sequence[int]
    ) -> list[Verdict | Fault]:
        """Row ``roots[i]`` of ``logits_RV`` is the root's of sequence i, and ``roots[i] + 1 + node`` that of a node.

        Rows outside these belong to nobody here. A fault stays with its sequence.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one sequence can't go on (NaN logits, a processor that raised); the others do."""

    reason: str


class Cost(Protocol):
    """What forwards cost, in seconds; measured, modelled, or both."""

    def forward(self, rows: int, context: int) -> float:
        """Seconds of one target forward of ``rows`` rows in all, over sequences of ``context`` tokens on average."""
        ...

    def record(self, rows: int, context: int, seconds: float) -> None:
        """Learn from a forward that was run."""
        ...


@dataclass(frozen=True, slots=True)
class Spent:
    """What one step cost a sequence: its proposal's share of drafting, and the forward that verified it."""

    draft_seconds: float
    verify_seconds: float
    rows: int
    context: int


class Policy(Protocol):
    """Sets budgets. One per strategy; its state per sequence is its own."""

    def plan(self, views: Sequence[View]) -> list[int]:
        """Nodes each sequence may draft now; 0 is always allowed and costs nothing."""
        ...

    def trim(self, views: Sequence[View], drafts: Sequence[Draft]) -> list[Draft]:
        """Cut drafts down to the nodes that pay."""
        ...

    def learn(self, view: View, draft: Draft, accepted: int, spent: Spent) -> None:
        """One step of one sequence is over."""
        ...

    def release(self, sequence: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """Drafter (or none), accept rule and budget policy under one name."""

    name: str
    drafter: Drafter | None
    rule: Rule
    policy: Policy


# ---------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probability of a chosen token, its rank (1 = most likely), and the top alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Metrics:
    """What the engine counted for one sample. Seconds are wall time of steps this sample took part in.

    ``steps`` are target forwards that committed; an early prefill chunk is no step. Prefill lasts until the first
    step is done, and ``first_step_tokens`` are the tokens that step committed. ``accepted_by_depth[d]`` counts
    accepted nodes at depth d + 1 and ``drafted_by_depth`` the nodes proposed there. ``draft_tokens`` counts nodes
    that the target verified, probes left out. ``drafter_faults`` counts drafters that raised and were dropped.
    """

    strategy: str
    exactness: Exactness
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_step_tokens: int = 0
    steps: int = 0
    draft_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    drafted_by_source: Mapping[str, int] = field(default_factory=dict)
    accepted_by_depth: tuple[int, ...] = ()
    drafted_by_depth: tuple[int, ...] = ()
    drafter_faults: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    overhead_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.overhead_seconds

    @property
    def tokens_per_step(self) -> float:
        return self.completion_tokens / self.steps if self.steps else 0.0

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
class Committed:
    """A token that joined a sequence, and where it came from: a drafter's name, or ``target``."""

    token: int
    source: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What one step did to one request. The last event of a request carries its reason, metrics and any error."""

    request: str
    committed: tuple[Committed, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: Metrics | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
