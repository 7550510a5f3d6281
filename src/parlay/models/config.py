"""`DecoderConfig`, from which the native decoder is built: sizes, and the form of each layer.

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
"""The longest n-gram, in tokens, for which a table is read."""


class UnsupportedModel(ParlayError):
    """Raised when the model can't be run this way; the message names the architecture and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: base wavelength ``theta``, and how frequencies are scaled.

    linear: all are divided by ``factor``. llama3: scaled by wavelength, between ``low_freq_factor`` and
    ``high_freq_factor``. yarn (Peng et al. 2023): a ramp between ``beta_fast`` and ``beta_slow`` rotations, its ends
    rounded outwards if ``truncate``. divided: each pair's frequency is divided by its entry of ``divisors``. Cosines
    and sines are multiplied by ``attention_factor``. The first ``rotated`` numbers of a head are rotated; 0: all.
    Fields that a kind does not use keep their defaults.
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
    """How a draft head of one or more layers differs from a decoder; its rows read features instead of embeddings.

    Its logits are over ``draft_vocab_size`` tokens. ``beside``: the first layer's attention reads the embedding and the
    features side by side, each with its own norm (EAGLE-3). ``bare``: the first layer's attention and the LM head read
    hidden states without a norm (EAGLE-1). ``normed``: features are normed before the layer, whose attention then has
    no norm of its own. The last tap is the last layer's output before the final norm.
    """

    draft_vocab_size: int
    beside: bool = False
    bare: bool = False
    normed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of ``count`` gated feed-forwards with inner size ``size``; each row runs the ``chosen`` best.

    Router logits become weights by softmax: over the chosen experts if ``normalized``, else over all. With ``sigmoid``
    they become weights by a sigmoid, divided by their sum if ``normalized``. Weights are multiplied by ``scale``. A
    shared expert of inner size ``shared`` (0: none) runs for every row. With ``shared_gate`` its output is scaled by
    the sigmoid of its own logit. With ``bias`` the router and the experts' products have biases.

    With ``sigmoid`` experts are chosen by weight plus a bias of the expert, and only from the ``top_groups`` of
    ``groups`` equal groups whose two best experts have the largest sums (DeepSeek-V3).

    With ``beside`` a dense feed-forward of the layer also runs for every row, and reads the layer's normed hidden
    state. Router and experts then have norms of their own for their inputs, both outputs are normed, and each expert
    has a factor for its weights (Gemma 4).
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
    """How one layer computes; None or 0 turns a feature off unless said otherwise. A row sees the last ``window`` keys
    of its path, including its own; None: all.

    ``rope`` rotates queries and keys; None: the layer has no positions. Scores are products of queries and keys times
    ``scale`` (None: one over the root of the head's size). A score s becomes ``score_cap`` * tanh(s / ``score_cap``);
    0: no cap. With ``sinks`` each head has one more score, of a key without a value (gpt-oss). Norms of queries and
    keys are per head, or with ``wide_qk_norm`` over all heads together. Without ``pre_norms`` attention and
    feed-forward read the hidden state without a norm; with ``post_norms`` their outputs are normed before they are
    added. These outputs are multiplied by ``residual_scale``. ``experts`` replace the feed-forward.

    A layer may have its own ``kv_heads``, ``head_dim`` of all heads, and inner size ``mlp_size``; None: the config's.
    With ``value_norm`` values are normed without a weight. With ``keys_as_values`` the values are the keys before their
    norm and rotation. A layer with ``keys_of`` has no keys and values of its own, but uses those of that earlier layer,
    and its window. With ``out_scale`` the layer's output is multiplied by a weight.
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
    """A layer's number of key ``heads``, and the ``size`` of its key, value and query heads."""

    heads: int
    size: int


@dataclass(frozen=True, slots=True)
class NgramForm:
    """A table of embeddings of ``count`` frequent n-grams of 2 to ``longest`` tokens; ``fingerprint`` identifies it."""

    longest: int
    count: int
    fingerprint: str


class Shallow(NamedTuple):
    """Only the last ``layers`` layers run for rows after the first token ``after`` of a text."""

    layers: int
    after: int


class NgramLayers(NamedTuple):
    """The first ``layers`` layers see only the last ``tokens`` tokens of a row's path, so their output is looked up."""

    layers: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and layer forms of a decoder. Sizes count elements; ``max_context`` counts tokens.

    ``layers`` has the form of each layer. If it is empty, all layers are Llama's with ``rope``, ``qkv_bias`` and
    ``qk_norm``, as in all draft heads. Embeddings are multiplied by ``embedding_scale``, logits by ``logit_scale``. A
    logit x becomes ``logit_cap`` * tanh(x / ``logit_cap``); 0: no cap.

    With ``per_layer_size`` each layer reads that many more numbers per row: an embedding of the token, plus a
    projection of the first layer's input. A gate of the hidden state multiplies them; a projection of the result is
    normed and added at the end of the layer (Gemma 3n and 4).
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
    """The type of the checkpoint's weights."""
    head: HeadForm | None = None
    """Set for draft heads only."""
    layers: tuple[LayerForm, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0
    per_layer_size: int = 0
    canvas: CanvasSpec | None = None
    """How a diffusion model fills canvases; None for autoregressive models."""
    ngrams: NgramForm | None = None
    """The table of n-grams: the embedding of the longest frequent n-gram that ends at a token is added to the token's
    (SCONE)."""
    ngram_layers: NgramLayers | None = None
    """The first layers whose output is looked up; None: all layers run for each row."""
    shallow: Shallow | None = None
    """The last layers, the only ones that run for rows of an answer; None: all layers run for each row."""

    def __post_init__(self) -> None:
        if self.layers and len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} forms of layers for {self.num_layers} layers: give one for each")

    @property
    def forms(self) -> tuple[LayerForm, ...]:
        """The form of each layer."""
        return self.layers or (self.llama,) * self.num_layers

    @property
    def llama(self) -> LayerForm:
        """Llama's layer with this config's positions, biases and norms of heads."""
        return LayerForm(rope=self.rope, qkv_bias=self.qkv_bias, qk_norm=self.qk_norm)

    @property
    def plain(self) -> DecoderConfig:
        """The config with Llama's layers."""
        return replace(
            self, layers=(), embedding_scale=1.0, logit_scale=1.0, logit_cap=0.0, per_layer_size=0, canvas=None
        )

    def heads_of(self, form: LayerForm) -> KeyHeads:
        """The key heads of a layer of this form."""
        return KeyHeads(form.kv_heads or self.num_kv_heads, form.head_dim or self.head_dim)

    def mlp_size_of(self, form: LayerForm) -> int:
        """The inner size of the feed-forward of a layer of this form."""
        return form.mlp_size or self.intermediate_size

    @property
    def is_uneven(self) -> bool:
        """Whether layers differ in heads or inner sizes, use other layers' keys, or read per-layer inputs."""
        usual = KeyHeads(self.num_kv_heads, self.head_dim), self.intermediate_size
        own = any((self.heads_of(form), self.mlp_size_of(form)) != usual for form in self.forms)
        sharing = any(form.keys_of is not None or (form.experts and form.experts.beside) for form in self.forms)
        return own or sharing or self.per_layer_size > 0

    @property
    def output_size(self) -> int:
        """The number of logits of a row."""
        return self.head.draft_vocab_size if self.head else self.vocab_size


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``. Raises ParlayError if there is none."""
    if path.exists() and not path.is_file():
        raise ParlayError(f"can't read {path}: it is not a file")  # opening a pipe would block
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParlayError(f"no {path.name} in {path.parent}: is this a model's folder?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ParlayError(f"can't read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ParlayError(f"{path} must be a JSON object")
    return content
