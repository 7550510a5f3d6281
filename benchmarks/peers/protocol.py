"""Defines the protocol of a runner process: JSON lines. It starts with a task and decodes one prompt for each line.

    process                                     runner
    argument 1: the task                        {"version": "1.2"}
    {"mode": "plain", "ids": [..], "most": 9}   {"tokens": [..], "first_seconds": .., ...} or {"error": ".."}

This module runs in every engine's environment, so it imports only the standard library and the stopwatch.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Protocol

from parlay.bench.stopwatch import Reading

Decode = Callable[[Sequence[int], int], Reading]
"""Decodes greedily: takes a prompt's ids and a number of tokens, and returns exactly so many, even if the model
would end."""


@dataclass(frozen=True, slots=True)
class Task:
    """Settings that all modes of a runner share. ``longest`` is the most tokens of prompt and answer together.

    ``model`` is a folder or a GGUF file. If it is a GGUF file, ``dense`` is a folder of the same weights in bfloat16
    for engines that read no GGUF. ``draft`` is the draft model, empty if there is none, and ``dense_draft`` its folder.
    ``precision`` is the type in which the model's weights are stored, as in Q4_K_M.
    """

    model: str
    draft: str
    threads: int
    longest: int
    cache: str
    """A folder for checkpoints in the engine's own format. Each is made once."""
    dense: str = ""
    dense_draft: str = ""
    precision: str = "bf16"

    @property
    def folder(self) -> str:
        """Return the model's folder for engines that read no GGUF."""
        return self.dense or self.model

    def converted(self, checkpoint: str, form: str) -> Path:
        """Return the path of a checkpoint in another format. The name changes with the weights."""
        digest = hashlib.sha256()
        for path in sorted(Path(checkpoint).glob("*.safetensors")):
            digest.update(path.read_bytes())
        return Path(self.cache) / f"{Path(checkpoint).name}-{digest.hexdigest()[:12]}.{form}"


class Runner(Protocol):
    """An engine under test. It gets its task when it is made."""

    def load(self, mode: str) -> Decode:
        """Load a mode, once. Whatever it raises becomes the error of that mode."""
        ...


def serve(make: Callable[[Task], Runner], distribution: str) -> None:
    """Answer lines until standard input ends. ``distribution`` is the installed package whose version is reported."""
    task = Task(**json.loads(sys.argv[1]))
    with replies() as out:
        write(out, {"version": metadata.version(distribution)})
        runner = make(task)
        loaded: dict[str, Decode] = {}
        for line in sys.stdin:
            write(out, answer(runner, loaded, json.loads(line)))


def answer(runner: Runner, loaded: dict[str, Decode], asked: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one line. A mode is loaded when a line first asks for it."""
    mode = asked["mode"]
    try:
        if mode not in loaded:
            loaded[mode] = runner.load(mode)
        return asdict(loaded[mode](asked["ids"], asked["most"]))
    except Exception as error:  # the process goes on with its other modes
        return {"error": one_line(error)}


def one_line(error: Exception) -> str:
    """Return the type and first line of an error, without the path of the home folder, because it is published."""
    lines = str(error).replace(str(Path.home()), "~").strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def replies() -> IO[str]:
    """Return the former standard output. From now on, what libraries print there goes to standard error, also from
    C++."""
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def write(out: IO[str], reply: dict[str, Any]) -> None:
    """Write one reply as a line."""
    out.write(json.dumps(reply) + "\n")
    out.flush()
