"""Selectors: choose which places of a canvas are decided in a step, under the names that papers give them.

A selector is pure, so the same seed gives the same text. It ranks places by their distributions, never by the
probability of the token drawn there, which would change how often tokens are drawn. Tokens decided in one step do not
see each other: only one place per step draws from the model's own distribution.

Suffixes: P guessed places, V the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from parlay.sampling.answer_selectors import CtcFrames, GreedyPath, Lookahead, Viterbi
from parlay.sampling.noise import Purpose, stream, uniform_of
from parlay.types import Canvas, Exactness, Fill, Guesses, Selector, SequenceView

# ------------------------------------------------------------------------------------------- by what places are ranked


def confidence(probs_PV: Tensor) -> list[float]:
    """The largest probability of each place (MaskGIT, Chang et al. 2022; LLaDA, Nie et al. 2025)."""
    best: list[float] = probs_PV.amax(-1).tolist()
    return best


def margin(probs_PV: Tensor) -> list[float]:
    """The largest probability less the second largest (Kim et al. 2025, arXiv:2502.06768; Dream's topk_margin)."""
    top = probs_PV.topk(min(2, probs_PV.shape[-1])).values
    gaps: list[float] = (top[:, 0] - top[:, -1]).tolist()
    return gaps


def entropy(probs_PV: Tensor) -> list[float]:
    """The entropy of each place, in nats."""
    nats: list[float] = torch.special.entr(probs_PV).sum(-1).tolist()
    return nats


def _sureness(probs_PV: Tensor) -> list[float]:
    return [-each for each in entropy(probs_PV)]


# ----------------------------------------------------------------------------------------- how many of them are decided


def best(scores: Sequence[float], count: int) -> list[int]:
    """Indices of the ``count`` highest scores, highest first; if equal, the first in the text."""
    return sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:count]


def above(scores: Sequence[float], threshold: float) -> list[int]:
    """Indices of all scores of at least ``threshold``, or else of the highest.

    Fast-dLLM (Wu et al. 2025, arXiv:2505.22618). With 1 only certain places are decided, with 0 all places.
    """
    return [at for at, score in enumerate(scores) if score >= threshold] or best(scores, 1)


def within_factor(scores: Sequence[float], factor: float) -> list[int]:
    """The most places n, the surest first, with (n + 1) * (1 - score of the n-th) < ``factor``; at least one.

    With a factor of 1 this is Fast-dLLM's condition (arXiv:2505.22618) under which each place's likeliest token is also
    its token in the likeliest combination.
    """
    order = best(scores, len(scores))
    counts = [n for n, at in enumerate(order, start=1) if (n + 1) * (1 - scores[at]) < factor]
    return order[: max(counts, default=1)]


def within_entropy(entropies: Sequence[float], bound: float) -> list[int]:
    """The most places, of lowest entropy first, whose entropies without the largest sum to at most ``bound`` nats.

    This bounds the mutual information of the tokens (EB-Sampler, Ben-Hamu et al. 2025, arXiv:2505.24857).
    """
    order = best([-each for each in entropies], len(entropies))
    chosen, spent = order[:1], 0.0
    for before, at in itertools.pairwise(order):
        spent += entropies[before]
        if spent > bound:
            break
        chosen.append(at)
    return chosen


def below_entropy(entropies: Sequence[float], places: Sequence[int], bound: float, distance: float) -> list[int]:
    """All places whose entropy is below ``bound`` nats, or else the lowest. Later places count as less sure.

    Each place after the first one adds ``distance`` nats (WeDLM, Liu et al. 2025, arXiv:2512.22737).
    """
    adjusted = [nats + distance * (place - places[0]) for nats, place in zip(entropies, places, strict=True)]
    return [at for at, nats in enumerate(adjusted) if nats < bound] or best([-nats for nats in adjusted], 1)


def still_masked(size: int, steps: int, step: int) -> int:
    """How many of ``size`` places stay masked after ``step`` of ``steps`` forwards: size * (steps - step) / steps.

    Rounded down (Mask-Predict, Ghazvininejad et al. 2019, arXiv:1904.09324). There are at most ``size`` steps.
    """
    steps = min(steps, size)
    return size * max(0, steps - step) // steps


# ----------------------------------------------------------------------------------------------------------- selectors


class _PerCanvas:
    """Fills each canvas separately. No plain decoding exists that the text could equal, so it is lossy."""

    exactness = Exactness.LOSSY
    revokes = False

    def fill(self, views: Sequence[SequenceView], canvases: Sequence[Canvas], guesses: Sequence[Guesses]) -> list[Fill]:
        return [self.fill_one(*each) for each in zip(views, canvases, guesses, strict=True)]

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        raise NotImplementedError


def _decide(guesses: Guesses, chosen: Sequence[int]) -> Fill:
    """Decide these guessed places with the sampler's tokens."""
    return Fill(tuple([guesses.places[at] for at in chosen]), tuple([guesses.tokens[at] for at in chosen]))


class _Rank(Protocol):
    """Scores of the guessed places of one canvas; the highest is decided first."""

    def __call__(self, view: SequenceView, guesses: Guesses) -> list[float]: ...


def _by(score: Callable[[Tensor], list[float]]) -> _Rank:
    return lambda view, guesses: score(guesses.probs_PV)


def _at_random(view: SequenceView, guesses: Guesses) -> list[float]:
    """An order that depends only on the seed (Dream's origin, MDLM's own order)."""
    key, length = view.request.key, len(view.tokens)
    return [uniform_of(stream(key, length + place, Purpose.ORDER)) for place in guesses.places]


def _left_to_right(view: SequenceView, guesses: Guesses) -> list[float]:
    return [-float(place) for place in guesses.places]


ORDERS: dict[str, _Rank] = {
    "confidence": _by(confidence),
    "margin": _by(margin),
    "entropy": _by(_sureness),
    "random": _at_random,
    "left-to-right": _left_to_right,
}
"""Orders for selectors that decide a fixed number of places."""


@dataclass(frozen=True, slots=True)
class FixedCount(_PerCanvas):
    """Decides the first ``k`` open places of an order. With one place per step, parallelism loses nothing."""

    order: str = "confidence"
    k: int = 1

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        return _decide(guesses, best(ORDERS[self.order](view, guesses), self.k))


@dataclass(frozen=True, slots=True)
class Threshold(_PerCanvas):
    """Decides every place whose likeliest token has this probability; see `above`."""

    threshold: float = 0.9

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        return _decide(guesses, above(confidence(guesses.probs_PV), self.threshold))


@dataclass(frozen=True, slots=True)
class Factor(_PerCanvas):
    """Decides as many places as `within_factor` allows."""

    factor: float = 1.0

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        return _decide(guesses, within_factor(confidence(guesses.probs_PV), self.factor))


@dataclass(frozen=True, slots=True)
class EntropyBound(_PerCanvas):
    """Decides as many places as `within_entropy` allows."""

    bound: float = 0.1

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        return _decide(guesses, within_entropy(entropy(guesses.probs_PV), self.bound))


@dataclass(frozen=True, slots=True)
class EntropyDistance(_PerCanvas):
    """Decides the places that `below_entropy` returns."""

    bound: float = 0.1
    distance: float = 0.02

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        return _decide(guesses, below_entropy(entropy(guesses.probs_PV), guesses.places, self.bound, self.distance))


@dataclass(frozen=True, slots=True)
class KLStability(_PerCanvas):
    """Decides places whose likeliest token has this probability and whose distribution is stable; else the surest.

    KLASS (Kim et al. 2025, arXiv:2511.05664): stable means that in each of the last ``history`` steps the distribution
    moved less than ``kl`` nats. A place's memory is its last distribution, and for how many steps it was stable.
    """

    threshold: float = 0.9
    kl: float = 0.01
    history: int = 2

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        sure, chosen, memory = confidence(guesses.probs_PV), [], {}
        for at, (place, probs_V) in enumerate(zip(guesses.places, guesses.probs_PV, strict=True)):
            settled, last = 0.0, canvas.memory.get(place)
            if last is not None and divergence(probs_V, last[:-1]) < self.kl:
                settled = last[-1].item() + 1
            memory[place] = torch.cat((probs_V, probs_V.new_tensor([settled])))
            if settled >= self.history and sure[at] >= self.threshold:
                chosen.append(at)
        return _decide(guesses, chosen or best(sure, 1))._replace(memory=memory)


def divergence(p_V: Tensor, q_V: Tensor) -> float:
    """KL(p || q) in nats: the sum of p * log(p / q) over the tokens with p > 0."""
    some = p_V > 0
    return float((p_V[some] * (p_V[some] / q_V[some]).log()).sum())


@dataclass(frozen=True, slots=True)
class Credit(_PerCanvas):
    """`Threshold` on distributions sharpened by earlier guesses (CreditDecoding, 2025, arXiv:2510.06133).

    In each step a token's credit C is multiplied by ``decay``, and the likeliest token gains its p ** ``gamma``. Logits
    gain ``alpha`` * log(1 + C). A greedy request takes the likeliest token by these logits; others keep the token that
    was drawn, so the seed decides it as before.
    """

    threshold: float = 0.9
    alpha: float = 0.7
    gamma: float = 0.2
    decay: float = 0.8

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        credits_PV = self._credits(canvas, guesses)
        sharper_PV = (guesses.probs_PV.log() + self.alpha * credits_PV.log1p()).softmax(-1)
        chosen = above(confidence(sharper_PV), self.threshold)
        fill = _decide(guesses, chosen)
        if view.request.params.greedy:
            fill = fill._replace(tokens=tuple(sharper_PV[chosen].argmax(-1).tolist()))
        return fill._replace(memory=dict(zip(guesses.places, credits_PV, strict=True)))

    def _credits(self, canvas: Canvas, guesses: Guesses) -> Tensor:
        credits_PV = torch.zeros_like(guesses.probs_PV)
        for at, place in enumerate(guesses.places):
            if place in canvas.memory:
                credits_PV[at] = canvas.memory[place] * self.decay
        top = guesses.probs_PV.max(-1)
        credits_PV[range(len(credits_PV)), top.indices] += top.values**self.gamma
        return credits_PV


@dataclass(frozen=True, slots=True)
class MaskPredict(_PerCanvas):
    """Decides all places, then opens the least likely ones again, fewer in each of ``steps`` forwards.

    See `still_masked`. A token that stays keeps the log-probability with which it was chosen. No token joins the text
    before the last forward.
    """

    steps: int = 10
    revokes = True

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        scores, new = {}, {}
        for at, place in enumerate(guesses.places):
            decided = canvas.places[place]
            if decided is None:
                new[place] = guesses.tokens[at]
                scores[place] = math.log(max(guesses.probs_PV[at, new[place]].item(), 1e-300))
            else:
                scores[place] = decided.score
        masked = still_masked(len(canvas.places), self.steps, canvas.forwards + 1)
        hidden = len(canvas.places) - len(scores)  # places where no token can be drawn yet
        order = sorted(scores, key=lambda place: (scores[place], -place))
        again = set(order[: max(0, masked - hidden)])
        if new.keys() <= again:
            again.remove(max(new, key=lambda place: scores[place]))
        kept = {place: token for place, token in new.items() if place not in again}
        return Fill(tuple(kept), tuple(kept.values()), reopened=tuple(again - new.keys()))


@dataclass(frozen=True, slots=True)
class JointThreshold(_PerCanvas):
    """`Threshold` for open places; a decided place changes if another token has the probability ``edit_threshold``.

    LLaDA 2.1 (Bie et al. 2026, arXiv:2602.08676). When all places are decided, the canvas runs again, in at most
    ``edit_steps`` forwards, until nothing changes. With an ``edit_threshold`` of 0 every token that is not the
    likeliest is replaced, with 1 only by a certain one.
    """

    threshold: float = 0.9
    edit_threshold: float = 0.9
    edit_steps: int = 16
    revokes = True

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        sure, filled, edited = confidence(guesses.probs_PV), list[int](), list[int]()
        for at, (place, token) in enumerate(zip(guesses.places, guesses.tokens, strict=True)):
            decided = canvas.places[place]
            if decided is None:
                filled.append(at)
            elif token != decided.token and sure[at] >= self.edit_threshold:
                edited.append(at)
        chosen = [filled[at] for at in above([sure[at] for at in filled], self.threshold)] if filled else []
        left = len(canvas.open) - len(chosen)
        more = self.edit_steps > 0 if filled else bool(edited) and canvas.full + 1 < self.edit_steps
        return _decide(guesses, [*chosen, *edited])._replace(again=not left and more)


@dataclass(frozen=True, slots=True)
class Renoise(_PerCanvas):
    """Lets places that `within_entropy` allows read the sampler's tokens in the next forward, and others random ones.

    DiffusionGemma's method (transformers' EntropyBoundSampler). A canvas is done when its likeliest tokens have stayed
    the same for ``stability_threshold`` forwards and its mean entropy is below ``confidence_threshold`` nats, or after
    ``max_denoising_steps``. Then its likeliest tokens join the text. A place's memory is its last distribution, for how
    many forwards its likeliest token has stayed, and that token.
    """

    bound: float = 0.1
    max_denoising_steps: int = 48
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    revokes = True

    def fill_one(self, view: SequenceView, canvas: Canvas, guesses: Guesses) -> Fill:
        nats, likeliest = entropy(guesses.probs_PV), guesses.probs_PV.argmax(-1).tolist()
        noted = [canvas.memory.get(place) for place in guesses.places]
        stays = [
            int(last[-2]) + 1 if last is not None and int(last[-1]) == token else 0
            for last, token in zip(noted, likeliest, strict=True)
        ]
        sure = sum(nats) / len(nats) < self.confidence_threshold
        if canvas.forwards + 1 >= self.max_denoising_steps or (sure and min(stays) >= self.stability_threshold):
            return Fill(guesses.places, tuple(likeliest))
        fill = _decide(guesses, within_entropy(nats, self.bound))
        again = [place for place in guesses.places if canvas.places[place] is not None and place not in fill.places]
        notes_P2 = torch.tensor([*zip(stays, likeliest, strict=True)], dtype=torch.float32)
        memory_PN = torch.cat((guesses.probs_PV.float(), notes_P2.to(guesses.probs_PV.device)), 1)
        memory = dict(zip(guesses.places, memory_PN, strict=True))
        return fill._replace(reopened=tuple(again), memory=memory, again=True)


BY_NAME: dict[str, Callable[..., Selector]] = {
    "threshold": Threshold,
    "factor": Factor,
    "entropy-bound": EntropyBound,
    "entropy-distance": EntropyDistance,
    "kl-stability": KLStability,
    "credit": Credit,
    "joint-threshold": JointThreshold,
    "mask-predict": MaskPredict,
    "renoise": Renoise,
    "ctc": CtcFrames,
    "greedy-path": GreedyPath,
    "lookahead-path": Lookahead,
    "viterbi-path": Viterbi,
}
"""Selectors that decide the number of places themselves. Their fields are the names of options."""


def make(name: str, options: Mapping[str, object]) -> Selector:
    """Make the selector of this name in `ORDERS` or `BY_NAME` with these options."""
    return BY_NAME[name](**options) if name in BY_NAME else FixedCount(name, **options)  # type: ignore[arg-type]
