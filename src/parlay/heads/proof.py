"""Proof of a head: results of target and head from where it was trained, which this machine must reproduce at first
use.

A proof holds a short text, the target's hidden states on it, and the head's first drafts after some of its beginnings.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.system.user_cache import user_cache, written_whole
from parlay.types import OutOfRoom, Runner, Segment, side_by_side

LENGTH = 32
"""Number of tokens of a proof's text."""
GUESSES = 16
"""Number of beginnings with a draft: the text without its last token, and shorter ones."""
_MOST_REMEMBERED, _MOST_LAYERS = 1000, 10_000
_IDS, _LAYERS, _STATES, _GUESSES = "proof.ids", "proof.layers", "proof.states", "proof.guesses"


@dataclass(frozen=True, slots=True)
class Proof:
    """A text ``ids_T`` (int64), and bfloat16 ``states_TF``, the states that enter ``layers`` on it, side by side.

    ``guesses_P`` int64 are the head's first drafted tokens after the first T - P, ..., T - 1 tokens. They are empty for
    heads that draft with the target's own layers.
    """

    ids_T: Tensor
    layers: tuple[int, ...]
    states_TF: Tensor
    guesses_P: Tensor

    @staticmethod
    def taken(tensors: dict[str, Tensor], vocab_size: int) -> Proof | None:
        """Remove the proof from an artefact's tensors and return it, for a target with this vocabulary; None if there
        is none.

        Raises KeyError for missing parts, ValueError for invalid ones, since the target will run this text.
        """
        if _IDS not in tensors:
            return None
        ids_T, layers_L, states_TF, guesses_P = (tensors.pop(each) for each in (_IDS, _LAYERS, _STATES, _GUESSES))
        lists = (ids_T, vocab_size, LENGTH), (layers_L, _MOST_LAYERS, LENGTH), (guesses_P, vocab_size, len(ids_T) - 1)
        sound = all(map(_are_numbers, *zip(*lists, strict=True))) and len(layers_L) > 0
        if not sound or states_TF.dim() != 2 or len(states_TF) != len(ids_T):
            raise ValueError("its proof is invalid")
        return Proof(ids_T, tuple(layers_L.tolist()), states_TF, guesses_P)

    def tensors(self) -> dict[str, Tensor]:
        """Return the proof as tensors of an artefact."""
        layers_L = torch.tensor(self.layers)
        states_TF = self.states_TF.to(torch.bfloat16).contiguous()
        return {_IDS: self.ids_T, _LAYERS: layers_L, _STATES: states_TF, _GUESSES: self.guesses_P}

    def state_of(self, layer: int) -> Tensor:
        """Return the states ``[T, H]`` that enter one of the layers."""
        place = self.layers.index(layer)
        return self.states_TF.chunk(len(self.layers), -1)[place]


def _are_numbers(numbers_N: Tensor, end: int, most: int) -> bool:
    """Whether ``numbers_N`` are at most ``most`` integers from -1 (none) to ``end`` - 1."""
    whole = numbers_N.dim() == 1 and numbers_N.dtype in (torch.int64, torch.int32) and len(numbers_N) <= most
    return whole and (not len(numbers_N) or -1 <= int(numbers_N.min()) <= int(numbers_N.max()) < end)


def target_states(runner: Runner, ids: Sequence[int], layers: Sequence[int]) -> Tensor | None:
    """Return the states ``[T, F]`` of a text that enter ``layers``, side by side; None if the target can't compute them
    now."""
    if min(ids, default=-1) < 0 or not 0 <= min(layers) <= max(layers) <= runner.spec.num_layers:
        return None
    name = uuid.uuid4().int >> 66
    runner.open(name, (), salt=f"proof {name}")
    try:
        if not runner.reserve(name, len(ids)):
            return None
        out = runner.forward([Segment(name, tuple(ids), logits_from=len(ids))], layers)
        return side_by_side(out.taps, layers).gathered()
    except OutOfRoom:
        return None
    finally:
        runner.truncate(name, 0)
        runner.release(name)


def agreement(proof: Proof, states_TF: Tensor) -> float:
    """Return how similar the target's states are to the proof's: 1 for equal states, near 0 for another model's.

    For each layer, it takes the median over rows of the cosine of both states, after subtracting their means over rows,
    since some numbers are large in every row. The result is the least of the layers. The first row is left out, since
    it differs from all others.
    """
    pairs = zip(
        proof.states_TF.float().chunk(len(proof.layers), -1),
        states_TF.float().to(proof.states_TF.device).chunk(len(proof.layers), -1),
        strict=True,
    )
    return min(float(F.cosine_similarity(_varied(then), _varied(now), dim=-1).median()) for then, now in pairs)


def _varied(states_TH: Tensor) -> Tensor:
    rest_TH = states_TH[1:]
    return rest_TH - rest_TH.mean(0)


@dataclass(frozen=True, slots=True)
class ProofMemory:
    """Remembers on this machine which proofs of one head on one target held, for later processes.

    ``subject`` identifies the files of head and target, the target's kernels and dtype, and the versions of Parlay and
    its libraries. Each line of ``file`` is a hash of the subject and a drafter's class, the latest last.
    """

    subject: str
    file: Path

    @classmethod
    def of(cls, *parts: object) -> ProofMemory:
        """Return the memory for the subject with these ``parts``, in the user's cache."""
        return cls(repr(parts), user_cache() / "proofs.txt")

    def has(self, drafter: str) -> bool:
        """Whether the proof held for this class of drafter."""
        return self._line(drafter) in self._lines()

    def add(self, drafter: str) -> None:
        """Remember that the proof held; if the file can't be written, the next process repeats it."""
        lines = [*self._lines(), self._line(drafter)][-_MOST_REMEMBERED:]
        with suppress(OSError), written_whole(self.file) as part:
            part.write_text("\n".join(lines) + "\n", encoding="ascii")

    def _lines(self) -> list[str]:
        with suppress(OSError, UnicodeDecodeError):
            return self.file.read_text(encoding="ascii").split()
        return []

    def _line(self, drafter: str) -> str:
        return hashlib.sha256(f"{drafter} {self.subject}".encode()).hexdigest()
