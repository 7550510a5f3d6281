"""Counts of a request: OpenAI's usage, speculation metrics in vLLM's shape, and Parlay's own summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, cast

from typing_extensions import TypedDict

from parlay.llm.jobs import Job
from parlay.llm.outputs import CompletionOutput, RequestOutput, StreamEvent
from parlay.types import Exactness, Metrics, tokens_per_step


class PromptDetails(TypedDict):
    audio_tokens: int
    cached_tokens: int


class CompletionDetails(TypedDict):
    accepted_prediction_tokens: int
    audio_tokens: int
    reasoning_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens of all prompts, each counted once, and of all samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Speculation(TypedDict):
    """Counts of the steps with a draft and their accepted tokens. The histograms count steps by accepted tokens."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


class RoutedDrafter(TypedDict):
    """A router's record of one drafter: steps in which it was asked, and those in which its draft was verified,
    ``trials`` among them. Tokens and seconds of its proposals as expected and as they came.
    """

    drafter: str
    asked: int
    verified: int
    trials: int
    expected: float
    accepted: int
    expected_seconds: float
    seconds: float


class LifeStretch(TypedDict):
    """Steps that follow each other: tokens that they committed and were expected to, and the steps by the drafter whose
    draft was verified, or by the reason why none was.
    """

    steps: int
    tokens: int
    expected: float
    choices: dict[str, int]


class Routing(TypedDict):
    """A router's choices for a sample and why. ``kind`` is the kind of work that the request was taken for.

    ``power`` is the power that the machine was assumed to draw, if that mattered. ``life``, when it chose what, is
    longer than most texts, so it is there only for a request that has ``explain``.
    """

    drafters: list[RoutedDrafter]
    reasons: dict[str, int]
    kind: str
    life: NotRequired[list[LifeStretch]]
    power: str


class RequestMetrics(TypedDict):
    """Metrics of one sample; both are null for several samples. ``speculative_decoding`` is null if nothing was
    drafted, ``router`` if the strategy has no choice of drafters."""

    speculative_decoding: Speculation | None
    router: Routing | None


class Summary(TypedDict):
    """How the text was decoded. Several samples are added up; ``seed`` is null if their seeds differ."""

    strategy: str
    exactness: str
    seed: int | None
    accepted_by_source: dict[str, int]
    writers: dict[str, int]
    tokens_per_step: float
    tokens_per_second: float


class Extras(TypedDict):
    metrics: RequestMetrics
    parlay: Summary


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Which chunks of a stream have usage: ``last``, one after the last choice; ``running``, all of them."""

    last: bool = False
    running: bool = False


class RunningUsage:
    """Counts usage so far, for streams that have it in every chunk."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._prompt = sum(len(job.samples[0].request.prompt) for job in jobs)
        self._completion = sum(len(sample.request.written) for job in jobs for sample in job.samples)

    def after(self, event: StreamEvent) -> dict[str, object]:
        """Usage after an event."""
        self._completion += len(event.token_ids)
        return self.now()

    def now(self) -> dict[str, object]:
        total = self._prompt + self._completion
        counts = {"prompt_tokens": self._prompt, "completion_tokens": self._completion, "total_tokens": total}
        return {"usage": counts}


def usage(outputs: Sequence[RequestOutput], reasoning_tokens: int = 0) -> Usage:
    samples = [sample for output in outputs for sample in output.outputs]
    uses = [sample.prediction for sample in samples if sample.prediction is not None]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "audio_tokens": 0,
            "cached_tokens": sum(output.outputs[0].metrics.cached_tokens for output in outputs),
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(use.accepted for use in uses),
            "audio_tokens": 0,
            "reasoning_tokens": reasoning_tokens,
            "rejected_prediction_tokens": sum(use.rejected for use in uses),
        },
    }


def extras(outputs: Sequence[RequestOutput], *, explain: bool) -> Extras:
    """Parlay's own fields of a reply."""
    samples = [sample for output in outputs for sample in output.outputs]
    alone = samples[0].metrics if len(samples) == 1 else None
    record = None if alone is None else alone.router
    return {
        "metrics": {
            "speculative_decoding": None if alone is None else speculation(alone),
            "router": None if record is None else cast(Routing, record.as_data(whole=explain)),
        },
        "parlay": summary(samples),
    }


def last_chunks(
    choice: object | None,
    outputs: Sequence[RequestOutput],
    *,
    wants_usage: bool,
    explain: bool,
    more: Mapping[str, object],
    reasoning_tokens: int = 0,
) -> list[dict[str, object]]:
    """The last chunks of a stream: the last choice with the fields ``more``, and the facts of the whole request.

    The facts are in a chunk of their own, without choices, if the client wants usage. With ``choice`` None the last
    choice has been sent already.
    """
    choices, facts = [] if choice is None else [choice], extras(outputs, explain=explain)
    if not wants_usage:
        return [{"choices": choices, **more, **facts}]
    end = {"choices": [], "usage": usage(outputs, reasoning_tokens), **facts}
    return [{"choices": choices, **more}, end] if choices else [end]


def summary(samples: Sequence[CompletionOutput]) -> Summary:
    samples = [sample for sample in samples if sample.metrics.steps] or samples  # some chains of a vote never begin
    steps = sum(sample.metrics.steps for sample in samples)
    seeds = {sample.seed for sample in samples}
    accepted: Counter[str] = Counter()
    for sample in samples:
        accepted.update(sample.metrics.accepted_by_source)
    return {
        "strategy": samples[0].strategy,
        "exactness": str(Exactness.weakest(*(sample.exactness for sample in samples))),
        "seed": seeds.pop() if len(seeds) == 1 else None,
        "accepted_by_source": dict(accepted),
        "writers": dict(Counter(writer for sample in samples for writer in sample.writers)),
        "tokens_per_step": tokens_per_step(sum(sample.metrics.completion_tokens for sample in samples), steps),
        "tokens_per_second": sum(sample.metrics.tokens_per_second for sample in samples) / len(samples),
    }


def speculation(metrics: Metrics) -> Speculation | None:
    drafted = {key: steps for key, steps in metrics.outcomes.items() if key[0] > 0}
    if not drafted:
        return None
    steps, most = sum(drafted.values()), max(accepted for _, accepted in drafted)
    by_length: dict[str, list[int]] = {}
    for (length, accepted), count in sorted(drafted.items()):
        row = by_length.setdefault(str(length), [])
        row.extend([0] * (accepted + 1 - len(row)))
        row[accepted] += count
    return {
        "mean_acceptance_length": 1 + metrics.accepted_tokens / steps,
        "draft_acceptance_rate": metrics.acceptance_rate,
        "acceptance_histogram": [
            sum(count for (_, accepted), count in drafted.items() if accepted == number) for number in range(most + 1)
        ],
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": metrics.accepted_tokens,
        "num_draft_tokens": metrics.draft_tokens,
        "num_spec_tokens": max(length for length, _ in drafted),
    }
