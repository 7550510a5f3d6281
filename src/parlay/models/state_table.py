"""A table of a model's first layers' output for frequent n-grams, computed ahead and memory-mapped.

The n-grams are the longest ones in the trie of `parlay.models.lookup_index`, which come last there.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.models.config import DecoderConfig
from parlay.models.lookup_index import NgramIndex
from parlay.models.mapped import damaged, map_tensor, open_table
from parlay.models.weights.dequantize import dense
from parlay.models.weights.shapes import BadCheckpoint, Weight
from parlay.system.mapped_tensors import TensorFile

Gram = tuple[int, ...]
"""Tokens in text order."""
STATES = "ngram-states.safetensors"
"""The table's file in a checkpoint's folder."""
_KEYS, _STATES, _MODEL, _TOKENS = "keys", "states", "fingerprint", "tokens"
_KINDS = {"F32": torch.float32, "BF16": torch.bfloat16}
_SAMPLE = 4


@dataclass(frozen=True, slots=True)
class StateTable:
    """A memory-mapped table. ``states_FH`` are the states of the index's last n-grams, float32 or bfloat16 bits."""

    path: Path
    index: NgramIndex
    states_FH: npt.NDArray[Any]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states."""
        return torch.float32 if self.states_FH.dtype == np.float32 else torch.bfloat16

    @staticmethod
    def open(folder: Path, config: DecoderConfig, weights: Mapping[str, Weight]) -> StateTable | None:
        """Map the table in a checkpoint's folder, if there is one; only its keys and the first layers' weights are
        read.

        Raises BadCheckpoint for a truncated table, or one of another model or n-gram length.
        """
        form, path = config.ngram_layers, folder / STATES
        if form is None or not path.exists():
            return None
        file = open_table(path)
        metadata = file.metadata
        if metadata.get(_TOKENS) != str(form.tokens):
            raise BadCheckpoint(
                f"{path} has states of n-grams of {metadata.get(_TOKENS)!s:.20} tokens, and the model's first layers "
                f"see {form.tokens}: {_AGAIN}"
            )
        if metadata.get(_MODEL) != fingerprint(config, weights):
            raise BadCheckpoint(f"{path} is the table of another model: {_AGAIN}")
        keys_F, states_FH = _mapped(path, file, config)
        index = NgramIndex(keys_F, config.vocab_size, form.tokens)
        if not index.is_sound:
            raise damaged(path, "has keys that are no n-grams'")
        return StateTable(path, index, states_FH)

    @staticmethod
    def write(
        folder: Path, config: DecoderConfig, weights: Mapping[str, Weight], index: NgramIndex, states_FH: Tensor
    ) -> Path:
        """Write the states of the index's last n-grams into a checkpoint's folder, replacing an older table."""
        path, partial = folder / STATES, folder / f"{STATES}.partial"
        metadata = {"format": "pt", _TOKENS: str(index.longest), _MODEL: fingerprint(config, weights)}
        save_file({_KEYS: torch.from_numpy(index.keys), _STATES: states_FH.contiguous()}, partial, metadata=metadata)
        os.replace(partial, path)
        return path

    def find(self, grams: Sequence[Gram]) -> list[int]:
        """The index of each n-gram's state, or -1."""
        newest_first = np.full((len(grams), self.index.longest), -1, np.int64)
        for row, gram in enumerate(grams):
            newest_first[row, : len(gram)] = gram[::-1]
        found: list[int] = np.maximum(self.index.find(newest_first) - self._first, -1).tolist()
        return found

    def read(self, numbers: Sequence[int]) -> Tensor:
        """Read states ``[N, H]`` by index."""
        found = self.states_FH[list(numbers)]
        if self.dtype == torch.float32:
            return torch.from_numpy(found)
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)

    def sample(self) -> tuple[list[Gram], Tensor]:
        """A few n-grams spread over the table, with their states ``[K, H]``."""
        numbers = np.linspace(0, len(self.states_FH) - 1, _SAMPLE).astype(int).tolist()
        return [self.index.gram(self._first + number) for number in numbers], self.read(numbers)

    @property
    def _first(self) -> int:
        """The index of the first state's n-gram."""
        return len(self.index) - len(self.states_FH)


_AGAIN = "make it again with parlay train ngram-states, or delete it"


def fingerprint(config: DecoderConfig, weights: Mapping[str, Weight]) -> str:
    """A hash of a model's first layers: their form, their weights, and the embeddings that they read."""
    assert config.ngram_layers is not None, "only such models have states"
    layers = config.ngram_layers.layers
    digest = hashlib.sha256(repr((config.forms[:layers], config.rms_norm_eps, config.num_heads)).encode())
    beginnings = ("model.embed_tokens.", *(f"model.layers.{layer}." for layer in range(layers)))
    for name in sorted(name for name in weights if name.startswith(beginnings)):
        weight = weights[name]
        numbers = weight if isinstance(weight, Tensor) else dense(weight, torch.float32)
        digest.update(numbers.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _mapped(path: Path, file: TensorFile, config: DecoderConfig) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Map keys and states. Raises BadCheckpoint if their shapes don't match each other or the model."""
    keys, states = _rows(path, file, _KEYS), _rows(path, file, _STATES)
    kind, _ = file.described(_STATES)
    if kind not in _KINDS or not 1 <= states <= keys:
        raise damaged(path, f"has {states} states in {kind!s:.20} of {keys} n-grams")
    keys_F = map_tensor(path, file, _KEYS, ("I64", [keys]))
    return keys_F, map_tensor(path, file, _STATES, (str(kind), [states, config.hidden_size]))


def _rows(path: Path, file: TensorFile, name: str) -> int:
    """The number of rows that a tensor's header states."""
    _, shape = file.described(name)
    if not isinstance(shape, list) or not shape or type(shape[0]) is not int:
        raise damaged(path, f"says no shape of {name}")
    return shape[0]
