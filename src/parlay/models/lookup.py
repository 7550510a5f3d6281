"""A table of embeddings of frequent n-grams, which rows look up by their last tokens.

A row's last tokens are those of its path: the nodes above it, then the text. So a row reads the same in a tree and in a
chain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from parlay.cache import Rows, Store
from parlay.compiled import structs
from parlay.models.config import DecoderConfig, read_json
from parlay.models.lookup_index import NgramIndex
from parlay.models.mapped import map_tensor, open_table
from parlay.models.weights.shapes import BadCheckpoint
from parlay.system.user_cache import saved_whole
from parlay.types import Segment

TABLE = "ngrams.safetensors"
"""The table's file in a checkpoint's folder."""
_KEYS, _EMBEDDINGS = "keys", "embeddings"


def path_tokens(store: Store, segments: Sequence[Segment], longest: int) -> list[list[int]]:
    """The tokens of all rows of each segment, after ``longest`` - 1 tokens of the text before them; -1 where the text
    begins later."""
    found: list[list[int]] = []
    for segment in segments:
        reach = longest - 1 + max(0, -segment.base)
        known = min(reach, store.length(segment.sequence))
        found.append(
            [*[-1] * (reach - known), *store.ids(Segment(segment.sequence, segment.pending, segment.tree, base=-known))]
        )
    return found


def last_tokens(places: Sequence[Rows], tokens: Sequence[Sequence[int]], longest: int) -> list[list[int]]:
    """The last tokens of each running row's path, newest first; -1 before the beginning of the text."""
    found: list[list[int]] = []
    for place, own in zip(places, tokens, strict=True):
        before = len(own) - place.end
        for row in range(place.base, place.end):
            path = [row]
            while len(path) < longest:
                above = path[-1] - place.pending
                path.append(path[-1] - 1 if above < 0 else place.pending + place.tree.parents[above])
            found.append([own[before + each] for each in path])
    return found


class NgramTable:
    """A memory-mapped table of embeddings of frequent n-grams; each row reads that of the longest n-gram that ends at
    it."""

    def __init__(self, index: NgramIndex, embeddings_FH: npt.NDArray[np.uint16]) -> None:
        """``embeddings_FH`` are bfloat16 numbers as uint16 bits."""
        self.index, self._embeddings_FH = index, embeddings_FH

    @property
    def struct(self) -> structs.NgramsStruct:
        """The table as a struct of the library, which points into this object's memory."""
        places, index = (self.index.keys.ctypes.data, self._embeddings_FH.ctypes.data), self.index
        return structs.NgramsStruct(*places, len(index), index.longest, index.vocab_size)

    @staticmethod
    def open(folder: Path, config: DecoderConfig) -> NgramTable:
        """Map the table in a checkpoint's folder; only its keys are read. It may be larger than memory, but the package
        safetensors must be able to map it.

        Raises BadCheckpoint for a table that is missing, truncated, or of another model or vocabulary.
        """
        form, path = config.ngrams, folder / TABLE
        assert form is not None, "only models with n-grams have a table"
        file = open_table(path)
        if file.metadata.get("fingerprint") != form.fingerprint:
            raise BadCheckpoint(f"{path} is the table of another model: copy the one that was written with this one")
        shapes = {_KEYS: ("I64", [form.count]), _EMBEDDINGS: ("BF16", [form.count, config.hidden_size])}
        mapped = {name: map_tensor(path, file, name, shape) for name, shape in shapes.items()}
        index = NgramIndex(mapped[_KEYS], config.vocab_size, form.longest)
        if not index.is_sound:
            raise BadCheckpoint(f"{path} has keys of no vocabulary of {config.vocab_size} tokens: copy it again")
        return NgramTable(index, mapped[_EMBEDDINGS])

    @staticmethod
    def write(folder: Path, index: NgramIndex, embeddings_FH: Tensor) -> None:
        """Write a table into a Qwen3 checkpoint's folder, and mention it in config.json."""
        tensors = {_KEYS: torch.from_numpy(index.keys), _EMBEDDINGS: embeddings_FH.to(torch.bfloat16).contiguous()}
        digest = hashlib.sha256()
        for tensor in tensors.values():
            digest.update(tensor.view(torch.uint8).numpy().data)
        fingerprint = digest.hexdigest()[:16]
        with saved_whole(folder / TABLE) as part:  # another process may have the old file mapped
            save_file(tensors, part, metadata={"format": "pt", "fingerprint": fingerprint})
        config = read_json(folder / "config.json") | {
            "architectures": ["SconeForCausalLM"],
            "model_type": "scone",
            "ngrams": {"longest": index.longest, "count": len(index), "fingerprint": fingerprint},
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def embeddings(self, places: Sequence[Rows], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The embeddings to add to those of the running rows, float32 ``[N, H]``; ``tokens`` are those of
        `path_tokens`."""
        found_N = self._found(last_tokens(places, tokens, self.index.longest))
        made_NH, hits_K = torch.zeros(len(found_N), self._embeddings_FH.shape[1]), np.flatnonzero(found_N >= 0)
        bits_KH = self._embeddings_FH[found_N[hits_K]].astype(np.uint32) << 16
        made_NH[torch.from_numpy(hits_K)] = torch.from_numpy(bits_KH.view(np.float32))
        return made_NH

    def _found(self, last: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
        """The index of each row's n-gram, or -1."""
        return self.index.find(np.array(last, np.int64).reshape(-1, self.index.longest))
