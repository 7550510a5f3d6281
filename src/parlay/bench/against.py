"""`transformers` on the same checkpoint, as rows beside Parlay's own: plain, compiled, and with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from parlay.bench.transformers_generate import PROMPT_LOOKUP, compiled, generate, load
from parlay.bench.wave import UNMETERED, Answer, Ask, Gauges, Ids, Stopwatch, Wave
from parlay.energy import Meter
from parlay.types import Exactness, Metrics, ParlayError

NAME = "transformers"
COMPILED, LOOKUP = f"{NAME} compiled", f"{NAME} prompt lookup"
MODES = (NAME, COMPILED, LOOKUP)
"""As rows name them: as it comes; static cache and compiled decoding; prompt lookup as its documentation sets it."""
_REQUEST = "one"


class Transformers:
    """Implements `Decoder`: greedy, one request at a time. The model is loaded when it is first asked for."""

    def __init__(self, folder: Path, device: str, dtype: str, meter: Meter | None = None) -> None:
        self._folder = folder
        self._device = device
        self._dtype = dtype
        self._gauges = Gauges(device, meter or UNMETERED)
        self._model: PreTrainedModel | None = None
        self._compiled_for: set[int] = set()

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """See `Decoder`. Raises ParlayError for more than one ask, or a temperature."""
        if len(asks) != 1 or temperature:
            raise ParlayError(f"{NAME} is measured greedily, with one request at a time")
        (ask,) = asks
        options = self._options(strategy, ask)
        tokens: list[int] = []
        timed = self._gauges.time(lambda watch: tokens.extend(self._generate(ask.ids, ask.most, options, watch)))
        metrics = Metrics(
            strategy,
            Exactness.SEED,
            prompt_tokens=len(ask.ids),
            completion_tokens=len(tokens),
            steps=timed.watch.emissions,
        )
        answer: Answer = timed.watch.answer(_REQUEST, tuple(tokens), metrics)
        return timed.wave([answer])

    def _options(self, strategy: str, ask: Ask) -> dict[str, Any]:
        if strategy == LOOKUP:
            return PROMPT_LOOKUP
        if strategy != COMPILED:
            return {}
        longest = 256
        while longest < len(ask.ids) + ask.most:
            longest *= 2
        options = compiled(longest)
        if longest not in self._compiled_for:  # compiling is no part of decoding
            self._compiled_for.add(longest)
            self._generate(ask.ids, 4, options, Stopwatch())
        return options

    def _generate(self, ids: Ids, most: int, options: dict[str, Any], watch: Stopwatch) -> list[int]:
        """One greedy `generate`."""
        written: list[int] = []

        def emit(tokens: list[int]) -> None:
            watch.emit(_REQUEST, len(tokens))
            written.extend(tokens)

        generate(self._loaded(), ids, most, options, emit)
        return written

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            self._model = load(self._folder, dtype=self._dtype).to(self._device)
        return self._model
