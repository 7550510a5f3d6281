"""A runner over an mlx-lm model; its exactness level is ``seed``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.models.config import UnsupportedModel
from parlay.models.forward import wanted_rows
from parlay.models.mlx.model import MlxModel, MlxPool
from parlay.models.reserving import UNBOUNDED, TakenForGood, refuse
from parlay.models.slots import SlotRunner
from parlay.types import NO_SKIP, Exactness, Output, RunnerSpec, Segment, Skip, Tree

_PROMPT = (3, 9, 4, 8, 2, 11, 10, 9, 3, 12)
_PATHS = ((5, 6), (7, 7))
_BRANCHED = Tree(tokens=(5, 7, 6, 7), parents=(-1, -1, 0, 1))
"""A tree with both paths, whose rows alternate, so that wrong masks and positions show."""


class MlxRunner(TakenForGood, SlotRunner[MlxPool]):
    """A runner over an mlx-lm model, whose sequences may reserve ``most`` tokens together.

    Texts have at most ``longest`` tokens. Raises UnsupportedModel if its rows over slots differ from those of a plain
    forward.
    """

    def __init__(self, model: MlxModel, *, most: int, longest: int | None = None) -> None:
        facts = model.facts
        context = facts.max_context or UNBOUNDED
        spec = RunnerSpec(
            name=model.name,
            vocab_size=facts.vocab_size,
            max_context=min(context, most, longest or context),
            tree="tree",
            exactness=Exactness.SEED,
            hidden_size=facts.hidden_size,
            num_layers=facts.num_layers,
            device="cpu",
            dtype="float32",
            kernels=f"MLX on {facts.device} in {facts.dtype}: tree masks checked",
            eos_ids=facts.eos_ids,
        )
        super().__init__(most, spec, model.pool)
        self._model = model
        self.nbytes = most * facts.token_bytes
        self._compare()

    def forward(self, segments: Sequence[Segment], taps: Sequence[int] = (), skip: Skip = NO_SKIP) -> Output:
        """Run all segments together.

        Raises ValueError for what this runner can't do: skip sub-layers, read features, run cached tokens again, or tap
        layers with unusual names.
        """
        untapped = [tap for tap in taps if tap not in self._model.facts.tapped]
        for segment in segments:
            refuse(self._spec.name, "MLX", segment, skip, self._sequences[segment.sequence].ran, untapped=untapped)
        wanted, starts = wanted_rows(segments)
        logits_RV, states = self._model.run(self._placed(segments), wanted, taps)
        return Output(logits_RV, starts, states)

    def _compare(self) -> None:
        """Raises UnsupportedModel unless cached rows, alone and in a tree, give the logits of a plain forward."""
        prompt = tuple(token % self._spec.vocab_size for token in _PROMPT)
        expected = [self._model.full(prompt + path)[len(prompt) - 1 :] for path in _PATHS]
        alone_NV = torch.cat([self._fed(prompt), self._fed(_PATHS[0][:1]), self._fed(_PATHS[0][1:])])
        unit = torch.finfo(torch.bfloat16 if self._model.facts.dtype != "float32" else torch.float32).eps
        unit *= float(expected[0].abs().max())
        noise = _difference(alone_NV, expected[0])
        self.truncate(0, len(prompt) - 1)
        tree_NV = self.forward([Segment(0, prompt[-1:], _BRANCHED, 1)]).logits_RV
        self.release(0)
        branched_NV = torch.stack([expected[0][1], expected[1][1], expected[0][2], expected[1][2]])
        if not (noise <= 32 * unit and _difference(tree_NV, branched_NV) <= 8 * (noise + unit)):
            raise UnsupportedModel(
                f"{self._spec.name}: rows over a cache of ours differ from plain ones by {noise:.1e} in MLX, and those "
                f"of a tree by {_difference(tree_NV, branched_NV):.1e}: remove the runner"
            )

    def _fed(self, tokens: Sequence[int]) -> Tensor:
        """The last logits after feeding more tokens of the probe's text."""
        if 0 not in self._sequences:
            self.open(0, tokens)
        out = self.forward([Segment(0, tuple(tokens), logits_from=len(tokens) - 1)])
        self.keep(0, ())
        return out.logits_RV


def _difference(logits_NV: Tensor, expected_NV: Tensor) -> float:
    return float((logits_NV - expected_NV).abs().max())
