"""Compares texts, explains differences, and reports one line for each check and stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parlay.sampling.sampler import sample
from parlay.testing.conformance.stage import Stage, StageRequest, StageSample
from parlay.testing.reference import ReferenceText
from parlay.types import Exactness, Strategy


class Divergence(AssertionError):
    """A text that differs from plain decoding's."""


@dataclass(frozen=True, slots=True)
class Excuse:
    """A first difference that numerical noise explains. ``position``: the token; ``gap``: the largest difference in one
    logit."""

    position: int
    gap: float


def comparable(strategy: Strategy, ask: StageRequest) -> bool:
    """Whether the strategy promises the tokens of plain decoding. Under greedy decoding, an exact distribution has one
    text."""
    level = strategy.rule.exactness
    return level in (Exactness.BITS, Exactness.SEED) or (level is Exactness.DISTRIBUTION and ask.params.greedy)


def same_tokens(stage: Stage, ask: StageRequest, expected: Sequence[int], got: StageSample) -> Excuse | None:
    """Return None if the texts are equal. Raises Divergence unless the first difference is excused.

    The difference is excused if two conditions hold for the text before it: the strategy's and the reference's row of
    logits differ by at most the stage's noise bound, and the same sampler picks each text's token from its row.
    """
    tokens = got.tokens
    if tokens == list(expected):
        return None
    at = next((i for i, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b), None)
    if at is None:
        raise Divergence(f"{len(tokens)} tokens, plain decoding gives {len(expected)}; those that both have agree")
    text = (*ask.prompt, *tokens[:at])
    true_V = stage.text_logits(text)
    for row_V in got.texts.get(text, ()):
        gap = widest_gap(row_V.to(true_V), true_V)
        picks = _pick(ask, text, row_V), _pick(ask, text, true_V)
        if gap <= stage.noise_bound and picks == (tokens[at], expected[at]):
            return Excuse(at, gap)
    raise Divergence(_explain(at, expected[at], tokens[at], true_V, got.committed[at].source))


def widest_gap(logits_V: Tensor, other_V: Tensor) -> float:
    """Return the largest difference between two rows of logits. Equal infinities, of tokens that a model never writes,
    count as no difference."""
    return float((logits_V - other_V).where(logits_V != other_V, 0.0).abs().max())


def _pick(ask: StageRequest, text: Sequence[int], logits_V: Tensor) -> object:
    return sample(logits_V.unsqueeze(0), [ReferenceText(ask.request("pick"), list(text), len(ask.prompt))], [()])[0]


def _explain(at: int, expected: int, got: int, logits_V: Tensor, source: str) -> str:
    first, second = logits_V.double().topk(2).values.tolist()
    return (
        f"token {at} is {got} (from {source}), plain decoding says {expected}; the target's logits for them are "
        f"{float(logits_V[got]):.6g} and {float(logits_V[expected]):.6g}, its two highest {first - second:.3g} apart"
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check on one stage. ``detail`` says what was excused, or what went wrong."""

    check: str
    stage: str
    passed: bool
    detail: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        mark = "ok  " if self.passed else "FAIL"
        return f"{mark} {self.check:<12} {self.stage:<14} {self.detail}".rstrip()


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one strategy or drafter."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.passed)

    def __str__(self) -> str:
        return "\n".join([f"{self.subject}: {'passed' if self.passed else 'FAILED'}", *map(str, self.findings)])
