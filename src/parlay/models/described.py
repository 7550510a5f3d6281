"""What a model's files say of it beside its weights, read without loading it: sizes and the chat template."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from parlay.models.config import UnsupportedModel, read_json
from parlay.models.facts import Stamp, stamps
from parlay.models.loading import load_template, read_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Counts of tokens, of elements of a hidden state, and of layers; None where the files do not tell.

    ``template`` is all chat templates as one text; empty where there is none.
    """

    max_context: int | None
    vocab_size: int | None
    hidden_size: int | None
    num_layers: int | None
    template: str


def describe(path: Path) -> Description:
    """What the files of a folder, or a GGUF file, say. They are read again only after they have changed.

    Raises ParlayError for files that are no model, OSError for what can't be read.
    """
    return _read(path, stamps(path))


@lru_cache(maxsize=64)
def _read(path: Path, files: tuple[Stamp, ...]) -> Description:
    del files  # they tell when what is kept is old
    try:
        config = read_config(path)
    except UnsupportedModel:
        if path.is_file():
            raise
        return _as_transformers_calls_it(path)
    return Description(
        max_context=config.max_context,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        template=load_template(path),
    )


def _as_transformers_calls_it(folder: Path) -> Description:
    """Of a model that the native decoder does not run; older architectures have names of their own."""
    said = read_json(folder / "config.json")

    def size(*names: str) -> int | None:
        return next((said[name] for name in names if isinstance(said.get(name), int)), None)

    return Description(
        max_context=size("max_position_embeddings", "n_positions", "max_seq_len"),
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size", "n_embd", "d_model"),
        num_layers=size("num_hidden_layers", "n_layer", "n_layers"),
        template=load_template(folder),
    )
