"""A slow reference for diffusion models: plain operators on all rows of a text, in every step, without a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parlay.models.config import Experts

HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 32, 48, 4, 2, 8, 2, 64
EXPERTS = 6
MASK = VOCAB - 4
CLOSE = 1e-5  # rounding may turn a smaller difference of probabilities around


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a family's files, and its attention mask. ``block``: rows see all rows of their block and of
    earlier ones; 0: all rows see each other. ``shift``: the row before a place gives the place's logits.

    With a ``canvas`` of this many places, the text is causal, and the canvas's rows see each other. If the canvas is
    ``ordered``, the rows of decided places come first, and each row sees only the rows before it. ``rotated``: how many
    numbers of an attention head have rotary positions. ``experts`` replace the feed-forward of each layer.
    """

    architecture: str
    config: Mapping[str, object]
    names: Mapping[str, str]
    block: int = 0
    shift: bool = False
    bias: bool = False
    qk_norm: bool = False
    canvas: int = 0
    ordered: bool = False
    rotated: int = DIM
    experts: Experts | None = None

    @property
    def text(self) -> Literal["causal", "block", "full"]:
        return "causal" if self.canvas else "block" if self.block else "full"


class SlowDiffusion:
    """The model in plain operators, without a cache. Each step computes every row of the text."""

    def __init__(self, layout: Layout, weights: Mapping[str, Tensor]) -> None:
        self.layout, self._weights = layout, weights

    def logits(self, ids: Sequence[int], places: int = 0) -> Tensor:
        """Return the logits ``[T, V]``. Each row sees all rows, or the rows before the end of its block.

        In a causal text, each row sees the rows before it, and the last ``places`` rows see all rows. On an ordered
        canvas, masks are moved behind the decided tokens, together with their positions, and each row sees the rows
        before it.
        """
        if self.layout.ordered:
            first = len(ids) - places
            order = [*range(first), *sorted(range(first, len(ids)), key=lambda at: ids[at] == MASK)]
            causal_TT = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            return self._run([ids[at] for at in order], causal_TT, order)[torch.tensor(order).argsort()]
        rows = torch.arange(len(ids))
        block = 1 if self.layout.canvas else self.layout.block or len(ids)
        seen_TT = rows[None] < (rows[:, None] // block + 1) * block
        seen_TT |= rows[:, None] >= len(ids) - places
        return self._run(ids, seen_TT, range(len(ids)))

    def _run(self, ids: Sequence[int], seen_TT: Tensor, positions: Sequence[int]) -> Tensor:
        at_T = torch.tensor([*positions])
        x_TH = self._of("embed")[list(ids)]
        for layer in range(LAYERS):
            x_TH = x_TH + self._attention(layer, self._normed("norm1", x_TH, layer), seen_TT, at_T)
            normed = self._normed("norm2", x_TH, layer)
            x_TH = x_TH + (self._gated(normed, layer) if self.layout.experts is None else self._mixed(normed, layer))
        return self._normed("final", x_TH) @ self._of("head").T

    def write(self, prompt: Sequence[int], length: int, *, canvas: int, k: int, group: int = 0) -> list[int]:
        """Return ``length`` greedy tokens. Each step decides the ``k`` surest places of the first ``group`` with an
        open place.

        Without a block, each canvas has ``canvas`` places. Raises ValueError if a choice is so close that rounding may
        decide it.
        """
        text, end, block = list(prompt), len(prompt) + length, self.layout.block
        places: list[int | None] = []
        while len(text) < end:
            if self.layout.ordered or not places:
                size = block - len(text) % block if block else self.layout.canvas or canvas
                places += [None] * (min(size, end - len(text)) - len(places))
                first = len(text) - (len(prompt) if self.layout.ordered else 0) if block or self.layout.ordered else 0
            probs, tokens, leads = self._guesses(text, places)
            open_places = [place for place, token in enumerate(places) if token is None]
            if group:
                now = (first + open_places[0]) // group
                open_places = [place for place in open_places if (first + place) // group == now]
            surest = sorted(open_places, key=lambda place: -probs[place])
            close = len(surest) > k and probs[surest[k - 1]] - probs[surest[k]] < CLOSE
            if close or min(leads[place] for place in surest[:k]) < CLOSE:
                raise ValueError("two tokens or places are too close to call: take another prompt")
            for place in surest[:k]:
                places[place] = tokens[place]
            while self.layout.ordered and places and places[0] is not None:
                text.append(places.pop(0) or 0)
            if None not in places:
                text += [token for token in places if token is not None]
                places = []
        return text[len(prompt) :]

    def edit(
        self, prompt: Sequence[int], length: int, *, threshold: float, edit_threshold: float, steps: int
    ) -> list[int]:
        """Return ``length`` greedy tokens of a model with blocks, in which decided tokens may change until the block is
        done.

        In each forward, open places whose likeliest token has the probability ``threshold`` are decided, or else the
        surest one. A decided place gets another token whose probability is ``edit_threshold``. After all places are
        decided, at most ``steps`` forwards follow.
        """
        text, end = list(prompt), len(prompt) + length
        while len(text) < end:
            places: list[int | None] = [None] * min(self.layout.block - len(text) % self.layout.block, end - len(text))
            forwards_left = steps
            while None in places or forwards_left:
                forwards_left -= None not in places
                probs, tokens, _ = self._guesses(text, places)
                opened = [place for place, token in enumerate(places) if token is None]
                new = {place for place in opened if probs[place] >= threshold}
                new |= {max(opened, key=lambda place: probs[place])} if opened and not new else set()
                for place, token in enumerate(places):
                    edits = token not in (None, tokens[place]) and probs[place] >= edit_threshold
                    new |= {place} if edits else set()
                if not new:
                    break
                for place in new:
                    places[place] = tokens[place]
            text += [token for token in places if token is not None]
        return text[len(prompt) :]

    def _guesses(self, text: Sequence[int], places: Sequence[int | None]) -> tuple[list[float], list[int], list[float]]:
        """Return, for each place, the probability of the likeliest token, that token, and its lead over the second."""
        logits = self.logits([*text, *(MASK if token is None else token for token in places)], len(places))
        rows = logits[len(text) - 1 : -1] if self.layout.shift else logits[len(text) :]
        rows[:, MASK] = -torch.inf
        best = rows.double().softmax(-1).topk(2)
        leads = best.values[:, 0] - best.values[:, 1]
        return best.values[:, 0].tolist(), best.indices[:, 0].tolist(), leads.tolist()

    def _of(self, part: str, layer: int = 0, kind: str = "weight", expert: int = 0) -> Tensor:
        return self._weights[f"{self.layout.names[part].format(layer, expert)}.{kind}"]

    def _gated(self, x_TH: Tensor, layer: int, expert: int = 0, of: str = "") -> Tensor:
        gate, up, down = (self._of(f"{of}{part}", layer, expert=expert) for part in ("gate", "up", "down"))
        out_TH: Tensor = torch.nn.functional.silu(x_TH @ gate.T) * (x_TH @ up.T) @ down.T
        return out_TH

    def _mixed(self, x_TH: Tensor, layer: int) -> Tensor:
        """Compute, row by row, the experts that the row chooses, and the shared expert."""
        rows = []
        for x_H in x_TH:
            weights = self._chosen(self._of("router", layer) @ x_H, layer)
            rows.append(sum(weight * self._gated(x_H, layer, expert) for expert, weight in weights.items()))
        mixed_TH = torch.stack([torch.as_tensor(row) for row in rows])
        shared = self.layout.experts is not None and self.layout.experts.shared
        return mixed_TH + self._gated(x_TH, layer, of="shared_") if shared else mixed_TH

    def _chosen(self, logits_E: Tensor, layer: int) -> dict[int, float]:
        form = self.layout.experts
        assert form is not None
        scores = (logits_E.sigmoid() if form.sigmoid else logits_E.softmax(-1)).tolist()
        choice = list(scores)
        if form.sigmoid:
            bias, size = self._of("router", layer, "expert_bias").tolist(), EXPERTS // form.groups
            choice = [score + own for score, own in zip(scores, bias, strict=True)]
            sums = [sum(sorted(choice[group * size :][:size])[-2:]) for group in range(form.groups)]
            opened = sorted(range(form.groups), key=lambda group: -sums[group])[: form.top_groups]
            choice = [each if expert // size in opened else -torch.inf for expert, each in enumerate(choice)]
        best = sorted(range(EXPERTS), key=lambda expert: -choice[expert])[: form.chosen]
        total = sum(scores[expert] for expert in best) if form.normalized else 1.0
        return {expert: form.scale * scores[expert] / total for expert in best}

    def _normed(self, part: str, x_TH: Tensor, layer: int = 0) -> Tensor:
        normed: Tensor = x_TH * (x_TH.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self._of(part, layer)
        return normed

    def _attention(self, layer: int, x_TH: Tensor, seen_TT: Tensor, at_T: Tensor) -> Tensor:
        def heads(part: str, count: int) -> Tensor:
            if "qkv" in self.layout.names:
                sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
                weight = torch.split(self._of("qkv", layer), sizes)["qkv".index(part)]
            else:
                weight = self._of(part, layer)
            bias = self._of(part, layer, "bias") if self.layout.bias else 0
            return (x_TH @ weight.T + bias).view(len(x_TH), count, DIM).transpose(0, 1)

        queries, keys, values = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        if self.layout.qk_norm:
            queries, keys = self._normed("q_norm", queries, layer), self._normed("k_norm", keys, layer)
        queries, keys = (_turned(each, at_T, self.layout.rotated) for each in (queries, keys))
        keys, values = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (keys, values))
        scores = (queries @ keys.mT * DIM**-0.5).masked_fill(~seen_TT, -torch.inf)
        mixed_TH = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(x_TH), -1)
        out_TH: Tensor = mixed_TH @ self._of("o", layer).T
        return out_TH


def _turned(heads_ATD: Tensor, at_T: Tensor, rotated: int) -> Tensor:
    """Apply rotary positions to the first ``rotated`` numbers of each head, in the form that pairs the two halves."""
    half = rotated // 2
    angles = at_T[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    left, right, rest = torch.split(heads_ATD, [half, half, DIM - rotated], -1)
    turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin())
    return torch.cat((*turned, rest), -1)
