"""Runs `transformers` on the same checkpoint, as a `Decoder` that is compared with Parlay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from parlay.bench.records import System
from parlay.bench.stopwatch import Stopwatch
from parlay.bench.transformers_generate import PROMPT_LOOKUP, compiled, generate, load
from parlay.bench.wave import UNMETERED, Answer, Ask, Gauges, Wave, lone_wave
from parlay.cost.energy import EnergyMeter
from parlay.types import ParlayError

NAME = "transformers"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ATTENTIONS = ("sdpa", "eager")
AS_IT_COMES, COMPILED, LOOKUP, ASSISTED = "plain", "compiled", "prompt lookup", "assisted"
MODES = tuple(System(NAME, way) for way in (AS_IT_COMES, COMPILED, LOOKUP))
"""The modes measured by default: plain, with a static cache and compiled decoding, and with its prompt lookup."""


class Mode(NamedTuple):
    """A way to run the model. None means the ``dtype`` of `Transformers` and the checkpoint's ``attention``."""

    way: str
    dtype: str | None = None
    attention: str | None = None

    @staticmethod
    def parse(strategy: str) -> Mode:
        """Parse ``[DTYPE] [ATTENTION] WAY``, as in ``compiled`` or ``bf16 eager prompt lookup``.

        Raises ParlayError for an unknown way.
        """
        dtype, _, rest = strategy.partition(" ") if strategy.split()[0] in DTYPES else (None, "", strategy)
        attention, _, way = rest.partition(" ") if rest.split()[0] in ATTENTIONS else (None, "", rest)
        if way not in (AS_IT_COMES, COMPILED, LOOKUP, ASSISTED):
            raise ParlayError(f"{NAME} has no mode {strategy!r}")
        return Mode(way, dtype, attention)


class Transformers:
    """A `Decoder` that decodes greedily, one request at a time. It loads a model when a mode first needs it.

    A static cache has room for ``longest`` tokens of prompt and answer. If a request needs more, the size is doubled.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        dtype: str,
        meter: EnergyMeter = UNMETERED,
        *,
        draft: Path | None = None,
        longest: int = 256,
    ) -> None:
        torch._dynamo.reset()  # models compiled earlier would count against torch's limit
        self._folder = folder
        self._draft = draft
        self._device = device
        self._dtype = dtype
        self._longest = longest
        self._gauges = Gauges(device, meter)
        self._models: dict[tuple[Path, str | None, str | None], PreTrainedModel] = {}
        self._compiled: set[tuple[Mode, int]] = set()

    def decode(self, strategy: str, asks: Sequence[Ask], temperature: float) -> Wave:
        """Decode one request. Raises ParlayError for several requests, a temperature, or an unknown mode."""
        if len(asks) != 1 or temperature:
            raise ParlayError(f"{NAME} is measured greedily, with one request at a time")
        (ask,) = asks
        mode = Mode.parse(strategy)
        model = self._model(self._folder, mode)
        options = self._options(mode, ask)

        def run(watch: Stopwatch) -> None:
            generate(model, ask.ids, ask.most, options, watch.emit)

        def answers(watch: Stopwatch) -> Sequence[Answer]:
            return lone_wave(ask, strategy, watch.read(steps=watch.emissions)).answers

        return self._gauges.measure(run, answers)

    def _options(self, mode: Mode, ask: Ask) -> dict[str, Any]:
        match mode.way:
            case "prompt lookup":
                return PROMPT_LOOKUP
            case "assisted":
                if self._draft is None:
                    raise ParlayError("no draft model was given")
                return {"assistant_model": self._model(self._draft, mode)}
            case "compiled":
                return self._static_cache(mode, ask)
        return {}

    def _static_cache(self, mode: Mode, ask: Ask) -> dict[str, Any]:
        """Return the options for compiled decoding. The model is compiled here, before the time is measured."""
        longest = self._longest
        while longest < len(ask.ids) + ask.most:
            longest *= 2
        options = compiled(longest)
        if (mode, longest) not in self._compiled:
            self._compiled.add((mode, longest))
            generate(self._model(self._folder, mode), ask.ids, 4, options, Stopwatch().emit)
        return options

    def _model(self, folder: Path, mode: Mode) -> PreTrainedModel:
        key = (folder, mode.dtype, mode.attention)
        if key not in self._models:
            if folder.is_file():
                raise ParlayError(f"{NAME} does not run the blocks of a GGUF file: name a folder of the same model")
            options: dict[str, Any] = {"dtype": DTYPES[mode.dtype] if mode.dtype else self._dtype}
            if mode.attention:
                options["attn_implementation"] = mode.attention
            self._models[key] = load(folder, **options).to(self._device)
        return self._models[key]
