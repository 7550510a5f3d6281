"""The record that the native decoder is built from: sizes, and the form of each layer.

All decoders share one shape: RMS norms, rotary positions, grouped-query attention, and a gated feed-forward. Families
differ in the forms of their layers; `parlay.models.families` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from parlay.types import CanvasSpec, ParlayError

RopeKind = Literal["default", "linear", "llama3", "yarn", "divided"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
Json = Mapping[str, Any]
LONGEST_NGRAM = 8
"""Most tokens of an n-gram for which a table is read."""


class UnsupportedModel(ParlayError):
    """The model can't be run this way; the message names the architecture and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: base wavelength ``theta`` and how its frequencies are stretched.

    linear: all divided by ``factor``. llama3: by wavelength, between ``low_freq_factor`` and ``high_freq_factor``.
    yarn (Peng et al. 2023): a ramp between ``beta_fast`` and ``beta_slow`` rotations, ramp ends rounded outwards if
    ``truncate``. divided: each pair's by its own of ``divisors``. Cosines and sines are multiplied by
    ``attention_factor``. Of a head's numbers the first ``rotated`` turn; 0: all. Numbers of other kinds keep their
    defaults.
    """

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    rotated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadForm:
    """How a draft head of one layer or more differs from a decoder; its rows read features in place of embeddings.

    Its logits are over ``draft_vocab_size`` tokens. ``beside``: the first layer's attention reads the embedding beside
    the features, each normed by itself (EAGLE-3). ``bare``: the first layer's attention and the LM head read hidden
    states that no norm has changed (EAGLE-1). ``normed``: features are normed before the layer, so its attention reads
    them as they are. The last tap is what leaves the last layer, before a norm.
    """

    draft_vocab_size: int
    beside: bool = False
    bare: bool = False
    normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of ``count`` gated feed-forwards of ``size`` inner numbers; each row runs the ``chosen`` best.

    A row's router logits become weights by softmax, over the chosen experts if ``normalized``, else over all; or by
    ``sigmoid``, divided by their sum if ``normalized``. Weights are multiplied by ``scale``. The ``shared`` expert of
    so many inner numbers (0: none) runs for every row; with ``shared_gate`` it is multiplied by the sigmoid of a logit
    of its own. With ``bias`` the router and the experts' products have biases.

    Only with ``sigmoid``: what is chosen by is each weight and a number of its expert beside it, and of ``groups``
    equal groups only the ``top_groups`` whose two best experts have the largest sums are open (DeepSeek-V3).

    With ``beside`` a feed-forward of the layer runs for every row, too, and reads what the layer's norm makes. Router
    and experts read the hidden state through norms of their own, what each of the two gives is normed, and each expert
    has a factor of its weights (Gemma 4).
    """

    count: int
    chosen: int
    size: int
    normalized: bool = True
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    scale: float = 1.0
    sigmoid: bool = False
    groups: int = 1
    top_groups: int = 1
    beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerForm:
    """How one layer computes. A row sees the last ``window`` keys of its path, its own included; None: all.

    ``rope`` turns queries and keys; None: the layer knows no positions. Scores are products of queries and keys times
    ``scale`` (None: one over the root of the head's size). A score s becomes ``score_cap`` * tanh(s / ``score_cap``);
    0: it stays. With ``sinks`` each head has one score more, of a key without a value (gpt-oss). Norms of queries and
    keys are of each head, or with ``wide_qk_norm`` of all heads together. Without ``pre_norms`` attention and
    feed-forward read the hidden state as it is; with ``post_norms`` what they give is normed before it is added. What
    is added is multiplied by ``residual_scale``. ``experts`` take the place of the feed-forward.

    Layers may differ in ``kv_heads``, in the size ``head_dim`` of all heads, and in the inner size ``mlp_size``; None:
    the config's. With ``value_norm`` values are normed, too, without a weight. With ``keys_as_values`` they are the
    keys before these are normed and turned. A layer with ``keys_of`` has no keys and values, but sees those of that
    earlier layer, whose window is its own. With ``out_scale`` what leaves the layer is multiplied by a weight.
    """

    window: int | None = None
    rope: RopeConfig | None = RopeConfig()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    activation: Activation = "silu"
    scale: float | None = None
    score_cap: float = 0.0
    sinks: bool = False
    residual_scale: float = 1.0
    experts: Experts | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_size: int | None = None
    value_norm: bool = False
    keys_as_values: bool = False
    keys_of: int | None = None
    out_scale: bool = False


class KeyHeads(NamedTuple):
    """How many ``heads`` of keys a layer has, each of ``size`` numbers, as its value and query heads."""

    heads: int
    size: int


@dataclass(frozen=True, slots=True)
class NgramForm:
    """A table of the embeddings of ``count`` frequent n-grams of 2 to ``longest`` tokens; ``fingerprint`` names it."""

    longest: int
    count: int
    fingerprint: str


class Shallow(NamedTuple):
    """How many of the last layers run for rows after the first token ``after`` of a text."""

    layers: int
    after: int


class NgramLayers(NamedTuple):
    """How many first ``layers`` see the last ``tokens`` of a row's path alone: what leaves them is looked up."""

    layers: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder. Sizes count elements; ``max_context`` counts tokens.

    ``layers`` has the form of each layer. Where it is empty, all are Llama's layers with ``rope``, ``qkv_bias`` and
    ``qk_norm``, as those of draft heads always are. Embeddings are multiplied by ``embedding_scale``, logits by
    ``logit_scale``. A logit x becomes ``logit_cap`` * tanh(x / ``logit_cap``); 0: it stays.

    With ``per_layer_size`` each layer reads so many numbers of each row besides the hidden state: the token's own, and
    some that a product makes of what enters the first layer. The layer's gate of the hidden state multiplies them, and
    what a product makes of that is normed and added at the end of the layer (Gemma 3n and 4).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context: int
    rope: RopeConfig = RopeConfig()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    """What the checkpoint says its weights are stored in."""
    head: HeadForm | None = None
    """None for all models that are not draft heads."""
    layers: tuple[LayerForm, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    per_layer_size: int = 0
    canvas: CanvasSpec | None = None
    """How a diffusion model fills canvases; None for models that write token by token."""
    ngrams: NgramForm | None = None
    """What is added to the embedding of a token: that of the longest frequent n-gram that ends there (SCONE)."""
    ngram_layers: NgramLayers | None = None
    """First layers that are looked up; None: all layers run for each row."""
    shallow: Shallow | None = None
    """Last layers that alone run for rows of an answer; None: all layers run for each row."""

    def __post_init__(self) -> None:
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} forms of layers for {self.num_layers} layers: give one for each")

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """The form of each layer, given or Llama's."""
        return self.layers or (self.llama,) * self.num_layers

    @property
    def llama(self) -> LayerForm:
        """Llama's layer with these positions, biases and norms of heads."""
        return LayerForm(rope=self.rope, qkv_bias=self.qkv_bias, qk_norm=self.qk_norm)

    @property
    def plain(self) -> DecoderConfig:
        """The same sizes with Llama's layers."""
        return replace(
            self, layers=(), embedding_scale=1.0, logit_scale=1.0, logit_cap=0.0, per_layer_size=0, canvas=None
        )

    def heads_of(self, form: LayerForm) -> KeyHeads:
        """The heads of such a layer."""
        return KeyHeads(form.kv_heads or self.num_kv_heads, form.head_dim or self.head_dim)

    def mlp_size_of(self, form: LayerForm) -> int:
        """Inner numbers of such a layer's feed-forward."""
        return form.mlp_size or self.intermediate_size

    @property
    def is_uneven(self) -> bool:
        """Whether layers have heads or inner sizes of their own, see others' keys, or read numbers of each layer."""
        usual = KeyHeads(self.num_kv_heads, self.head_dim), self.intermediate_size
        own = any((self.heads_of(form), self.mlp_size_of(form)) != usual for form in self.forms)
        sharing = any(form.keys_of is not None or (form.experts and form.experts.beside) for form in self.forms)
        return own or sharing or self.per_layer_size > 0

    @property
    def output_size(self) -> int:
        """Logits of a row."""
        return self.head.draft_vocab_size if self.head else self.vocab_size


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; ParlayError with one line when there is none."""
    if path.exists() and not path.is_file():
        raise ParlayError(f"can't read {path}: it is no file")  # a pipe would be waited for
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParlayError(f"no {path.name} in {path.parent}: is this a model's folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ParlayError(f"can't read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ParlayError(f"{path} holds no JSON object")
    return content
