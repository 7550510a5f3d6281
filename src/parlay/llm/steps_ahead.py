"""Lookahead Reasoning (Fu et al. 2025, arXiv:2506.19830): a small model drafts steps, the target writes all at once.

The small model writes the next steps of a chain of thought. The target then writes each of these steps itself, after
those that were drafted before it, all in one batch, and one step more after the last. A drafted step stands if the
target's own says the same; what the target wrote after the last one that stands goes on the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from parlay.drafters.draft_models.reasoning_steps import StepEnds
from parlay.llm.input_processor import RequestOptions
from parlay.llm.jobs import resume
from parlay.llm.judging import words_of
from parlay.llm.step_parts import Part, StepWatch, decode_parts
from parlay.strategies.spelling import StrategySpec
from parlay.text.chat_template import Messages
from parlay.text.prompts import Ids, Prompt, TokensPrompt
from parlay.types import TARGET, Exactness, FinishReason, SamplingParams

if TYPE_CHECKING:
    from parlay.llm.llm import LLM

SOURCE = "steps-ahead"
"""Who wrote the tokens of a drafted step that a judge let stand."""

JudgeName = Literal["exact", "model"]
Judge = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
"""Of pairs of a drafted step and the target's own: whether they say the same."""

_ALL_STEPS = 1 << 40
"""More than any text has."""
_JUDGED = (
    "Two solutions of one problem go on with these steps. Do both steps say the same, with the same numbers?\n\n"
    "Step A: {drafted}\n\nStep B: {own}\n\nAnswer yes or no."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadParams:
    """How far a small model writes ahead, and what makes a step of it stand.

    ``steps`` are drafted at once. A step ends with a ``line`` or a ``sentence``, or after ``step_tokens`` tokens.
    ``judge="exact"``: it stands if the target writes the same tokens, so the text is the target's own. ``"model"``: if
    the target, asked yes or no, says that both say the same; that is lossy. Raises ValueError for values out of range.
    """

    steps: int = 3
    until: Literal["sentence", "line"] = "line"
    step_tokens: int = 64
    judge: JudgeName = "exact"

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 16:
            raise ValueError(f"steps must be from 1 to 16, got {self.steps}: so many are drafted at once")
        if not 4 <= self.step_tokens <= 1024:
            raise ValueError(f"step_tokens must be from 4 to 1024, got {self.step_tokens}")
        if self.until not in ("sentence", "line"):
            raise ValueError(f"until must be sentence or line, got {self.until!r}")
        if self.judge not in get_args(JudgeName):
            raise ValueError(f"judge must be exact or model, got {self.judge!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOutput:
    """A text that was written in rounds: in each, ``drafted`` steps were proposed in all, and ``accepted`` stood.

    ``writers`` say for each token whether the `TARGET` or, by a judge, the small model wrote it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    exactness: Exactness
    writers: tuple[str, ...]
    rounds: int
    drafted: int
    accepted: int
    seconds: float
    draft_seconds: float
    error: str | None = None


@dataclass(slots=True)
class _Text:
    """A text under way."""

    prompt: Ids
    sampling: SamplingParams
    stop_ids: frozenset[int]
    params: AheadParams
    ends: StepEnds
    strategy: str | StrategySpec | None = None
    tokens: Ids = ()
    writers: tuple[str, ...] = ()
    levels: list[Exactness] = field(default_factory=lambda: [Exactness.BITS])
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0

    def part(
        self, llm: LLM, base: Ids, steps: int, drafted: Ids = (), strategy: str | StrategySpec | None = None
    ) -> Part:
        """Make the sample of an LLM that goes on after some output, for so many steps."""
        options = RequestOptions(strategy=strategy, prediction=list(drafted) or None)
        job = llm.job(TokensPrompt(prompt_token_ids=self.prompt), self.sampling, options)
        (sample,) = job.samples
        assert sample.text is not None, "there is a tokenizer"
        watch = StepWatch(sample.text, self.ends, steps, self.params.step_tokens)
        sample.request = replace(sample.request, stop_ids=self.stop_ids, stop_checker=watch)
        if base:
            resume([sample], [base])
        return Part(job, watch, base, drafted)

    def take(self, tokens: Ids, writer: str) -> None:
        self.tokens += tokens
        self.writers += (writer,) * len(tokens)


def reason_ahead(
    self: LLM,
    prompt: Prompt | Messages,
    sampling_params: SamplingParams | None = None,
    params: AheadParams | None = None,
    *,
    drafter: LLM,
    judge: Judge | None = None,
    strategy: str | StrategySpec | None = None,
) -> AheadOutput:
    """Write one text while ``drafter``, a smaller model of the same tokenizer, writes steps of it ahead.

    A ``judge`` of your own takes the place of that in ``params``; the text is then lossy. ``strategy`` drafts tokens of
    the target's steps; left out, they follow the drafted step. Raises what `generate` raises, and ValueError for
    parameters that can't be honoured, for a drafter of another tokenizer, and for a model that can't judge.
    """
    began = time.perf_counter()
    params = params or AheadParams()
    text = _begun(self, prompt, sampling_params, params, drafter)
    text.strategy = strategy
    if judge is None and params.judge == "model":
        judge = model_judge(self)
    while True:
        last = _round(self, text, drafter, judge)
        if last.final:
            break
    assert last.sample.last is not None
    return AheadOutput(
        text=last.sample.whole_text,
        token_ids=text.tokens,
        finish_reason=last.reason,
        exactness=Exactness.LOSSY if judge is not None else Exactness.weakest(*text.levels),
        writers=text.writers,
        rounds=text.rounds,
        drafted=text.drafted,
        accepted=text.accepted,
        seconds=time.perf_counter() - began,
        draft_seconds=text.draft_seconds,
        error=last.sample.last.error,
    )


def _begun(
    llm: LLM,
    prompt: Prompt | Messages,
    sampling_params: SamplingParams | None,
    params: AheadParams,
    drafter: LLM,
) -> _Text:
    """Raises ValueError for what can't be honoured."""
    asked = sampling_params or llm.get_default_sampling_params()
    for name, given in (
        ("n", asked.n != 1),
        ("logprobs", asked.logprobs is not None),
        ("prompt_logprobs", asked.prompt_logprobs is not None),
        ("structured_outputs", asked.structured_outputs is not None),
        ("guidance_scale", asked.guidance_scale != 1),
    ):
        if given:
            raise ValueError(f"{name} can't be used with steps that are drafted ahead: leave it out")
    if llm is drafter or llm.vocabulary.fingerprint != drafter.vocabulary.fingerprint:
        name, why = drafter.runner.spec.name, "it is the target itself" if llm is drafter else "its tokens are others"
        raise ValueError(f"{name} can't draft steps, for {why}: choose a smaller model with the target's tokenizer")
    request = llm.job(prompt, asked).samples[0].request
    sampling = replace(request.params, seed=request.key.seed, truncate_prompt_tokens=None)
    ends = StepEnds(llm.get_tokenizer(), params.until)
    return _Text(request.prompt, sampling, request.stop_ids, params, ends)


def _round(llm: LLM, text: _Text, drafter: LLM, judge: Judge | None) -> Part:
    """Draft steps, have the target write them, and take what stands; returns the part that the text goes on from."""
    began = time.perf_counter()
    steps, ends = _drafted(text, drafter)
    text.draft_seconds += time.perf_counter() - began
    parts, base = list[Part](), text.tokens
    for step in steps:
        parts.append(text.part(llm, base, 1, step, text.strategy))
        base += step
    if not ends:
        parts.append(text.part(llm, base, 1 if steps else _ALL_STEPS, strategy=text.strategy))
    decode_parts(llm, parts, exact=judge is None)
    text.rounds += 1
    text.drafted += len(steps)
    return _taken(text, parts) if judge is None else _judged(llm, text, parts, judge)


def _drafted(text: _Text, drafter: LLM) -> tuple[list[Ids], bool]:
    """The steps that the small model writes next, and whether its text ends with them.

    None where it has no room or fails: the target then goes on alone.
    """
    if len(text.prompt) + len(text.tokens) + 1 >= drafter.engine.longest:
        return [], False
    part = text.part(drafter, text.tokens, text.params.steps)
    decode_parts(drafter, [part], exact=False)
    if part.sample.last is None or part.sample.last.finish_reason == "error":
        return [], False
    own, bounds = part.own, [0, *part.watch.bounds]
    if bounds[-1] < len(own):
        bounds.append(len(own))
    steps = [own[first:end] for first, end in pairwise(bounds)]
    return [step for step in steps if step], part.final


def _taken(text: _Text, parts: Sequence[Part]) -> Part:
    """Take the target's own tokens, part after part, as long as each went on from what the target wrote."""
    last = parts[0]
    for part in parts:
        if part.base != text.tokens:
            break
        text.take(part.own, TARGET)
        text.accepted += bool(part.drafted) and part.own == part.drafted
        text.levels.append(part.level)
        last = part
        if part.final:
            break
    return last


def _judged(llm: LLM, text: _Text, parts: Sequence[Part], judge: Judge) -> Part:
    """Take drafted steps as long as the judge lets them stand, then the target's own step."""
    decode = llm.get_tokenizer().decode
    pairs = [(decode(list(part.drafted)), decode(list(part.own))) for part in parts if part.drafted]
    asked = [(drafted, own) for drafted, own in pairs if drafted != own]
    found = list(judge(asked)) if asked else []
    if len(found) != len(asked):
        raise ValueError(f"the judge has {len(found)} answers for {len(asked)} pairs: it must give one for each")
    answers = iter(found)
    stands = [drafted == own or next(answers) for drafted, own in pairs]
    for place, part in enumerate(parts):
        if place + 1 == len(parts) or not stands[place]:
            break
        text.take(part.drafted, SOURCE)
        text.accepted += 1
    text.take(part.own, TARGET)
    text.accepted += bool(part.drafted) and stands[place]
    return part


def model_judge(llm: LLM) -> Judge:
    """The target itself as the judge, asked yes or no. Raises ValueError for a model to which these are no tokens."""
    try:
        words = words_of(llm)
    except ValueError:
        raise ValueError(
            "the judge can't ask this model yes or no, not one token each to it: use the judge exact"
        ) from None
    params = SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=list(words))

    def judge(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        asked = [
            [{"role": "user", "content": _JUDGED.format(drafted=drafted.strip(), own=own.strip())}]
            for drafted, own in pairs
        ]
        outputs = llm.chat(asked, params, False, chat_template_kwargs={"enable_thinking": False})
        return [output.chosen.token_ids == (words.yes,) for output in outputs]

    return judge
