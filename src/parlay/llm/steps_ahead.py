"""Lookahead Reasoning (Fu et al. 2025, arXiv:2506.19830): a small model drafts steps, the target verifies them at once.

The small model writes the next steps of a chain of thought. The target then writes each of these steps itself, after
the drafted steps before it, and one more step after the last: all in one batch. A drafted step is accepted if the
target's own step says the same. The text continues with what the target wrote after the last accepted step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

from parlay.drafters.draft_models.reasoning_steps import StepEnds
from parlay.llm.jobs import Job, resume
from parlay.llm.judging import Words, words_of
from parlay.llm.outputs import StepsAhead
from parlay.llm.request_options import RequestOptions
from parlay.llm.step_parts import Part, StepWatch, decode_parts
from parlay.strategies.spelling import StrategySpec
from parlay.text.chat_template import Messages
from parlay.text.prompts import Ids, Prompt, TokensPrompt
from parlay.types import TARGET, Exactness, FieldError, FinishReason, SamplingParams

if TYPE_CHECKING:
    from parlay.llm.llm import LLM

SOURCE = "steps-ahead"
"""The writer of tokens in a drafted step that a judge accepted."""

JudgeName = Literal["exact", "model"]
Judge = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]
"""For pairs of a drafted step and the target's own: whether both say the same."""

JUDGE_VARIABLES = {"enable_thinking": False}
"""Variables of the chat template when the target judges."""
_ALL_STEPS = 1 << 40
"""More steps than any text has."""
_JUDGED = (
    "Two solutions of one problem go on with these steps. Do both steps say the same, with the same numbers?\n\n"
    "Step A: {drafted}\n\nStep B: {own}\n\nAnswer yes or no."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadParams:
    """How far a small model drafts ahead, and when its steps are accepted.

    ``steps``: how many are drafted at once. A step ends with a ``line`` or a ``sentence``, or after ``step_tokens``
    tokens. With ``judge="exact"``, a step is accepted if the target writes the same tokens, so the text is the target's
    own. With ``"model"``, it is accepted if the target, asked yes or no, says that both steps say the same; that is
    lossy. Raises ValueError for values out of range.
    """

    steps: int = 3
    until: Literal["sentence", "line"] = "line"
    step_tokens: int = 64
    judge: JudgeName = "exact"

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 16:
            raise FieldError("steps", f"must be between 1 and 16, got {self.steps}")
        if not 4 <= self.step_tokens <= 1024:
            raise FieldError("step_tokens", f"must be between 4 and 1024, got {self.step_tokens}")
        if self.until not in ("sentence", "line"):
            raise FieldError("until", f"must be sentence or line, got {self.until!r}")
        if self.judge not in get_args(JudgeName):
            raise FieldError("judge", f"must be exact or model, got {self.judge!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOutput:
    """A text written in rounds; in all, ``drafted`` steps were proposed and ``accepted`` were accepted.

    ``writers``: for each token, whether the `TARGET` wrote it or, with a judge, the small model.
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
class AheadText:
    """A text under way, round by round. An `LLM` or an `AsyncLLM` may decode its parts: see `decode_parts`."""

    llm: LLM
    drafter: LLM
    prompt: Ids
    sampling: SamplingParams
    stop_ids: frozenset[int]
    params: AheadParams
    options: RequestOptions
    """Options of the target's parts."""
    ends: StepEnds
    lossy: bool = False
    """Whether drafted steps may be accepted that the target did not write."""
    begins: bool = False
    """Whether the text is one of its own, and does not continue the prompt."""
    tokens: Ids = ()
    writers: tuple[str, ...] = ()
    levels: list[Exactness] = field(default_factory=lambda: [Exactness.BITS])
    counts: StepsAhead = field(default_factory=StepsAhead)

    def draft(self) -> Part | None:
        """The part in which the small model writes the next steps; None if its context is full."""
        if len(self.prompt) + len(self.tokens) + 1 >= self.drafter.engine.longest:
            return None
        options = replace(self.options, strategy=None, adapter=None)
        asked, left = self.sampling, self.drafter.engine.longest - len(self.prompt)
        most = left if asked.max_tokens is None else min(left, asked.max_tokens)
        sampling = replace(asked, max_tokens=most, min_tokens=min(most, asked.min_tokens))
        return self._part(self.drafter, self.tokens, self.params.steps, options, sampling=sampling)

    def parts(self, drafted: Part | None) -> list[Part]:
        """The target's parts of one round: one for each drafted step, after the steps before it, and one more.

        ``drafted``: the small model's part. Without it, or if it failed, the target continues alone.
        """
        steps, ends = _steps(drafted)
        self.counts = replace(self.counts, rounds=self.counts.rounds + 1, drafted=self.counts.drafted + len(steps))
        parts, base = list[Part](), self.tokens
        for step in steps:  # a prediction begins where the output does
            parts.append(self._part(self.llm, base, 1, replace(self.options, prediction=[*base, *step]), step))
            base += step
        if not ends or not parts:
            parts.append(self._part(self.llm, base, 1 if steps else _ALL_STEPS, self.options))
        return parts

    def _part(
        self,
        llm: LLM,
        base: Ids,
        steps: int,
        options: RequestOptions,
        drafted: Ids = (),
        *,
        sampling: SamplingParams | None = None,
    ) -> Part:
        """Make a job of ``llm`` that continues after the output ``base`` for ``steps`` steps."""
        prompt = TokensPrompt(prompt_token_ids=self.prompt, begins=self.begins)
        job = llm.job(prompt, sampling or self.sampling, options)
        (sample,) = job.samples
        assert sample.text is not None, "there is a tokenizer"
        watch = StepWatch(sample.text, self.ends, steps, self.params.step_tokens)
        sample.request = replace(sample.request, stop_ids=self.stop_ids, stop_checker=watch)
        if base:
            resume([sample], [base])
        return Part(job, watch, base, drafted)

    def take(self, parts: Sequence[Part]) -> Part:
        """Append the target's own steps, as long as each continued from what the target wrote.

        Returns the last part used.
        """
        last = parts[0]
        for part in parts:
            if part.base != self.tokens:
                break
            self._join(part.own, TARGET)
            self._accept(bool(part.drafted) and part.own == part.drafted)
            self.levels.append(part.level)
            last = part
            if part.final:
                break
        return last

    def pairs(self, parts: Sequence[Part]) -> list[tuple[str, str]]:
        """The questions for a judge: texts of drafted steps and of the target's own, where they differ."""
        decode = self.llm.vocabulary.required_tokenizer.decode
        texts = [(decode(list(part.drafted)), decode(list(part.own))) for part in parts if part.drafted]
        return [(drafted, own) for drafted, own in texts if drafted != own]

    def take_judged(self, parts: Sequence[Part], found: Sequence[bool]) -> Part:
        """Append drafted steps as long as they are accepted, then the target's own step.

        ``found``: one answer for each of `pairs`. Raises ValueError for another number of answers.
        """
        asked, decode = self.pairs(parts), self.llm.vocabulary.required_tokenizer.decode
        if len(found) != len(asked):
            raise ValueError(f"the judge has {len(found)} answers for {len(asked)} pairs: it must give one for each")
        answers = iter(found)
        steps = [part for part in parts if part.drafted]
        stands = [decode(list(part.drafted)) == decode(list(part.own)) or next(answers) for part in steps]
        for place, part in enumerate(parts):
            if place + 1 == len(parts) or not stands[place]:
                break
            self._join(part.drafted, SOURCE)
            self._accept(True)
        self._join(part.own, TARGET)
        self._accept(bool(part.drafted) and stands[place])
        return part

    def _accept(self, stood: bool) -> None:
        self.counts = replace(self.counts, accepted=self.counts.accepted + stood)

    def _join(self, tokens: Ids, writer: str) -> None:
        self.tokens += tokens
        self.writers += (writer,) * len(tokens)

    @property
    def exactness(self) -> Exactness:
        """The exactness of the text so far."""
        return Exactness.LOSSY if self.lossy else Exactness.weakest(*self.levels)


def reason_ahead(
    self: LLM,
    prompt: Prompt | Messages,
    sampling_params: SamplingParams | None = None,
    params: AheadParams | None = None,
    *,
    drafter: LLM,
    judge: Judge | None = None,
    strategy: str | StrategySpec | None = None,
    store: bool = True,
) -> AheadOutput:
    """Write one text while ``drafter``, a smaller model with the same tokenizer, drafts its steps ahead.

    A ``judge`` of your own replaces the one in ``params``; the text is then lossy. ``strategy`` drafts the tokens of
    the target's steps; by default they are drafted from the small model's step. ``store=False``: no strategy of either
    model learns from this text. Raises what `generate` raises, and ValueError for parameters that can't be honoured,
    for a drafter with another tokenizer, and for a model that can't judge.
    """
    began, params = time.perf_counter(), params or AheadParams()
    asked = sampling_params or self.get_default_sampling_params()
    check_sampling(asked)
    check_drafter(self, drafter)
    text = begin_ahead(self, drafter, self.job(prompt, asked), params, RequestOptions(strategy=strategy, store=store))
    if judge is None and params.judge == "model":
        judge = model_judge(self)
    text.lossy = judge is not None
    while not (last := _round(text, judge)).final:
        pass
    assert last.sample.last is not None
    return AheadOutput(
        text=last.sample.whole_text,
        token_ids=text.tokens,
        finish_reason=last.reason,
        exactness=text.exactness,
        writers=text.writers,
        rounds=text.counts.rounds,
        drafted=text.counts.drafted,
        accepted=text.counts.accepted,
        seconds=time.perf_counter() - began,
        draft_seconds=text.counts.draft_seconds,
        error=last.sample.last.error,
    )


def check_sampling(asked: SamplingParams) -> None:
    """Raises ValueError for sampling parameters that can't be used with drafted steps."""
    for name, given in (
        ("n", asked.n != 1),
        ("logprobs", asked.logprobs is not None),
        ("prompt_logprobs", asked.prompt_logprobs is not None),
        ("structured_outputs", asked.structured_outputs is not None),
        ("guidance_scale", asked.guidance_scale != 1),
    ):
        if given:
            raise FieldError(name, "can't be used with steps that are drafted ahead: remove it")


def check_drafter(llm: LLM, drafter: LLM) -> None:
    """Raises ValueError for a model that can't draft steps for ``llm``."""
    if llm is drafter or llm.vocabulary.fingerprint != drafter.vocabulary.fingerprint:
        name, why = drafter.runner.spec.name, "it is the target itself" if llm is drafter else "its tokens are others"
        remedy = "choose a smaller model with the target's tokenizer"
        raise FieldError("drafter", f": {name} can't draft steps, for {why}: {remedy}")


def begin_ahead(llm: LLM, drafter: LLM, job: Job, params: AheadParams, options: RequestOptions) -> AheadText:
    """Begin the text of a job, whose own sample is never decoded. ``options``: those of the target's parts."""
    request = job.samples[0].request
    sampling = replace(request.params, seed=request.key.seed, truncate_prompt_tokens=None)
    ends = StepEnds(llm.vocabulary.required_tokenizer, params.until)
    return AheadText(llm, drafter, request.prompt, sampling, request.stop_ids, params, options, ends, begins=job.begins)


def _round(text: AheadText, judge: Judge | None) -> Part:
    """Draft steps, let the target write them, and append what is accepted.

    Returns the part that the text continues from.
    """
    began = time.perf_counter()
    drafted = text.draft()
    if drafted is not None:
        decode_parts(text.drafter, [drafted], exact=False)
    drafting = text.counts.draft_seconds + time.perf_counter() - began
    text.counts = replace(text.counts, draft_seconds=drafting)
    parts = text.parts(drafted)
    decode_parts(text.llm, parts, exact=judge is None)
    if judge is None:
        return text.take(parts)
    pairs = text.pairs(parts)
    return text.take_judged(parts, list(judge(pairs)) if pairs else [])


def _steps(drafted: Part | None) -> tuple[list[Ids], bool]:
    """The steps that the small model wrote, and whether its text ends with them."""
    if drafted is None or drafted.sample.last is None or drafted.sample.last.finish_reason in ("error", "abort"):
        return [], False
    own, bounds = drafted.own, [0, *drafted.watch.bounds]
    if bounds[-1] < len(own):
        bounds.append(len(own))
    steps = [own[first:end] for first, end in pairwise(bounds)]
    return [step for step in steps if step], drafted.final


def judge_words(llm: LLM) -> Words:
    """The words yes and no of a model that judges. Raises ValueError if they are not one token each."""
    try:
        return words_of(llm)
    except ValueError:
        raise FieldError(
            "judge", "=model can't ask this model yes or no, which are not one token each to it: use exact"
        ) from None


def judge_chats(pairs: Sequence[tuple[str, str]]) -> list[list[dict[str, str]]]:
    """Make the conversations that ask a model whether a drafted step and its own step mean the same."""
    return [
        [{"role": "user", "content": _JUDGED.format(drafted=drafted.strip(), own=own.strip())}]
        for drafted, own in pairs
    ]


def judge_sampling(words: Words) -> SamplingParams:
    """Sampling parameters for the judge: greedy, one of both words."""
    return SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=list(words))


def model_judge(llm: LLM) -> Judge:
    """Make the target itself a judge that is asked yes or no. Raises ValueError if these are not single tokens."""
    words = judge_words(llm)

    def judge(pairs: Sequence[tuple[str, str]]) -> list[bool]:
        outputs = llm.chat(judge_chats(pairs), judge_sampling(words), False, chat_template_kwargs=JUDGE_VARIABLES)
        return [output.chosen.token_ids == (words.yes,) for output in outputs]

    return judge
