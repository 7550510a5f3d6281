"""`transformers` on the same checkpoint, as rows beside Parlay's own: plain, compiled, and with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from parlay.bench.wave import UNMETERED, Answer, Ask, Gauges, Ids, Stopwatch, Wave
from parlay.energy import Meter
from parlay.types import Exactness, Metrics, ParlayError

NAME = "transformers"
COMPILED, LOOKUP = f"{NAME} compiled", f"{NAME} prompt lookup"
MODES = (NAME, COMPILED, LOOKUP)
"""As rows name them: as it comes; static cache and compiled decoding; prompt lookup as its documentation sets it."""
_LOOKUP_TOKENS = 10
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
            return {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
        if strategy != COMPILED:
            return {}
        longest = 256
        while longest < len(ask.ids) + ask.most:
            longest *= 2
        config = CompileConfig()
        config._compile_all_devices = True  # `generate` compiles on GPUs alone unless told
        options = {"cache_implementation": "static", "max_cache_len": longest, "compile_config": config}
        if longest not in self._compiled_for:  # compiling is no part of decoding
            self._compiled_for.add(longest)
            self._generate(ask.ids, 4, options, Stopwatch())
        return options

    def _generate(self, ids: Ids, most: int, options: dict[str, Any], watch: Stopwatch) -> list[int]:
        """One greedy `generate`."""
        ids_NT = torch.tensor([ids], device=self._device)
        streamer = _Streamer(watch)
        self._loaded().generate(
            input_ids=ids_NT,
            attention_mask=torch.ones_like(ids_NT),
            do_sample=False,
            max_new_tokens=most,
            streamer=streamer,
            **options,
        )
        return streamer.tokens

    def _loaded(self) -> PreTrainedModel:
        if self._model is None:
            model = AutoModelForCausalLM.from_pretrained(
                self._folder, local_files_only=True, use_safetensors=True, dtype=self._dtype
            )
            self._model = model.to(self._device).eval()
        return self._model


class _Streamer(BaseStreamer):  # type: ignore[misc]
    """Tells a stopwatch what `generate` emits; the prompt, which comes first, is left out."""

    def __init__(self, watch: Stopwatch) -> None:
        self.tokens: list[int] = []
        self._watch = watch
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.tokens += value.flatten().tolist()
            self._watch.emit(_REQUEST, value.numel())
        self._prompt_seen = True

    def end(self) -> None:
        """The stopwatch needs no end."""
