"""Runs OpenVINO GenAI from checkpoints exported by optimum-intel: plain, with prompt lookup, and with a draft model.

Modes that end in ``-u8`` cache keys and values in 8 bits, the default of OpenVINO; the others cache them in bf16.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from benchmarks.peers.protocol import Decode, Task, serve
from parlay.bench.stopwatch import Reading, Stopwatch

SHORT_CACHE = "-u8"
CACHE_GIB = 1
LARGE_BYTES = 2_000_000_000
"""The size in bytes of a billion parameters in bfloat16."""


class OpenVinoRunner:
    """Runs each mode in a pipeline of its own."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def load(self, mode: str) -> Decode:
        pipeline, note = self._pipeline(mode)
        config = genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        match mode.removesuffix(SHORT_CACHE):
            case "prompt-lookup":
                config.num_assistant_tokens = 5
                config.max_ngram_size = 3
            case "draft-model":
                config.num_assistant_tokens = 5

        def decode(ids: Sequence[int], most: int) -> Reading:
            config.max_new_tokens = most
            streamer = Watch()
            pipeline.generate(openvino.Tensor(np.array([ids], np.int64)), config, streamer)
            return streamer.watch.read(note=note)

        return decode

    def _pipeline(self, mode: str) -> tuple[Any, str]:
        """Make a mode's pipeline, and return it with its precision in words. Prefix caching is off, because prompts
        are repeated."""
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = CACHE_GIB
        scheduling.enable_prefix_caching = False
        settings: dict[str, Any] = {
            "scheduler_config": scheduling,
            "INFERENCE_NUM_THREADS": self._task.threads,
            "INFERENCE_PRECISION_HINT": openvino.Type.bf16,
        }
        if not mode.endswith(SHORT_CACHE):
            settings["KV_CACHE_PRECISION"] = openvino.Type.bf16
        match mode.removesuffix(SHORT_CACHE):
            case "prompt-lookup":
                settings["prompt_lookup"] = True
            case "draft-model":
                draft = self._task.dense_draft
                settings["draft_model"] = genai.draft_model(self._exported(draft, self._weights(draft)), "CPU")
        weights = self._weights(self._task.folder)
        note = weights.replace("fp16", "bf16") + (", cache u8" if mode.endswith(SHORT_CACHE) else "")
        return genai.LLMPipeline(self._exported(self._task.folder, weights), "CPU", **settings), note

    def _weights(self, folder: str) -> str:
        """Return the weight format. Where others read a GGUF file: int4 from a billion parameters, int8 below.

        optimum-intel advises at least eight bits for smaller models. Without a GGUF file it is fp16.
        """
        if not self._task.dense:
            return "fp16"
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        return "int4" if size >= LARGE_BYTES else "int8"

    def _exported(self, checkpoint: str, weights: str) -> str:
        """Return the checkpoint in OpenVINO's format, exported if necessary. Raises RuntimeError with the end of the
        error."""
        out = self._task.converted(checkpoint, f"{weights}.openvino")
        if not out.exists():
            unfinished = out.with_name(f"{out.name}.part")  # not the name of another engine's conversion
            shutil.rmtree(unfinished, ignore_errors=True)
            export = str(Path(sys.executable).with_name("optimum-cli"))
            task = ("--task", "text-generation-with-past", "--weight-format", weights)
            ran = subprocess.run(
                (export, "export", "openvino", "--model", checkpoint, *task, str(unfinished)),
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode:
                raise RuntimeError(f"the export failed: {ran.stderr.strip()[-200:]}")
            unfinished.rename(out)
        return str(out)


class Watch(genai.StreamerBase):  # type: ignore[misc]
    """Passes what the pipeline emits to a stopwatch: one token, or several."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Stopwatch()

    def write(self, token: int | Sequence[int]) -> Any:
        self.watch.emit([token] if isinstance(token, int) else token)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Do nothing: the stopwatch needs no end."""


if __name__ == "__main__":
    serve(OpenVinoRunner, "openvino-genai")
