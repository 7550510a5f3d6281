"""Writes texts with a target and keeps the hidden states that it computes for them, so that nothing is read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from torch import Tensor

from parlay.llm.jobs import CallLock, Job, decoded
from parlay.llm.llm import LLM
from parlay.llm.request_options import RequestOptions
from parlay.router.policies import Fixed
from parlay.sampling.rules.shared_noise import SharedNoise
from parlay.text.prompts import TokensPrompt
from parlay.train.data.features import Featured, Reading, as_features, complete
from parlay.train.data.user_texts import TrainingText
from parlay.types import NO_DRAFT, Draft, Needs, Observation, ParlayError, SamplingParams, SequenceView, Strategy


@dataclass(slots=True)
class _States:
    """The states of a text's first ``length`` tokens."""

    rows: list[Tensor] = field(default_factory=list)
    length: int = 0


class StateCollector:
    """A drafter that never drafts. It keeps the hidden states that enter ``layers``, by the id of the request.

    States are kept from the start of the text to the first token that the target did not compute, such as the last one.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._states: dict[str, _States] = {}

    @property
    def needs(self) -> Needs:
        return Needs(taps=self._layers, outcomes=False)

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        return [NO_DRAFT] * len(views)

    def observe(self, observations: Sequence[Observation]) -> None:
        for each in observations:
            states = self._states.setdefault(each.view.request.id, _States())
            rows_TF = as_features(each.taps, self._layers)
            new = each.start + len(rows_TF) - states.length
            if each.start <= states.length and new > 0:  # rows come twice after a preemption
                states.rows.append(rows_TF[-new:])
                states.length += new

    def release(self, sequence: int) -> None:
        """Keep the states, which are taken after the end."""

    def take(self, request: str) -> list[Tensor]:
        """Return the states of a request's first tokens, and forget them."""
        return self._states.pop(request, _States()).rows


def write_featured(
    llm: LLM, layers: Sequence[int], prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
) -> list[Featured]:
    """Decode the prompts plainly; return the texts with the states that enter ``layers``.

    Only the states after the last cached block of each text are computed in a forward of their own. Raises ParlayError
    if a request fails.
    """
    collector = StateCollector(layers)
    strategy = Strategy("collect-states", (collector,), SharedNoise(), Fixed(1))
    jobs = [
        # a salt that no other text has: of a prefix that is cached already, no states would be computed
        llm.job(TokensPrompt(prompt_token_ids=ids), own, RequestOptions(strategy="none", salt=f"features {uuid4()}"))
        for ids, own in zip(prompts, params, strict=True)
    ]

    def add(job: Job) -> None:
        for sample in job.due():
            llm.engine.add(sample.request, strategy)

    for _ in decoded(add, llm.engine, CallLock(), jobs):
        pass
    return complete(llm.runner, [_reading(job, collector) for job in jobs], layers)


def _reading(job: Job, collector: StateCollector) -> Reading:
    output, (sample,) = job.output(), job.samples
    if output.errors:
        raise ParlayError(f"the target could not write a text: {output.errors[0]}")
    prompt = output.prompt_token_ids
    text = TrainingText((*prompt, *output.outputs[0].token_ids), len(prompt))
    return Reading(text, sample.request.salt, collector.take(sample.request.id))
