"""What the target computes on texts: features of some layers, and its likeliest next tokens; kept on disk in shards.

A shard of features stands beside its shard of texts, memory-mapped when read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parlay.models.user_cache import written_whole
from parlay.train.data.texts import TrainingText, load_shard, shards
from parlay.types import ParlayError, Runner, Segment

BEST = 8
"""How many of the target's likeliest next tokens are kept with their probabilities."""
_ROWS = 512


@dataclass(frozen=True, slots=True)
class Featured:
    """One text of T tokens with what the target makes of it.

    ``taps_TF`` bfloat16 are the features of all layers side by side. ``best_ids_TB`` and ``best_probs_TB`` are the
    likeliest tokens after each token, likeliest first; rows before ``answer`` - 1 hold zeros.
    """

    ids_T: Tensor
    answer: int
    taps_TF: Tensor
    best_ids_TB: Tensor
    best_probs_TB: Tensor


class FeatureStore:
    """Features of the texts in ``folder`` for some taps; what is lacking is computed by ``runner``."""

    def __init__(self, folder: Path, taps: Sequence[int]) -> None:
        self._folder = folder
        self._taps = tuple(taps)

    def compute(self, runner: Runner, done: Callable[[Path], None] = lambda _: None) -> None:
        """Computes the shards that are not there yet."""
        for texts in shards(self._folder):
            path = self._path(texts)
            if not path.exists():
                _save(path, [_featured(runner, text, self._taps) for text in load_shard(texts)])
                done(path)

    def load(self) -> list[Featured]:
        """All texts whose features are there."""
        found = [self._path(texts) for texts in shards(self._folder)]
        return [text for path in found if path.exists() for text in _load(path)]

    def _path(self, texts: Path) -> Path:
        name = "-".join(map(str, self._taps))
        return texts.with_name(texts.name.replace("texts", f"features-{name}")).with_suffix(".safetensors")


def _featured(runner: Runner, text: TrainingText, taps: tuple[int, ...]) -> Featured:
    """One text, run in chunks; its sequence shares no prefix and leaves none."""
    name = hash(text.ids) | 1 << 62
    states: list[Tensor] = []
    ids: list[Tensor] = []
    probs: list[Tensor] = []
    runner.open(name, (), salt="features")
    if not runner.reserve(name, len(text.ids)):
        raise ParlayError("the target's cache has no room for one text")
    for begin in range(0, len(text.ids), _ROWS):
        chunk = text.ids[begin : begin + _ROWS]
        wanted = min(max(text.answer - 1 - begin, 0), len(chunk))
        out = runner.forward([Segment(name, chunk, logits_from=wanted)], taps)
        states.append(torch.cat([out.taps[layer] for layer in taps], -1).to(torch.bfloat16))
        values_RB, ids_RB = out.logits_RV.topk(BEST, -1)
        probs_RB = (values_RB - out.logits_RV.logsumexp(-1, keepdim=True)).exp()
        ids.append(_padded(ids_RB.int(), wanted))
        probs.append(_padded(probs_RB.half(), wanted))
        runner.keep(name, ())
    runner.truncate(name, 0)
    runner.release(name)
    return Featured(torch.tensor(text.ids), text.answer, torch.cat(states), torch.cat(ids), torch.cat(probs))


def _padded(rows_RB: Tensor, before: int) -> Tensor:
    """With rows of zeros in front."""
    return torch.nn.functional.pad(rows_RB, (0, 0, before, 0))


def _save(path: Path, texts: Sequence[Featured]) -> None:
    tensors = {
        "ids": torch.cat([text.ids_T for text in texts]).int(),
        "taps": torch.cat([text.taps_TF for text in texts]),
        "best_ids": torch.cat([text.best_ids_TB for text in texts]),
        "best_probs": torch.cat([text.best_probs_TB for text in texts]),
        "lengths": torch.tensor([len(text.ids_T) for text in texts], dtype=torch.int32),
        "answers": torch.tensor([text.answer for text in texts], dtype=torch.int32),
    }
    with written_whole(path) as part:
        save_file(tensors, part)


def _load(path: Path) -> list[Featured]:
    try:
        with safe_open(path, "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        lengths = held["lengths"].tolist()
        split = [held[name].split(lengths) for name in ("ids", "taps", "best_ids", "best_probs")]
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ParlayError(f"{path} is damaged ({error}): delete it, and it is computed again") from error
    return [Featured(*parts) for parts in zip(split[0], held["answers"].tolist(), *split[1:], strict=True)]
