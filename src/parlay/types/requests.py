"""One sample to decode, and what drafters can see of it."""

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
    """Looks for stop strings in the committed tokens of one sample. Made by the engine's caller, who knows the text."""

    def push(self, token: int) -> bool:
        """Take one committed token; True when a stop string is complete."""
        ...


class Constraint(Protocol):
    """Which ids may follow which in the text of one sample. Made by the caller of the engine, who knows the text.

    Its state is that of the committed output, and only `commit` changes it. The other methods are functions of that
    state and of a path.
    """

    @property
    def committed(self) -> int:
        """How many output tokens it has taken."""
        ...

    def allowed(self, start: int, path: Sequence[int]) -> Tensor | None:
        """Bool ``[V]``: what may follow the first ``start`` committed tokens and then ``path``.

        None where the path itself is not allowed, or is over: nothing after it can be committed. Raises ParlayError
        where that can't be told.
        """
        ...

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, from the first, may follow the committed ones."""
        ...

    def forced(self, limit: int) -> tuple[int, ...]:
        """The tokens that must come next, up to ``limit``: those that have no alternative."""
        ...

    def commit(self, token: int) -> bool:
        """Take one committed token; True when nothing can follow it. Raises ParlayError for one that isn't allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Guidance:
    """Classifier-free guidance: log-probabilities are moved away from those after the ``negative`` prompt.

    log p = log n + scale (log c - log n) for each token after the text, where c is the law after the request's own
    prompt and n the one after the negative prompt, both with the output so far. A scale of 1 changes nothing.
    """

    negative: tuple[int, ...]
    scale: float


KINDS = ("extraction", "edit", "code", "maths", "list", "translation", "dialogue", "prose")
"""What requests may ask for, as `parlay.text.prompt_kind` tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sample to decode: ids in, ids out.

    ``references`` are token texts worth copying from. ``salt`` names the tenant: neither cached prefixes nor what
    stores learn is shared with another. ``store=False``: no store may learn from this request. ``written`` are output
    tokens that another engine committed: the sample goes on after them, and all that counts output counts them.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    key: NoiseKey
    written: tuple[int, ...] = ()
    source: int = 0
    """How many of the prompt's first tokens are a source, say of a translation: the text does not go on from them, and
    no penalty counts them."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the sample, `ignore_eos` already applied. Masked until ``min_tokens`` are out."""
    stop_checker: StopChecker | None = None
    constraint: Constraint | None = None
    references: tuple[tuple[int, ...], ...] = ()
    salt: str = ""
    owner: str = ""
    """Whose request it is: owners share the engine evenly, whatever they send."""
    store: bool = True
    group: str = ""
    """Samples of one prompt carry one name here: they may share its cache."""
    priority: int = 0
    """Lower is more urgent."""
    adapter: Adapter | None = None
    """What the target's products are changed by; the salt then tells its cached prefixes from others."""
    guidance: Guidance | None = None
    """How its text is moved away from what the target writes after another prompt."""
    reuse: int = 0
    """Runs of at least so many tokens may be moved from other cached texts, which is lossy; 0: none."""
    kind: str = ""
    """What it asks for, as far as that is known: requests of one kind are expected to have the same drafters pay."""

    @property
    def copies(self) -> int:
        """How many rows each token of its output takes: a guided request runs after its negative prompt, too."""
        return 1 if self.guidance is None else 2

    def rows_of(self, cached: int, tokens: int) -> int:
        """Say how many rows so many tokens after the cached ones take, at most.

        Of a guided request's prompt each takes a second one until the negative prompt is read; then the last does.
        """
        if self.guidance is None:
            return tokens
        return tokens + max(1, min(tokens, len(self.guidance.negative) - cached))

    def tokens_in(self, cached: int, rows: int) -> int:
        """Say how many tokens after the cached ones fit in so many rows: the inverse of `rows_of`, at least 1."""
        if self.guidance is None:
            return max(1, rows)
        return max(1, rows // 2, rows - max(1, len(self.guidance.negative) - cached))


class Layers(Protocol):
    """The target's own layers and cache, for drafters that ask for them: usable in `propose`, and metered."""

    def forward(
        self,
        views: Sequence[SequenceView],
        paths: Sequence[Sequence[int]],
        form: DraftForm = WHOLE_FORM,
        rows: int = 1,
        inputs_KH: Tensor | None = None,
    ) -> Tensor:
        """Logits of the last ``rows`` rows of each view's tokens and then its path, ``[len(views) * rows, V]``.

        The last K tokens of every path, at most as many as ``rows``, are read as ``inputs_KH``, if given.

        All sequences run at once. These rows, and those that are not cached, run in ``form``; what lies before them the
        target computed in full. A path may be as long as the view's budget. A
        path that goes on from the last call's costs only its new rows. No view appears twice.
        """
        ...

    def early(self, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], layer: int, rows: int = 1) -> Tensor:
        """The hidden states that enter ``layer``, of the rows whose logits `forward` gives: ``[len(views) * rows, H]``.

        The layers from there on are left out, and so is the LM head.
        """
        ...

    def states(
        self, views: Sequence[SequenceView], spans: Sequence[tuple[int, int]], taps: Sequence[int]
    ) -> list[Mapping[int, Tensor]]:
        """The hidden states ``[T, H]`` that enter each layer of ``taps``, of each view's cached tokens in its span.

        For a drafter that lacks some, as after a prefix hit. Those of pending tokens come with this step's observation.
        Fewer are computed if one step can't run so many rows, and none (an empty mapping) if there are none or the
        cache has no room: ask again in the next proposal. All sequences run at once; no view appears twice.
        """
        ...


class SequenceView(Protocol):
    """A sequence as drafters and rules read it. ``tokens`` grows as it decodes: prompt, then committed output."""

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
    """A `SequenceView` whose tokens stay as they are."""

    sequence: int
    request: Request
    tokens: Sequence[int]
    prompt_length: int
    layers: Layers | None = None
