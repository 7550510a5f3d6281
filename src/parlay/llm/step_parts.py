"""Samples that continue given output for one or more steps, decoded together until it is known which are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parlay.drafters.draft_models.reasoning_steps import StepEnds
from parlay.llm.jobs import Job, Sample
from parlay.text.detokenizer import TextStream
from parlay.text.prompts import Ids
from parlay.types import Exactness, FinishReason

if TYPE_CHECKING:
    from parlay.llm.llm import LLM


class StepWatch:
    """A stop checker for one sample that also stops at the end of a step, or after ``steps`` steps."""

    def __init__(self, text: TextStream, ends: StepEnds, steps: int, most: int) -> None:
        self._text, self._ends, self._steps, self._most = text, ends, steps, most
        self._count = 0
        self.bounds: list[int] = []
        """The number of new tokens up to the end of each step."""
        self.stopped = False

    def push(self, token: int) -> bool:
        self._count += 1
        self.stopped = self._text.push(token)
        begun = self._count - (self.bounds[-1] if self.bounds else 0)
        if token in self._ends or begun >= self._most:
            self.bounds.append(self._count)
        return self.stopped or len(self.bounds) >= self._steps


@dataclass(slots=True)
class Part:
    """A sample that continues after the output tokens ``base``; ``drafted`` is the step that it may repeat."""

    job: Job
    watch: StepWatch
    base: Ids
    drafted: Ids = ()

    @property
    def sample(self) -> Sample:
        return self.job.samples[0]

    @property
    def own(self) -> Ids:
        """The tokens that it has written after ``base``."""
        return tuple(self.sample.tokens[len(self.base) :])

    @property
    def differs(self) -> bool:
        """Whether it is known to write other tokens than those drafted. The last part has no drafted tokens."""
        own = self.own
        return own[: len(self.drafted)] != self.drafted[: len(own)] or (self.ended and own != self.drafted)

    @property
    def ended(self) -> bool:
        return self.sample.last is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop of the request ended it: an end token, a stop token or a stop string."""
        return self.watch.stopped or (bool(self.own) and self.own[-1] in self.sample.request.stop_ids)

    @property
    def final(self) -> bool:
        """Whether the whole text has ended, not only a step."""
        last = self.sample.last
        full = len(self.sample.tokens) >= (self.sample.request.params.max_tokens or 0)
        return last is not None and (last.finish_reason != "stop" or self.stopped or full)

    @property
    def reason(self) -> FinishReason:
        """Why the text ended. A step that ends at the length limit counts as ``length``."""
        last = self.sample.last
        assert last is not None
        assert last.finish_reason is not None
        return "length" if last.finish_reason == "stop" and not self.stopped else last.finish_reason

    @property
    def level(self) -> Exactness:
        """The exactness of its tokens."""
        last = self.sample.last
        return last.metrics.exactness if last is not None and last.metrics is not None else Exactness.BITS


def decode_parts(llm: LLM, parts: Sequence[Part], *, exact: bool) -> None:
    """Decode parts together. The last begins first, because its prompt contains those of the others.

    ``exact``: as soon as one part differs from its drafted step, the later parts are ended.
    """
    waiting, live = list(parts[:-1]), dict[str, Part]()
    with llm.call_lock.decoding(llm.engine):
        try:
            _begin(llm, parts[-1:], live)
            while live:
                for event in llm.engine.step():
                    part = live[event.request]
                    part.job.event(part.sample, event)
                    if event.finish_reason is not None:
                        del live[event.request]
                if waiting and (parts[-1].own or parts[-1].ended):
                    _begin(llm, waiting, live)
                    waiting = []
                if exact and not waiting:
                    _end(llm, needless(parts), live)
        finally:
            _end(llm, parts, live)


def _begin(llm: LLM, parts: Sequence[Part], live: dict[str, Part]) -> None:
    for part in parts:
        llm.add(part.job)
        live[part.sample.request.id] = part


def _end(llm: LLM, parts: Sequence[Part], live: dict[str, Part]) -> None:
    """End the given parts that are still under way."""
    for part in parts:
        name = part.sample.request.id
        if live.pop(name, None) is not None:
            part.sample.take(llm.engine.abort(name) or part.sample.unknown("abort"))


def needless(parts: Sequence[Part]) -> Sequence[Part]:
    """The parts after the first one that is known to differ from its drafted step; empty if none is known yet."""
    for place, part in enumerate(parts):
        if part.drafted and part.differs:
            return parts[place + 1 :]
        if not part.ended:
            break
    return ()
