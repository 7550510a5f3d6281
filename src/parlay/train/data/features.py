"""The features of texts: hidden states of some of the target's layers, stored in shards on disk.

Each shard of states is a file next to its shard of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parlay.system.user_cache import saved_whole
from parlay.train.data.user_texts import TrainingText, load_shard, shards
from parlay.types import ParlayError, Runner, Segment

_ROWS, _ROWS_BESIDE = 512, 4096
"""Rows per forward on a CPU, and on other devices, where a forward of few rows takes as long as one of many."""


@dataclass(frozen=True, slots=True)
class Featured:
    """One text of T tokens with its features. The tokens from ``answer`` on were written by the target.

    ``states_TF``, bfloat16, are the hidden states of all stored layers side by side.
    """

    ids_T: Tensor
    answer: int
    states_TF: Tensor


class FeatureStore:
    """Stores the hidden states that enter ``layers``, for the texts in ``folder``; a runner of the target computes
    them.

    The last of ``layers`` is the number of layers, which stands for the states that the LM head reads. From these,
    recipes compute the target's own distribution.
    """

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        self._folder = folder
        self._layers = tuple(layers)

    def compute(self, runner: Runner, done: Callable[[int], None] = lambda _: None) -> None:
        """Compute and write the missing shards; ``done`` is called with the number of each."""
        for number, texts in enumerate(shards(self._folder)):
            path = self.path(texts)
            if not path.exists():
                save(path, _featured(runner, load_shard(texts), self._layers))
                done(number)

    def computed(self, runner: Runner, done: Callable[[int], None] = lambda _: None) -> list[Featured]:
        """Return all texts with their states, read from disk or else computed; nothing is written."""
        found: list[Featured] = []
        for number, texts in enumerate(shards(self._folder)):
            path = self.path(texts)
            found += _load(path) if path.exists() else _featured(runner, load_shard(texts), self._layers)
            done(number)
        return found

    def load(self) -> list[Featured]:
        """Return all texts whose states are on disk."""
        found = [self.path(texts) for texts in shards(self._folder)]
        return [text for path in found if path.exists() for text in _load(path)]

    def path(self, texts: Path) -> Path:
        """Return the path of the states of a shard of texts."""
        name = "-".join(map(str, self._layers))
        return texts.with_name(texts.name.replace("texts", f"states-{name}")).with_suffix(".safetensors")


def _featured(runner: Runner, texts: Sequence[TrainingText], layers: tuple[int, ...]) -> list[Featured]:
    """Compute the states of texts, several short texts in one forward."""
    most = _ROWS if runner.spec.device == "cpu" else _ROWS_BESIDE
    found: list[Featured] = []
    group: list[TrainingText] = []
    for text in texts:
        if group and sum(len(each.ids) for each in group) + len(text.ids) > most:
            found += _run(runner, group, layers)
            group = []
        group.append(text)
    return [*found, *_run(runner, group, layers)]


def _run(runner: Runner, texts: Sequence[TrainingText], layers: tuple[int, ...]) -> list[Featured]:
    """Run texts side by side, at most `_ROWS` tokens of each per forward.

    Each text has its own salt, so that it shares no prefix with others and leaves none in the cache.
    """
    names = [hash((text.ids, place)) | 1 << 62 for place, text in enumerate(texts)]
    states: list[list[Tensor]] = [[] for _ in texts]
    for name, text in zip(names, texts, strict=True):
        runner.open(name, (), salt=f"features {name}")
        if not runner.reserve(name, len(text.ids)):
            raise ParlayError("the target's cache has no room for one text")
    for begin in range(0, max((len(text.ids) for text in texts), default=0), _ROWS):
        chunks = [text.ids[begin : begin + _ROWS] for text in texts]
        segments = [Segment(*pair, logits_from=len(pair[1])) for pair in zip(names, chunks, strict=True)]
        out = runner.forward(segments, layers)
        rows_NF = torch.cat([out.taps[layer] for layer in layers], -1).to(torch.bfloat16).cpu()
        for place, rows in enumerate(torch.split(rows_NF, [len(chunk) for chunk in chunks])):
            states[place].append(rows)
            runner.keep(names[place], ())
    for name in names:
        runner.truncate(name, 0)
        runner.release(name)
    return [
        Featured(torch.tensor(text.ids), text.answer, torch.cat(parts))
        for text, parts in zip(texts, states, strict=True)
    ]


def save(path: Path, texts: Sequence[Featured]) -> None:
    """Write the texts and their states; ``path`` is replaced atomically."""
    tensors = {
        "ids": torch.cat([text.ids_T for text in texts]).int(),
        "states": torch.cat([text.states_TF for text in texts]),
        "lengths": torch.tensor([len(text.ids_T) for text in texts], dtype=torch.int32),
        "answers": torch.tensor([text.answer for text in texts], dtype=torch.int32),
    }
    with saved_whole(path) as part:
        save_file(tensors, part)


def _load(path: Path) -> list[Featured]:
    try:
        with safe_open(path, "pt") as file:
            saved = {name: file.get_tensor(name) for name in ("ids", "states", "lengths", "answers")}
        lengths = saved["lengths"].tolist()
        ids, states = (saved[name].split(lengths) for name in ("ids", "states"))
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ParlayError(f"{path} is damaged ({error}): delete it, and it is computed again") from error
    return [Featured(*parts) for parts in zip(ids, saved["answers"].tolist(), states, strict=True)]
