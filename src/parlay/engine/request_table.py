"""The requests under way: checks new ones, ends each, and keeps the engine's counts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from parlay.engine import answers
from parlay.engine.denoise import blank
from parlay.engine.scheduler import Scheduler
from parlay.engine.sequence import Sequence
from parlay.engine.sequence_step import Commit, SequenceStep
from parlay.engine.target_layers import TargetLayers
from parlay.sampling.processors import validate
from parlay.types import (
    Canvas,
    CanvasLayout,
    CanvasSpec,
    Ends,
    EngineStats,
    Event,
    Exactness,
    FieldError,
    FinishReason,
    Needs,
    Request,
    Runner,
    Strategy,
    UsageError,
)

logger = logging.getLogger(__name__)


class RequestTable:
    """Every request from `add` until its last event, which `events` or `abort` returns.

    ``max_context`` limits prompt and output together, ``max_canvas`` the places of a canvas.
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, layers: TargetLayers, *, max_context: int, max_canvas: int
    ) -> None:
        self._max_context = max_context
        self._max_canvas = max_canvas
        self._runner = runner
        self._scheduler = scheduler
        self._layers = layers
        self._sequences: dict[str, Sequence] = {}
        self._added = 0
        self._finished: Counter[FinishReason] = Counter()
        self._drafter_faults = 0
        self._step_tokens = 0
        self._steps: Counter[int] = Counter()
        self._step_seconds, self._step_rows, self._committed_tokens = 0.0, 0, 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def strategies(self) -> set[str]:
        """The names of the strategies of all requests under way."""
        return {sequence.strategy.name for sequence in self._sequences.values()}

    @property
    def longest(self) -> int:
        """The most tokens, prompt and output together, that context and memory allow a request."""
        return min(self._max_context, self._runner.capacity() + 1)  # the last token is never cached

    def add(self, request: Request, strategy: Strategy) -> None:
        """Queue a request. Raises ValueError for one that could never run; the message names what is wrong."""
        self._check(request, strategy)
        self._check_guidance(request)
        request = self._within_decoder(request)
        needs = tuple([drafter.needs for drafter in strategy.drafters])
        for each in needs:
            self.check_needs(strategy.name, each)
        sequence = Sequence(
            sequence=self._added,
            request=request,
            strategy=strategy,
            exactness=_exactness(request, strategy, self._runner.spec.exactness),
            tokens=[*request.prompt, *request.written],
            prompt_length=len(request.prompt),
            needs=needs,
            layers=self._layers if any(each.layers or each.taps for each in needs) else None,
        )
        if strategy.selector is not None:
            sequence.canvas = self._canvas(sequence)
        self._added += 1
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def _within_decoder(self, request: Request) -> Request:
        """The request with max_tokens cut to the places that an encoder-decoder's decoder has left.

        Raises ValueError if the prompt is not a source followed by the start token, or is too long for encoder or
        decoder.
        """
        spec, prompt, most = self._runner.spec, request.prompt, request.params.max_tokens
        if (encoder := spec.encoder) is None:
            return request
        if encoder.start not in prompt[1:]:
            raise ValueError(
                f"{spec.name} is an encoder-decoder: the prompt must be a source and then its start token, "
                f"{encoder.start}"
            )
        source = prompt.index(encoder.start)
        if source > encoder.max_source:
            raise ValueError(
                f"the source has {source} tokens, but the encoder of {spec.name} reads {encoder.max_source}: shorten it"
            )
        left = encoder.max_target - (len(prompt) - source)
        if left < 1:
            raise UsageError(
                f"the prompt has {len(prompt) - source} tokens from the start token on, but the decoder of {spec.name} "
                f"has {encoder.max_target} places and must write at least one more: shorten it",
                "prompt",
            )
        assert most is not None
        return replace(request, params=replace(request.params, max_tokens=min(most, left)))

    def check_needs(self, strategy: str, needs: Needs) -> None:
        """Raises ValueError if the runner can't give a strategy's drafter what it needs."""
        spec = self._runner.spec
        if needs.layers and not spec.layer_skip:
            raise FieldError(
                "strategy",
                f"{strategy} drafts with the target's own layers, but the runner of {spec.name} can't skip "
                "any: choose another",
            )
        if any(not 0 <= layer <= spec.num_layers for layer in needs.taps):
            raise FieldError(
                "strategy",
                f"{strategy} reads the hidden states of layers {', '.join(map(str, needs.taps))}, but those "
                f"of {spec.name} are 0 to {spec.num_layers}: choose another",
            )

    def _canvas(self, sequence: Sequence) -> Canvas:
        """Make the sequence's first canvas. Raises ValueError if the model fills none, or a step can't hold it."""
        spec, strategy, layout = self._runner.spec, sequence.strategy.name, sequence.strategy.layout
        if spec.canvas is None:
            raise FieldError(
                "strategy",
                f"{strategy} fills canvases, but {spec.name} writes its text in order: choose another",
            )
        self._check_layout(strategy, layout, spec.canvas)
        if spec.canvas.ends is not None:
            return self._answer(sequence, spec.canvas, spec.canvas.ends)
        if spec.canvas.noise and sequence.request.constraint is not None:
            raise UsageError(
                f"{spec.name} fills canvases of noise, so structured output is not supported: remove it",
                "structured_outputs",
            )
        room = self._max_context - len(sequence.tokens) if spec.canvas.noise else sequence.room(self._max_context)
        canvas = blank(spec.canvas, layout, len(sequence.tokens), room)
        if canvas.size > self._max_canvas:
            raise FieldError(
                "strategy",
                f"{strategy} fills {canvas.size} places at once, but a step takes {self._max_canvas}: lower "
                "max_tokens, or raise max_draft_rows",
                "max_tokens",
                "max_draft_rows",
            )
        return canvas

    def _check_layout(self, strategy: str, layout: CanvasLayout, canvas: CanvasSpec) -> None:
        """Raises FieldError for a strategy whose canvases the model can't fill."""
        name = self._runner.spec.name
        if canvas.text == "block" and layout.group and canvas.block % layout.group:
            raise FieldError(
                "strategy",
                f"{strategy}: block={layout.group} does not divide the blocks of {canvas.block} tokens "
                f"that {name} writes: choose a divisor",
            )
        if layout.stale and canvas.text != "full":
            raise FieldError(
                "strategy", f"{strategy}: cache=stale is for models whose rows all see each other: remove it"
            )
        ends = canvas.ends
        reads = "noise" if canvas.noise else "" if ends is None or ends.guesses else ends.kind
        if reads != layout.reads:
            raise FieldError(
                "strategy",
                f"{strategy}: its selector reads {layout.reads or 'places'}, but a canvas of {name} is "
                f"read as {reads or 'places'}: choose {answers.SELECTORS[reads]}",
            )

    def _answer(self, sequence: Sequence, spec: CanvasSpec, ends: Ends) -> Canvas:
        """Make a canvas for the whole answer.

        Raises ValueError if such a canvas can't do what is asked, or is too large.
        """
        name, layout, request = self._runner.spec.name, sequence.strategy.layout, sequence.request
        if layout.group:
            raise FieldError("block", f"={layout.group}: {name} fills a canvas as a whole: remove block")
        if request.constraint is not None:
            raise UsageError(
                f"{name} writes an answer in one canvas, so structured output is not supported: remove it",
                "structured_outputs",
            )
        canvas = answers.begin(spec, ends, request.prompt)
        most = min(self._max_canvas, self._max_context - len(request.prompt))
        if len(canvas.places) > most:
            raise ValueError(
                f"the source has {len(request.prompt) - 1} tokens, for which {name} fills {len(canvas.places)} places, "
                f"but context and step leave {most}: shorten it, or raise max_draft_rows"
            )
        return canvas

    def abort(self, request_id: str, reason: FinishReason = "abort", error: str | None = None) -> Event | None:
        """End a request now and keep its tokens so far. None if it is not under way."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, Commit(finish_reason=reason, error=error))

    def events(self, steps: Iterable[SequenceStep]) -> list[Event]:
        """Make one event per step. Requests that the step finished are removed."""
        events: list[Event] = []
        for step in steps:
            commit = step.commit if step.fault is None else Commit(finish_reason="error", error=step.fault.reason)
            last = commit.finish_reason is not None
            name = step.sequence.request.id
            events.append(self._end(step.sequence, commit) if last else Event(name, commit.committed))
        return events

    def count(self, steps: list[SequenceStep], seconds: float, rows: int) -> None:
        """Count a step's seconds, the rows of its forward, and the tokens of those of its ``steps`` without a fault.

        These are the prompt tokens that they computed and the tokens that they committed; both may be none.
        """
        self._step_seconds += seconds
        self._step_rows += rows
        committed = fed = 0
        for step in steps:
            committed += len(step.commit.committed.tokens)
            fed += len(step.pending) if step.prefill else 0
        self._committed_tokens += committed
        self._step_tokens += committed + fed
        if steps:
            self._steps[1 << max(0, committed + fed - 1).bit_length()] += 1

    def stats(self) -> EngineStats:
        """Counts of the requests under way and of all work so far."""
        scheduler, total = self._scheduler, self._runner.capacity()
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            preemptions=scheduler.preemptions,
            finished=dict(self._finished),
            cache_tokens_used=total - self._runner.free_tokens(),
            cache_tokens_total=total,
            prefix_tokens_asked=scheduler.prefix_tokens_asked,
            prefix_tokens_found=scheduler.prefix_tokens_found,
            drafter_faults=self._drafter_faults + sum(s.tally.drafter_faults for s in self._sequences.values()),
            step_tokens=self._step_tokens,
            steps=dict(self._steps),
            step_seconds=self._step_seconds,
            step_rows=self._step_rows,
            committed_tokens=self._committed_tokens,
        )

    def _end(self, sequence: Sequence, commit: Commit) -> Event:
        request = sequence.request
        del self._sequences[request.id]
        self._drafter_faults += sequence.tally.drafter_faults
        if commit.finish_reason is not None:
            self._finished[commit.finish_reason] += 1
        self._scheduler.remove(sequence)
        router = sequence.strategy.policy.report(sequence.sequence)
        metrics = replace(sequence.metrics(), router=router, escaped_at=sequence.escaped_at)
        _release(sequence)
        return Event(
            request.id,
            commit.committed,
            commit.finish_reason,
            commit.stop_reason,
            commit.error,
            metrics,
            tuple(sequence.prompt_logprobs) if request.params.prompt_logprobs is not None else None,
        )

    def _check(self, request: Request, strategy: Strategy) -> None:
        spec, prompt, most = self._runner.spec, len(request.prompt), request.params.max_tokens
        if strategy.selector is None and spec.fills_only:
            raise FieldError(
                "strategy",
                f"{strategy.name} writes token by token, but {spec.name} is a diffusion model: choose denoise",
            )
        if request.params.prompt_logprobs is not None and spec.fills_only:
            raise UsageError(
                f"{spec.name} is a diffusion model and has no prompt_logprobs: remove them", "prompt_logprobs"
            )
        if request.params.prompt_logprobs is not None and spec.encoder is not None:
            raise UsageError(
                f"{spec.name} is an encoder-decoder and has no prompt_logprobs: remove them", "prompt_logprobs"
            )
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id!r} is in use: choose another")
        if not prompt:
            raise UsageError("the prompt is empty: give it at least one token", "prompt")
        if prompt >= self._max_context:
            raise UsageError(
                f"the prompt has {prompt} tokens, but the context of {spec.name} is {self._max_context} "
                "and must hold at least one more: shorten it",
                "prompt",
            )
        if min(request.prompt) < 0 or max(request.prompt) >= spec.vocab_size:
            raise UsageError(f"the prompt has a token id that is not from 0 to {spec.vocab_size - 1}", "prompt")
        if most is None:
            raise UsageError("a request to the engine needs max_tokens as a number", "max_tokens")
        text = max(prompt + 1, min(prompt + most, self._max_context))
        longest = self.longest if strategy.selector is None else min(self.longest, self._runner.capacity())
        if text > longest:
            raise UsageError(
                f"the prompt's {prompt} tokens and max_tokens {most} make {text} tokens, but the cache of {spec.name} "
                f"holds {longest}: shorten the prompt, lower max_tokens, or allow more memory",
                "max_tokens",
            )
        validate(request.params, spec.vocab_size)
        self._check_written(request, strategy, most)

    def _check_guidance(self, request: Request) -> None:
        """Raises ValueError for a negative prompt that can't run, or leaves no room for the output."""
        spec, guidance, most = self._runner.spec, request.guidance, request.params.max_tokens
        if guidance is None:
            return
        if spec.fills_only or spec.encoder is not None or not self._scheduler.guides:
            raise FieldError(
                "guidance_scale",
                f"can't be honoured by {spec.name}, which fills canvases, has an encoder, is contrasted "
                "with another model, or writes with a datastore: remove it",
            )
        assert most is not None
        negative = guidance.negative
        if not negative or min(negative) < 0 or max(negative) >= spec.vocab_size:
            raise FieldError("negative_prompt", f"must have ids from 0 to {spec.vocab_size - 1}")
        longest = len(negative) + min(most, self._max_context - len(request.prompt))
        if longest > self._max_context:
            raise FieldError(
                "negative_prompt",
                f"of {len(negative)} tokens and the output make {longest} tokens, but the context of "
                f"{spec.name} is {self._max_context}: shorten it, or lower max_tokens",
                "max_tokens",
            )
        both = longest + len(request.prompt) + longest - len(negative)
        if both > self._runner.capacity() + 2:
            raise FieldError(
                "negative_prompt",
                f"and prompt, each with the output, make {both} tokens, but the cache of {spec.name} "
                f"holds {self._runner.capacity()}: shorten them, lower max_tokens, or allow more memory",
                "max_tokens",
            )

    def _check_written(self, request: Request, strategy: Strategy, most: int) -> None:
        """Raises ValueError if output written by another engine can't be continued here."""
        if not request.written:
            return
        spec, written = self._runner.spec, len(request.written)
        if strategy.selector is not None:
            raise FieldError("strategy", f"{strategy.name} fills canvases, which can't be resumed: remove resume")
        if min(request.written) < 0 or max(request.written) >= spec.vocab_size:
            raise ValueError(f"the tokens written so far have an id that is not from 0 to {spec.vocab_size - 1}")
        if written >= min(most, self._max_context - len(request.prompt)):
            raise UsageError(
                f"max_tokens must be above {written}, the number of tokens written so far, to go on", "max_tokens"
            )


def _release(sequence: Sequence) -> None:
    """Let policy and drafters free their state of the sequence. Exceptions are logged, and the request still ends."""
    strategy = sequence.strategy
    for release in (strategy.policy.release, *[drafter.release for drafter in strategy.drafters]):
        try:
            release(sequence.sequence)
        except Exception:
            logger.exception("strategy %s failed to release request %s", strategy.name, sequence.request.id)


def _exactness(request: Request, strategy: Strategy, runner: Exactness) -> Exactness:
    moved = Exactness.LOSSY if request.reuse else Exactness.BITS
    return Exactness.weakest(strategy.exactness, runner, moved)
