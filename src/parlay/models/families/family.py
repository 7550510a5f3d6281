"""The record of a family of models, and what configs of several families say in the same words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from parlay.models.config import DecoderConfig, Json, LayerForm, UnsupportedModel
from parlay.types import CanvasSpec

if TYPE_CHECKING:  # families are known before torch is loaded, which takes a second
    from torch import Tensor

    from parlay.models.weights.shapes import Weight

IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Beginnings of the tensors that models of text and images have for images."""
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Beginnings of their tensors for text, and what the decoder calls these."""
REPLAYED = "drafts are chains, replayed from a snapshot where some of one are rejected"
"""What becomes of drafts for models with a state, which transformers runs."""
Complete = Callable[[Json, DecoderConfig, LayerForm], DecoderConfig]
"""``(raw, config, usual)``: the config with what config.json says in the family's own words.

``usual`` is the form of layers as far as words that all families share say it. A GGUF file's keys come here, too, in
the words of config.json."""
Regroup = Callable[["Mapping[str, Tensor]"], "Mapping[str, Weight]"]
"""A checkpoint's tensors, already renamed, as weights, where the family stores several together in a way of its own."""


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files have the family: its name there, and whether rows of queries and keys lie in pairs.

    Rows of a pair turn together. Where they don't lie in pairs they lie in halves, as on the Hub. ``keys`` has the
    architecture's own keys with their names in config.json, ``names`` the tensors of a layer that are not Llama's, with
    the decoder's names. ``said`` completes config.json's words with what files of the family leave unsaid, by the names
    of the file's tensors. Keys of ``lists`` may have a number for each layer.
    """

    name: str
    interleaved: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    said: Callable[[Json, DecoderConfig, Collection[str]], Json] = lambda raw, config, tensors: raw
    lists: tuple[str, ...] = ()
    truncate: bool = True
    """Whether the ends of yarn's ramp are rounded, which no key says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Facts that an architecture implies without a field in config.json, and how its files name weights.

    ``names`` has those that differ from Llama's, which the decoder uses, as parts of names, after ``prefixes`` were
    replaced. ``norm_offset`` is added to the weights of norms in checkpoints. ``said`` puts config.json in Llama's
    words. ``keys`` are the family's own keys of config.json that bear on the arithmetic, ``left_out`` the beginnings of
    tensors that text needs not, where ``{layers}`` stands for the number of layers. ``rotated`` is the share of a head
    that turns with positions. ``interleaved``: rows of queries and keys that turn together are neighbours.
    """

    architecture: str
    max_context: int
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    rotated: float = 1.0
    activation: str = "silu"
    complete: Complete = lambda raw, config, usual: with_layers(config, usual, [None] * config.num_layers)
    said: Callable[[Json], Json] = lambda raw: raw
    keys: tuple[str, ...] = ()
    prefixes: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    regroup: Regroup | None = None
    norm_offset: float = 0.0
    interleaved: bool = False
    quantized: tuple[str, ...] = ()
    """Methods of quantization_config that ``regroup`` reads."""
    gguf: GgufForm | None = None
    canvas: CanvasSpec | None = None
    """How its models usually fill canvases, if they are diffusion models."""
    models: str = ""
    """What people call its models, for the table of families."""
    note: str = ""
    """A limit that users should know."""

    def renamed(self, name: str) -> str:
        """The decoder's name of a weight that the family's checkpoints call ``name``."""
        for prefix, ours in self.prefixes.items():
            name = name.replace(prefix, ours)
        part = next((part for part in self.names if part in name), None)
        return name if part is None else name.replace(part, self.names[part])


def with_layers(config: DecoderConfig, usual: LayerForm, windows: Sequence[int | None]) -> DecoderConfig:
    """The config with layers of the ``usual`` form, each with its window; see `with_forms`."""
    return with_forms(config, [replace(usual, window=size) for size in windows])


def with_forms(config: DecoderConfig, forms: Sequence[LayerForm]) -> DecoderConfig:
    """The config with layers of these forms. A window that hides no key counts as none."""
    sizes = [None if form.window is None or form.window >= config.max_context else int(form.window) for form in forms]
    if any(size is not None and size < 1 for size in sizes):
        raise ValueError(f"a sliding window of {min(size for size in sizes if size is not None)} tokens")
    layers = tuple(replace(form, window=size) for form, size in zip(forms, sizes, strict=True))
    return config if layers == config.forms else replace(config, layers=layers)


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


def all_but_every(period: int, layers: int) -> list[bool]:
    """Which layers slide where the last of every ``period`` sees all keys; 1: none slides."""
    return [bool((layer + 1) % period) for layer in range(layers)]


def rope_by_type(raw: Json) -> Json:
    """The config with the positions of full attention as its own, where ``rope_parameters`` has them by type of layer.

    Those of sliding attention become ``rope_local_base_freq``; raises UnsupportedModel where they are scaled, too.
    """
    said = raw.get("rope_parameters")
    if not isinstance(said, Mapping) or "full_attention" not in said:
        return raw
    local = said.get("sliding_attention") or {}
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedModel(f"positions of sliding layers scaled by {kind!r:.40} are not supported")
    return {
        **raw,
        "rope_parameters": said["full_attention"],
        "rope_local_base_freq": local.get("rope_theta", raw.get("rope_local_base_freq")),
    }
