"""The features of texts: hidden states of some of the target's layers, kept in shards, usually on disk.

Each shard of states is a file next to its shard of texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parlay.system.user_cache import saved_whole
from parlay.train.data.user_texts import TrainingText, load_shard, shards
from parlay.types import ParlayError, Runner, Segment, side_by_side

_LARGEST = 8
"""The binary exponent of the largest number of a row."""
_ROWS, _ROWS_BESIDE = 512, 4096
"""Rows per forward on a CPU, and on other devices, where a forward of few rows takes as long as one of many."""


@dataclass(frozen=True, slots=True)
class Featured:
    """One text of T tokens with its features. The tokens from ``answer`` on were written by the target.

    The features are the hidden states of all L stored layers side by side. ``numbers_TF`` has them as they are or, with
    ``exponents_TL``, in eight bits, see `pack`.
    """

    ids_T: Tensor
    answer: int
    numbers_TF: Tensor
    exponents_TL: Tensor | None = None

    @property
    def states_TF(self) -> Tensor:
        """The features, on the CPU."""
        return self.last(len(self.ids_T), torch.device("cpu"))

    def last(self, count: int, device: torch.device) -> Tensor:
        """Return the features of the last ``count`` tokens, moved to the device."""
        numbers_TF = self.numbers_TF[-count:].to(device)
        return numbers_TF if self.exponents_TL is None else unpack(numbers_TF, self.exponents_TL[-count:].to(device))


def pack(states_TF: Tensor, layers: int) -> tuple[Tensor, Tensor]:
    """Round states to eight bits: float8 numbers ``[T, F]``, and an exponent, int8, for each row and layer.

    A state is its number times two to the power of its exponent. The largest number of a row's layer is between 128
    and 256, which float8 (e4m3) holds with four significant bits, as it does those 16,000 times as small.
    """
    states_TLH = states_TF.float().view(len(states_TF), layers, states_TF.shape[1] // layers)
    exponents_TL = torch.frexp(states_TLH.abs().amax(-1)).exponent - _LARGEST
    numbers_TLH = torch.ldexp(states_TLH, -exponents_TL[..., None])
    return numbers_TLH.flatten(-2).to(torch.float8_e4m3fn), exponents_TL.to(torch.int8)


def unpack(numbers_TF: Tensor, exponents_TL: Tensor) -> Tensor:
    """Return the states of `pack`, bfloat16, which holds them without a further error."""
    rows, layers = exponents_TL.shape
    numbers_TLH = numbers_TF.float().view(rows, layers, numbers_TF.shape[1] // layers)
    return torch.ldexp(numbers_TLH, exponents_TL[..., None].int()).flatten(-2).to(torch.bfloat16)


class FeatureStore:
    """Stores the hidden states that enter ``layers``, for the texts in ``folder``; a runner of the target computes
    them.

    The last of ``layers`` is the number of layers, which stands for the states that the LM head reads. From these,
    recipes compute the target's own distribution. Without ``on_disk``, states are kept in memory only.
    """

    def __init__(self, folder: Path, layers: Sequence[int], *, on_disk: bool = True) -> None:
        self._folder = folder
        self.layers = tuple(layers)
        self._on_disk = on_disk
        self._held: dict[Path, Sequence[Featured]] = {}

    def missing(self) -> list[Path]:
        """Return the shards of texts whose states are neither on disk nor in memory."""
        return [texts for texts in shards(self._folder) if texts not in self._held and not self.path(texts).exists()]

    def compute(self, runner: Runner, done: Callable[[int], None] = lambda _: None) -> None:
        """Compute and keep the states of the missing shards; ``done`` is called after each."""
        for number, texts in enumerate(self.missing()):
            self.save(texts, _featured(runner, load_shard(texts), self.layers))
            done(number)

    def save(self, texts: Path, featured: Sequence[Featured]) -> None:
        """Keep the states of the shard ``texts``, in eight bits, whether or not that shard is written already.

        A file is replaced atomically.
        """
        if not self._on_disk:
            self._held[texts] = featured
            return
        tensors = {
            "ids": torch.cat([text.ids_T for text in featured]).int(),
            "numbers": torch.cat([text.numbers_TF for text in featured]),
            "exponents": torch.cat([text.exponents_TL for text in featured if text.exponents_TL is not None]),
            "lengths": torch.tensor([len(text.ids_T) for text in featured], dtype=torch.int32),
            "answers": torch.tensor([text.answer for text in featured], dtype=torch.int32),
        }
        with saved_whole(self.path(texts)) as part:
            save_file(tensors, part)

    def load(self) -> list[Featured]:
        """Return all texts whose states are in memory or on disk."""
        found = [self._held.get(texts) or self._read(texts) for texts in shards(self._folder)]
        return [text for each in found for text in each]

    def _read(self, texts: Path) -> Sequence[Featured]:
        path = self.path(texts)
        return _load(path) if path.exists() else ()

    def path(self, texts: Path) -> Path:
        """Return the path of the states of a shard of texts."""
        name = "-".join(map(str, self.layers))
        return texts.with_name(texts.name.replace("texts", f"features-{name}")).with_suffix(".safetensors")


def _featured(runner: Runner, texts: Sequence[TrainingText], layers: tuple[int, ...]) -> list[Featured]:
    """Compute the states of texts. Each has its own salt, so that it shares no prefix with others."""
    salts = [f"features {hash((text.ids, place))}" for place, text in enumerate(texts)]
    return complete(runner, [Reading(text, salt) for text, salt in zip(texts, salts, strict=True)], layers)


@dataclass(frozen=True, slots=True)
class Reading:
    """A text with the states of its first tokens, in order, as far as they are known.

    The runner may have cached the text's rows under ``salt``.
    """

    text: TrainingText
    salt: str
    states: Sequence[Tensor] = ()

    @property
    def known(self) -> int:
        """The number of tokens whose states are known."""
        return sum(map(len, self.states))

    @property
    def missing(self) -> int:
        """The number of tokens whose states are not known."""
        return len(self.text.ids) - self.known


def complete(runner: Runner, readings: Sequence[Reading], layers: Sequence[int]) -> list[Featured]:
    """Compute the missing states, of several short texts in one forward.

    Raises ParlayError if the runner's cache has no room for one text.
    """
    most, room = _ROWS if runner.spec.device == "cpu" else _ROWS_BESIDE, runner.capacity() // 2
    found: list[Featured] = []
    group: list[Reading] = []
    for each in readings:
        whole = [*group, each]
        if group and (sum(one.missing for one in whole) > most or sum(len(one.text.ids) for one in whole) > room):
            found += _run(runner, group, layers)
            group = []
        group.append(each)
    return [*found, *_run(runner, group, layers)]


def _run(runner: Runner, group: Sequence[Reading], layers: Sequence[int]) -> list[Featured]:
    """Run texts side by side, at most `_ROWS` tokens of each per forward. The cache keeps nothing of them."""
    texts = {place | 1 << 62: each.text for place, each in enumerate(group)}
    states = {name: _open(runner, name, each) for name, each in zip(texts, group, strict=True)}
    while segments := [_next(name, text, states[name]) for name, text in texts.items() if _left(text, states[name])]:
        out = runner.forward(segments, layers)
        rows_NF = as_features(out.taps, layers)
        for segment, rows in zip(segments, torch.split(rows_NF, [len(each.pending) for each in segments]), strict=True):
            states[segment.sequence].append(rows)
            runner.keep(segment.sequence, ())
    for name in texts:
        runner.truncate(name, 0)
        runner.release(name)
    return [
        Featured(torch.tensor(text.ids), text.answer, *pack(torch.cat(states[name]), len(layers)))
        for name, text in texts.items()
    ]


def _open(runner: Runner, name: int, reading: Reading) -> list[Tensor]:
    """Open a text where its first unknown state or its first uncached row is; return the states before that place."""
    cached = runner.open(name, reading.text.ids, reading.salt)
    start = runner.truncate(name, reading.known) if cached > reading.known else cached
    if not runner.reserve(name, len(reading.text.ids)):
        raise ParlayError("the target's cache has no room for one text")
    return [torch.cat(list(reading.states))[:start]] if start else []


def _left(text: TrainingText, states: Sequence[Tensor]) -> int:
    return len(text.ids) - sum(map(len, states))


def _next(name: int, text: TrainingText, states: Sequence[Tensor]) -> Segment:
    """Make the segment of a text's next tokens, without logits."""
    begin = len(text.ids) - _left(text, states)
    chunk = text.ids[begin : begin + _ROWS]
    return Segment(name, chunk, logits_from=len(chunk))


def as_features(taps: Mapping[int, Tensor], layers: Sequence[int]) -> Tensor:
    """Return the tapped states ``[T, H]`` of all layers side by side, as features are kept: bfloat16, on the CPU."""
    return side_by_side(taps, layers).gathered().to(torch.bfloat16).cpu()


def _load(path: Path) -> list[Featured]:
    names = ("ids", "numbers", "exponents", "lengths", "answers")
    try:
        with safe_open(path, "pt") as file:
            saved = {name: file.get_tensor(name) for name in names}
        lengths = saved["lengths"].tolist()
        ids, numbers, exponents = (torch.split(saved[name], lengths) for name in names[:3])
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ParlayError(f"{path} is damaged ({error}): delete it, and it is computed again") from error
    return [Featured(*parts) for parts in zip(ids, saved["answers"].tolist(), numbers, exponents, strict=True)]
