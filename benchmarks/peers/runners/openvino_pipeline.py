"""OpenVINO GenAI: plain, prompt lookup, and a draft model, from checkpoints exported by optimum-intel.

Modes that end in ``-u8`` keep keys and values in 8 bits, which is its default; the others in bf16.
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
"""A billion parameters in bfloat16."""


class OpenVinoRunner:
    """A pipeline for each mode."""

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
        """The pipeline, and its precision in words. Prefixes are not kept: prompts come again."""
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
        """In place of a GGUF file's four bits four from a billion parameters on, below that eight: as its users have.

        optimum-intel advises no fewer than eight bits for smaller models.
        """
        if not self._task.dense:
            return "fp16"
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        return "int4" if size >= LARGE_BYTES else "int8"

    def _exported(self, checkpoint: str, weights: str) -> str:
        """The checkpoint in OpenVINO's format, made when it is not there. Raises RuntimeError with the export's end."""
        out = self._task.converted(checkpoint, f"{weights}.openvino")
        if not out.exists():
            unfinished = out.with_name(f"{out.name}.part")  # beside what other engines make of the checkpoint
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
    """Hands a stopwatch what the pipeline emits: one token, or several."""

    def __init__(self) -> None:
        super().__init__()
        self.watch = Stopwatch()

    def write(self, token: int | Sequence[int]) -> Any:
        self.watch.emit([token] if isinstance(token, int) else token)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """The stopwatch needs no end."""


if __name__ == "__main__":
    serve(OpenVinoRunner, "openvino-genai")
