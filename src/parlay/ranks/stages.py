"""Pipeline parallelism: the decoder's layers run in several stages, each on a rank of its own.

Rank 0 has the first layers, the embedding and the LM head. A stage sends its output to the next stage in float32, so
every logit has the same bits as in one process. The last stage returns to rank 0 the hidden states of the rows that
need logits: a hundredth as many numbers as the logits. Rank 0 does not wait for rows without logits, as in chunks of a
prompt, but goes on with the next chunk.

On rank 0, a forward has begun when rank 0's layers have run, and is over when the last stage has answered. In between,
rank 0 may begin further forwards, one for each stage, so that all stages work. A thread of rank 0 reads the answers as
they arrive, so that the last stage never waits for rank 0 while rank 0 waits to send.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parlay.models.compiled.forward import CompiledForward
from parlay.models.config import UnsupportedModel
from parlay.models.forward import Forward, ForwardBatch, ForwardOutput, Kernels
from parlay.models.lora import LowRankAdapter
from parlay.ranks.groups import receive_rows, send_rows
from parlay.ranks.wire import Connection


@dataclass(frozen=True, slots=True)
class Stage:
    """One of ``stages`` stages: its ``layers`` of the model's ``count``, and the number of layers in the ``first``
    stage.

    It reads rows from ``before`` and sends them to ``after``; ``back`` connects the last stage to rank 0.
    """

    stages: int
    layers: range
    count: int
    first: int
    before: Connection | None = None
    after: Connection | None = None
    back: Connection | None = None


class StageForward(Forward):
    """One stage as a `Forward`; ``body`` runs its layers. Only rank 0 has logits, for ``vocab`` tokens."""

    def __init__(self, body: CompiledForward, stage: Stage, hidden: int, vocab: int, dtype: torch.dtype) -> None:
        self._body, self._stage, self._layers = body, stage, stage.layers
        self._hidden, self._vocab, self._dtype = hidden, vocab, dtype
        self._kernels = replace(body.kernels, in_flight=stage.stages)
        self._reading = ThreadPoolExecutor(1, "parlay-stage")

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def add_adapter(self, adapter: LowRankAdapter) -> LowRankAdapter:
        """See `Forward.add_adapter`."""
        return self._body.add_adapter(adapter)

    def embed(self, ids: Sequence[int]) -> Tensor:
        """Raise UnsupportedModel, because no process has the whole model."""
        raise UnsupportedModel("embeddings can't be read here: several processes run the model")

    def run(self, work: ForwardBatch) -> ForwardOutput:
        return self.begin(work)()

    def begin(self, work: ForwardBatch) -> Callable[[], ForwardOutput]:
        """Run this stage's layers. The returned function waits for the last stage's answer."""
        known = [tap for tap in sorted(work.taps) if self._stage.first <= tap < self._layers.start]
        inputs, states = None, dict[int, Tensor]()
        if self._stage.before is not None:
            inputs, *earlier = self._receive(self._stage.before, [len(work.ids)] * (1 + len(known)))
            states = dict(zip(known, earlier, strict=True))
        is_read = bool(work.wanted or work.taps)
        leaving = self._run_layers(work, inputs, states, leaves=is_read or self._stage.after is not None)
        if self._stage.after is not None:
            self._send(self._stage.after, leaving, states)
        elif self._stage.back is not None and is_read:
            self._send(self._stage.back, leaving[self._returned(work)], states)
        if self._layers.start == 0 and self._stage.back is not None and is_read:
            late = [tap for tap in sorted(work.taps) if self._stage.first <= tap < self._stage.count]
            rows = [len(self._returned(work)), *[len(work.ids)] * len(late)]
            answer = self._reading.submit(self._receive, self._stage.back, rows)
            return lambda: self._finish(work, states, late, answer)
        return lambda: ForwardOutput(torch.empty(len(work.wanted), self._vocab), {})

    def _run_layers(
        self, work: ForwardBatch, inputs_NH: Tensor | None, states: dict[int, Tensor], *, leaves: bool
    ) -> Tensor:
        """Run this stage's layers, and return their output. The inputs of tapped layers are added to ``states``."""
        first, count = self._layers.start, len(self._layers)
        own = [tap - first for tap in work.taps if tap in self._layers]
        taps = [*own, count] if leaves else own
        skip = frozenset((half, layer - first) for half, layer in work.skip if layer in self._layers)
        found = self._body.run(work._replace(wanted=[], taps=taps, skip=skip, inputs=inputs_NH)).taps
        states.update({tap + first: found[tap] for tap in own})
        return found[count] if leaves else torch.empty(0, self._hidden)

    def _returned(self, work: ForwardBatch) -> Sequence[int]:
        """Return the rows of the last layer's output that rank 0 reads: all rows if that output is tapped."""
        return range(len(work.ids)) if self._stage.count in work.taps else work.wanted

    def _finish(
        self, work: ForwardBatch, states: dict[int, Tensor], late: Sequence[int], answer: Future[list[Tensor]]
    ) -> ForwardOutput:
        """Finish a forward on rank 0: apply the final norm and the LM head to the rows from the last stage."""
        hidden, *later = answer.result()
        states.update(zip(late, later, strict=True))
        normed, logits = self._stage.count in work.taps, torch.empty(0, self._vocab)
        if len(hidden):
            done = self._body.finish(hidden, work.wanted if normed else range(len(hidden)), normed=normed)
            logits = done.logits
            if normed:
                states[self._stage.count] = done.taps[0]
        return ForwardOutput(logits, {tap: states[tap].to(self._dtype) for tap in work.taps})

    def _send(self, to: Connection, leaving_NH: Tensor, states: Mapping[int, Tensor]) -> None:
        """Send this stage's output, and the inputs of tapped layers after the first stage."""
        for rows_NH in (leaving_NH, *(states[tap] for tap in sorted(states) if tap >= self._stage.first)):
            send_rows(to, rows_NH)

    def _receive(self, source: Connection, rows: Sequence[int]) -> list[Tensor]:
        return [receive_rows(source, count, self._hidden) for count in rows]
