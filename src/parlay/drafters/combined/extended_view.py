"""A sequence with drafted tokens at its end, for a drafter that continues what another one drafted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from parlay.drafters.per_sequence import History
from parlay.types import WHOLE_FORM, DraftForm, Layers, Request, SequenceView


class ExtendedView:
    """A `SequenceView` of one sequence with drafted tokens at its end, which look like committed ones.

    Each sequence keeps its view from step to step, so ``tokens`` stays the same list object, and drafters compare only
    what changed.
    """

    def __init__(self, view: SequenceView) -> None:
        self._history = History()
        self.follow(view)

    @property
    def sequence(self) -> int:
        return self._view.sequence

    @property
    def request(self) -> Request:
        return self._view.request

    @property
    def tokens(self) -> Sequence[int]:
        return self._history.tokens

    @property
    def prompt_length(self) -> int:
        return self._view.prompt_length

    @property
    def layers(self) -> Layers | None:
        layers = self._view.layers
        return None if layers is None else _ExtendedLayers(layers)

    @property
    def parts(self) -> tuple[SequenceView, Sequence[int]]:
        """The sequence itself, and the tokens drafted after it."""
        return self._view, self.tokens[len(self._view.tokens) :]

    def follow(self, view: SequenceView) -> None:
        """Show the sequence as it is now, with nothing drafted after it."""
        self._view = view
        agreed = self._history.agree(view.tokens)
        self._history.cut(agreed)
        self._history.tokens += view.tokens[agreed:]

    def extend(self, tokens: Sequence[int]) -> None:
        self._history.tokens += tokens


class _ExtendedLayers:
    """The target's layers for extended views.

    They know only committed tokens, so drafted ones are prepended to paths.
    """

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def forward(
        self,
        views: Sequence[SequenceView],
        paths: Sequence[Sequence[int]],
        form: DraftForm = WHOLE_FORM,
        rows: int = 1,
        inputs_KH: Tensor | None = None,
    ) -> Tensor:
        return self._layers.forward(*_whole(views, paths), form, rows, inputs_KH)

    def early(self, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], layer: int, rows: int = 1) -> Tensor:
        return self._layers.early(*_whole(views, paths), layer, rows)

    def states(
        self, views: Sequence[SequenceView], spans: Sequence[tuple[int, int]], taps: Sequence[int]
    ) -> list[Mapping[int, Tensor]]:
        """Hidden states of committed tokens; the target has not computed the drafted ones."""
        origins = [view.parts[0] for view in views if isinstance(view, ExtendedView)]
        assert len(origins) == len(views), "views of one proposal are of one kind"
        return self._layers.states(origins, spans, taps)


def _whole(
    views: Sequence[SequenceView], paths: Sequence[Sequence[int]]
) -> tuple[list[SequenceView], list[Sequence[int]]]:
    """The underlying views, and paths that begin with the tokens drafted after each view."""
    parts = [view.parts for view in views if isinstance(view, ExtendedView)]
    assert len(parts) == len(views), "views of one proposal are of one kind"
    return [origin for origin, _ in parts], [[*drafted, *path] for (_, drafted), path in zip(parts, paths, strict=True)]


class ExtendedViews:
    """The extended views of one drafter."""

    def __init__(self) -> None:
        self._views: dict[int, ExtendedView] = {}

    def of(self, view: SequenceView) -> ExtendedView:
        """The extended view of ``view``, with nothing drafted yet."""
        extended = self._views.get(view.sequence)
        if extended is None:
            extended = self._views[view.sequence] = ExtendedView(view)
        else:
            extended.follow(view)
        return extended

    def release(self, sequence: int) -> None:
        self._views.pop(sequence, None)
