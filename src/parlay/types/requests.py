"""Requests, each for one sample, and the views of them that drafters and rules get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from parlay.types.base import NoiseKey
from parlay.types.model_forms import WHOLE_FORM, DraftForm
from parlay.types.params import SamplingParams
from parlay.types.runners import Adapter

if TYPE_CHECKING:
    from torch import Tensor


class StopChecker(Protocol):
    """Looks for stop strings in the committed tokens of one sample.

    The engine's caller makes it, because it knows the text.
    """

    def push(self, token: int) -> bool:
        """Take one committed token. True if it completes a stop string."""
        ...


class Constraint(Protocol):
    """Tells which ids may follow in the text of one sample. The engine's caller makes it, because it knows the text.

    Its state belongs to the committed output, and only `commit` changes it. The other methods depend only on that state
    and on their arguments.
    """

    @property
    def committed(self) -> int:
        """How many output tokens it has been given."""
        ...

    def allowed(self, start: int, path: Sequence[int]) -> Tensor | None:
        """Bool ``[V]``: the tokens that may follow ``path`` after the first ``start`` committed tokens.

        None if the path itself is not allowed, or is complete, so that nothing may follow. Raises ParlayError if the
        constraint can't tell.
        """
        ...

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first, may follow the committed ones."""
        ...

    def forced(self, limit: int) -> tuple[int, ...]:
        """The tokens, up to ``limit``, that must come next because each is the only one allowed."""
        ...

    def commit(self, token: int) -> bool:
        """Take one committed token. True if nothing may follow it. Raises ParlayError if it isn't allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance: moves log-probabilities away from those after the ``negative`` prompt.

    log p = log n + scale (log c - log n) for each next token, where c is the distribution after the request's own
    prompt and n the one after the negative prompt, both with the output so far. A scale of 1 changes nothing.
    """

    negative: tuple[int, ...]
    scale: float


KINDS = ("extraction", "edit", "code", "maths", "list", "translation", "dialogue", "prose")
"""Kinds of tasks that a prompt may ask for, as `parlay.text.prompt_kind` finds out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample to decode: token ids in, token ids out.

    ``references``: token texts worth copying from. ``predicts``: the first of them is a prediction of the output.
    ``salt`` names the tenant: cached prefixes, and what stores learn, are shared only with requests of the same salt.
    ``store=False``: no store may learn from this request. ``written``: output tokens that another engine committed;
    this one continues after them, and all limits on output count them.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    key: NoiseKey
    written: tuple[int, ...] = ()
    source: int = 0
    """How many tokens at the start of the prompt are a source, as in translation: the text does not continue them, and
    penalties ignore them."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sample, with `ignore_eos` already applied. They are masked until ``min_tokens`` are committed.
    """
    stop_checker: StopChecker | None = None
    constraint: Constraint | None = None
    references: tuple[tuple[int, ...], ...] = ()
    predicts: bool = False
    salt: str = ""
    owner: str = ""
    """Who sent the request. Owners share the engine evenly, whatever they send."""
    store: bool = True
    group: str = ""
    """The same for all samples of one prompt, so that they can share its cache."""
    priority: int = 0
    """Lower is more urgent."""
    adapter: Adapter | None = None
    """The adapter that changes the target's products. The salt then keeps its cached prefixes apart."""
    guidance: Guidance | None = None
    """Classifier-free guidance away from a negative prompt; None: no guidance."""
    reuse: int = 0
    """Runs of at least this many tokens may be moved from other cached texts, which is lossy; 0: none."""
    kind: str = ""
    """The kind of task (see `KINDS`), if known. The same drafters are expected to pay for requests of one kind."""

    @property
    def copies(self) -> int:
        """How many rows each output token takes: two if guided, because it also runs after the negative prompt."""
        return 1 if self.guidance is None else 2

    def rows_of(self, cached: int, tokens: int) -> int:
        """How many rows ``tokens`` tokens after the ``cached`` ones take, at most.

        In a guided request, each prompt token takes a second row until the negative prompt is read; after that only the
        last one does.
        """
        if self.guidance is None:
            return tokens
        return tokens + max(1, min(tokens, len(self.guidance.negative) - cached))

    def tokens_in(self, cached: int, rows: int) -> int:
        """How many tokens after the ``cached`` ones fit in ``rows`` rows: the inverse of `rows_of`, at least 1."""
        if self.guidance is None:
            return max(1, rows)
        return max(1, rows // 2, rows - max(1, len(self.guidance.negative) - cached))


class Layers(Protocol):
    """The target's own layers and cache, for drafters that ask for them.

    They can be used in `propose`, and are metered.
    """

    def forward(
        self,
        views: Sequence[SequenceView],
        paths: Sequence[Sequence[int]],
        form: DraftForm = WHOLE_FORM,
        rows: int = 1,
        inputs_KH: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[len(views) * rows, V]`` of the last ``rows`` rows of each view's tokens followed by its path.

        All sequences run in one forward. The uncached rows, and these last rows, run in ``form``; earlier rows were
        computed in full. A path may be as long as the view's budget. A path that continues the last call's costs only
        its new rows. If ``inputs_KH`` is given, the last K tokens of every path read it; K is at most ``rows``. No view
        may appear twice.
        """
        ...

    def early(self, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], layer: int, rows: int = 1) -> Tensor:
        """Hidden states ``[len(views) * rows, H]`` that enter ``layer``, for the rows that `forward` gives logits of.

        That layer, all later ones and the LM head do not run.
        """
        ...

    def states(
        self, views: Sequence[SequenceView], spans: Sequence[tuple[int, int]], taps: Sequence[int]
    ) -> list[Mapping[int, Tensor]]:
        """Hidden states ``[T, H]`` that enter each layer of ``taps``, for each view's cached tokens in its span.

        This is for a drafter that lacks some, as after a prefix hit. The states of pending tokens come with this step's
        observation. If a step can't run all these rows, fewer are computed; if there are none or the cache has no room,
        the mapping is empty. Ask again in the next proposal. All sequences run in one forward; no view may appear
        twice.
        """
        ...


class SequenceView(Protocol):
    """A sequence as drafters, policies and rules see it. ``tokens``: the prompt, then the output committed so far."""

    @property
    def sequence(self) -> int: ...
    @property
    def request(self) -> Request: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def layers(self) -> Layers | None:
        """None unless the drafter's needs name layers or taps."""
        ...


@dataclass(frozen=True, slots=True)
class FixedText:
    """A `SequenceView` whose tokens never change."""

    sequence: int
    request: Request
    tokens: Sequence[int]
    prompt_length: int
    layers: Layers | None = None
