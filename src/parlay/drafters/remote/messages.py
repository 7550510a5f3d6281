"""JSON messages between a remote drafter and its service; docs/how-to/remote-drafter.md describes them.

Everything received is checked: ids must be in the vocabulary, and a tree must be one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from parlay.types import NO_DRAFT, Draft, NoiseKey, ParlayError, SamplingParams, SequenceView, Tree

VERSION = 1
INFO_PATH, DRAFTS_PATH = "/v1/drafter", "/v1/drafts"


class BadAnswer(ParlayError):
    """A service's answer is invalid; the message says how."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """Everything that a drafter may know about a request besides its tokens.

    ``salt``: a digest of the request's salt.
    """

    prompt_length: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample: int = 0
    salt: str = ""
    store: bool = True

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters. Raises ValueError for invalid numbers."""
        return SamplingParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)

    @property
    def key(self) -> NoiseKey:
        return NoiseKey(self.seed, self.sample)


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """The tokens of a text from ``start`` on, and how many may be drafted. The service has the earlier tokens."""

    id: int
    start: int
    tokens: Sequence[int]
    most: int
    facts: TextFacts

    def as_json(self) -> dict[str, Any]:
        own = {"id": self.id, "start": self.start, "tokens": list(self.tokens), "most": self.most}
        return {**own, **asdict(self.facts)}


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """An answer instead of a draft: the service has ``tokens`` tokens of the text and needs the later ones."""

    tokens: int


Answer = Draft | KnownTokens


def facts_of(view: SequenceView) -> TextFacts:
    """The facts to send about a request. Its salt may contain a key's digest, so only a digest of it is sent."""
    request = view.request
    params, salt = request.params, request.salt
    return TextFacts(
        prompt_length=view.prompt_length,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=request.key.seed,
        sample=request.key.sample_index,
        salt=hashlib.sha256(salt.encode()).hexdigest()[:32] if salt else "",
        store=request.store,
    )


def answer_as_json(answer: Answer) -> dict[str, Any]:
    """Write an answer as JSON. Scores are left out if the drafter has none."""
    if isinstance(answer, KnownTokens):
        return {"held": answer.tokens}
    return {
        "tokens": list(answer.tree.tokens),
        "parents": list(answer.tree.parents),
        "scores": [round(score, 4) for score in answer.scores],
    }


def read_answers(reply: object, updates: Sequence[TextUpdate], vocab_size: int, source: str) -> list[Answer]:
    """Read the reply to these updates. Raises BadAnswer."""
    drafts = reply.get("drafts") if isinstance(reply, Mapping) else None
    if not isinstance(drafts, list) or len(drafts) != len(updates):
        raise BadAnswer(f"it did not answer with {len(updates)} drafts")
    return [_answer(draft, update, vocab_size, source) for draft, update in zip(drafts, updates, strict=True)]


def _answer(answer: object, update: TextUpdate, vocab_size: int, source: str) -> Answer:
    if not isinstance(answer, Mapping):
        raise BadAnswer("a draft is not an object")
    if "held" in answer:
        known = answer["held"]
        if type(known) is not int or not 0 <= known <= update.start + len(update.tokens):
            raise BadAnswer("it says that it holds tokens which it never had")
        return KnownTokens(known)
    tokens, parents = answer.get("tokens"), answer.get("parents")
    if not isinstance(tokens, list) or not isinstance(parents, list) or len(tokens) != len(parents):
        raise BadAnswer("a draft needs as many parents as tokens")
    if len(tokens) > update.most:
        raise BadAnswer(f"a draft has {len(tokens)} tokens where {update.most} were asked for")
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadAnswer(f"a draft has the token {token!s:.20}, and the vocabulary has {vocab_size}")
        if type(parent) is not int or not -1 <= parent < node:
            raise BadAnswer("a draft is not a tree: a parent does not stand before its child")
    if not tokens:
        return NO_DRAFT
    return Draft(Tree(tuple(tokens), tuple(parents)), sources=(source,) * len(tokens), scores=_scores(answer, tokens))


def _scores(answer: Mapping[str, Any], tokens: Sequence[int]) -> tuple[float, ...]:
    scores = answer.get("scores") or []
    if not isinstance(scores, list) or len(scores) not in (0, len(tokens)):
        raise BadAnswer("a draft needs as many scores as tokens, or none")
    if not all(type(each) in (int, float) and 0 <= each <= 1 for each in scores):
        raise BadAnswer("a draft's scores are no chances")
    return tuple(map(float, scores))
