"""The record of a family of models, and helpers for configs that several families share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from parlay.models.config import DecoderConfig, Json, LayerForm, UnsupportedModel
from parlay.types import CanvasSpec

if TYPE_CHECKING:  # importing torch takes a second, and families are needed before that
    from torch import Tensor

    from parlay.models.weights.shapes import Weight

IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
"""Prefixes of the image tensors in models of text and images."""
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Prefixes of their text tensors, and the decoder's names for these."""
REPLAYED = "drafts are chains; after a rejection the state is restored from a snapshot"
"""How drafts work for models with a recurrent state, which transformers runs."""
Complete = Callable[[Json, DecoderConfig, LayerForm], DecoderConfig]
"""Completes a config: ``(raw, config, usual)`` to the config with the family's own fields of config.json.

``usual`` is the layer form that the fields shared by all families give. The keys of a GGUF file come here, too, under
their names in config.json.
"""
Regroup = Callable[["Mapping[str, Tensor]"], "Mapping[str, Weight]"]
"""Turns a checkpoint's renamed tensors into weights, for families that store several in one tensor."""


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files store the family: its name there, and the order of query and key rows.

    With ``interleaved`` two rows that rotate together are neighbours; else they are half a head apart, as on the Hub.
    ``keys`` maps the architecture's own keys to their names in config.json. ``names`` maps tensors of a layer, where
    they differ from Llama's, to the decoder's names. ``normalize`` adds fields of config.json that the family's files
    leave out; it gets the names of the file's tensors. The keys in ``lists`` may have one number per layer.
    """

    name: str
    interleaved: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    normalize: Callable[[Json, DecoderConfig, Collection[str]], Json] = lambda raw, config, tensors: raw
    lists: tuple[str, ...] = ()
    truncate: bool = True
    """Whether the ends of yarn's ramp are rounded; no key of the file says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An architecture: its properties that config.json has no field for, and its names of weights.

    ``names`` maps parts of weight names to Llama's, which the decoder uses; ``prefixes`` are replaced first.
    ``norm_offset`` is added to the checkpoint's norm weights. ``normalize`` translates config.json to Llama's names.
    ``keys`` are the family's own keys of config.json that change the arithmetic. ``left_out`` are prefixes of tensors
    that text does not need, in which ``{layers}`` stands for the number of layers. ``rotated`` is the share of a head
    that is rotated. ``interleaved``: query and key rows that rotate together are neighbours.
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
    normalize: Callable[[Json], Json] = lambda raw: raw
    keys: tuple[str, ...] = ()
    prefixes: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    regroup: Regroup | None = None
    norm_offset: float = 0.0
    interleaved: bool = False
    quantized: tuple[str, ...] = ()
    """The quantization methods that ``regroup`` reads."""
    gguf: GgufForm | None = None
    canvas: CanvasSpec | None = None
    """How its models usually fill canvases; None unless they are diffusion models."""
    models: str = ""
    """The common names of its models, for the table of families."""
    note: str = ""
    """A limit that users should know."""

    def renamed(self, name: str) -> str:
        """The decoder's name of a weight that the checkpoint calls ``name``."""
        for prefix, ours in self.prefixes.items():
            name = name.replace(prefix, ours)
        part = next((part for part in self.names if part in name), None)
        return name if part is None else name.replace(part, self.names[part])


def with_layers(config: DecoderConfig, usual: LayerForm, windows: Sequence[int | None]) -> DecoderConfig:
    """The config with layers of the ``usual`` form, each with its own window; see `with_forms`."""
    return with_forms(config, [replace(usual, window=size) for size in windows])


def with_forms(config: DecoderConfig, forms: Sequence[LayerForm]) -> DecoderConfig:
    """The config with layers of these forms. A window as long as the context counts as none."""
    sizes = [None if form.window is None or form.window >= config.max_context else int(form.window) for form in forms]
    if any(size is not None and size < 1 for size in sizes):
        raise ValueError(f"a sliding window of {min(size for size in sizes if size is not None)} tokens")
    layers = tuple(replace(form, window=size) for form, size in zip(forms, sizes, strict=True))
    return config if layers == config.forms else replace(config, layers=layers)


def windows_by_type(raw: Json, config: DecoderConfig, window: int | None, usual: Sequence[bool]) -> list[int | None]:
    """Windows of the layers that ``layer_types`` calls sliding; without that field ``usual`` says which ones slide.

    Raises UnsupportedModel for types of layers other than full and sliding attention.
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
    """Which layers slide if the last of every ``period`` sees all keys; with 1 none slides."""
    return [bool((layer + 1) % period) for layer in range(layers)]


def rope_by_type(raw: Json) -> Json:
    """Flatten ``rope_parameters`` that are given by type of layer: those of full attention become the config's.

    The base of sliding attention becomes ``rope_local_base_freq``. Raises UnsupportedModel if it is scaled, too.
    """
    declared = raw.get("rope_parameters")
    if not isinstance(declared, Mapping) or "full_attention" not in declared:
        return raw
    local = declared.get("sliding_attention") or {}
    kind = local.get("rope_type", "default")
    if kind != "default":
        raise UnsupportedModel(f"positions of sliding layers scaled by {kind!r:.40} are not supported")
    return {
        **raw,
        "rope_parameters": declared["full_attention"],
        "rope_local_base_freq": local.get("rope_theta", raw.get("rope_local_base_freq")),
    }
