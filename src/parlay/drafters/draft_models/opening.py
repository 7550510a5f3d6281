"""Opens the draft model that a strategy names, or the target's default draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from parlay.drafters.draft_models.draft_sequences import DraftJob
from parlay.drafters.resources import Resources
from parlay.options import NotNamed, UsageError
from parlay.types import Draft, Runner


def draft_name(source: str, resources: Resources, model: str) -> str:
    """``model``, or the target's default draft model. Raises NotNamed if strategy ``source`` has neither."""
    name = model or resources.default_draft
    if not name:
        raise NotNamed(
            f"strategy {source}: no draft model goes with this target: write {source}:model=NAME_OR_PATH, or give one "
            "with --draft-model"
        )
    return name


def open_writer(source: str, resources: Resources, name: str) -> Runner:
    """Open a draft model that writes token by token. Raises UsageError if it only fills canvases."""
    runner = resources.open_runner(name)
    if runner.spec.fills_only:
        raise UsageError(
            f"strategy {source}: {name} is a diffusion model, which can't draft token by token: choose another draft "
            "model, or the strategy canvas-draft"
        )
    return runner


def open_draft(source: str, resources: Resources, name: str, *, canvases: bool = False) -> Runner:
    """Open a draft model that writes token by token or, with ``canvases``, fills canvases.

    Raises UsageError if it can't, or if its vocabulary size is not the target's.
    """
    runner = resources.open_runner(name) if canvases else open_writer(source, resources, name)
    if canvases and runner.spec.canvas is None:
        raise UsageError(f"strategy {source}: {name} fills no canvases: choose a diffusion model, or draft-model")
    if runner.spec.vocab_size != resources.vocab_size:
        raise UsageError(
            f"strategy {source}: {name} has a vocabulary of {runner.spec.vocab_size} tokens and the target one of "
            f"{resources.vocab_size}; choose a draft model with the target's tokenizer"
        )
    return runner


class DraftWriter(Protocol):
    """Writes the drafts of all jobs together, forward by forward."""

    def write(self, jobs: Sequence[DraftJob]) -> list[Draft]: ...


@runtime_checkable
class EmbeddingRunner(Runner, Protocol):
    """A runner that can return the embeddings it reads for tokens, to make `Features` of them."""

    def embed(self, ids: Sequence[int]) -> Tensor:
        """The embeddings ``[N, H]`` of these tokens, as the first layer reads them."""
        ...
