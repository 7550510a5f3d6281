"""The record of a family of models, and how configs of several families say which layers have windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from parlay.models.config import DecoderConfig, Json, LayerForm, UnsupportedModel
from parlay.types import CanvasSpec

Complete = Callable[[Json, DecoderConfig, LayerForm], DecoderConfig]
"""``(raw, config, usual)``: the config with what config.json says in the family's own words.

``usual`` is the form of layers as far as words that all families share say it."""


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files have the family: its name there, and whether rows of queries and keys lie in pairs.

    Rows of a pair turn together. Where they don't lie in pairs they lie in halves, as on the Hub.
    """

    name: str
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts that an architecture implies without a field in config.json, and how its files name weights.

    ``names`` has those that differ from Llama's, which the decoder uses, as parts of names, after ``prefixes`` were
    replaced. ``norm_offset`` is added to the weights of norms in checkpoints. ``said`` puts config.json in Llama's
    words.
    """

    architecture: str
    max_context: int
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    activation: str = "silu"
    complete: Complete = lambda raw, config, usual: with_layers(config, usual, [None] * config.num_layers)
    said: Callable[[Json], Json] = lambda raw: raw
    prefixes: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    gguf: GgufForm | None = None
    canvas: CanvasSpec | None = None
    """How its models usually fill canvases, if they are diffusion models."""

    def renamed(self, name: str) -> str:
        """The decoder's name of a weight that the family's checkpoints call ``name``."""
        for prefix, ours in self.prefixes.items():
            name = name.replace(prefix, ours)
        part = next((part for part in self.names if part in name), None)
        return name if part is None else name.replace(part, self.names[part])


def with_layers(config: DecoderConfig, usual: LayerForm, windows: Sequence[int | None]) -> DecoderConfig:
    """The config with layers of the ``usual`` form, each with its window. One that hides no key counts as none."""
    sizes = [None if window is None or window >= config.max_context else int(window) for window in windows]
    if any(size is not None and size < 1 for size in sizes):
        raise ValueError(f"a sliding window of {min(size for size in sizes if size is not None)} tokens")
    forms = tuple(replace(usual, window=size) for size in sizes)
    return config if forms == config.forms else replace(config, layers=forms)


def windows_by_type(raw: Json, config: DecoderConfig, window: int | None, usual: Sequence[bool]) -> list[int | None]:
    """Windows of the layers that ``layer_types`` calls sliding; where it is missing, ``usual`` says which slide.

    Raises UnsupportedModel for other types of layers than full and sliding attention.
    """
    types = raw.get("layer_types")
    if types is None:
        return [window if slides else None for slides in usual]
    unknown = next((kind for kind in types if kind not in ("full_attention", "sliding_attention")), None)
    if unknown is not None:
        raise UnsupportedModel(
            f"{config.architecture}: layers of {unknown!r:.40} are not supported by the native decoder"
        )
    return [window if kind == "sliding_attention" else None for kind in types]
