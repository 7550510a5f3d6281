"""A start from which a model copies: an induction circuit in its first layers, which training leaves as it is.

Copying stands on induction heads (Olsson et al. 2022, arXiv:2209.11895), and a run of a few million tokens ends before
they form by themselves. So they are written down:

- heads of layer 0 attend one, two, ... eight tokens back and store the codes found there beside the token;
- in a deep model, two heads of layer 1 store what some twenty tokens further back are like on average;
- heads of the next layer compare what was stored at each place with the present text, and copy the token of the place
  that fits best, which is what came next last time. Some compare few tokens, which decides soon after a copy has begun;
  one compares all that is stored, which tells repetitive lines apart;
- where nothing fits, they rest on the token with which every text begins: its identity is zero, so nothing is copied;
- one more group there looks a token further than the others, so that later layers see what the copy will run into;
- where an answer begins there is nothing to compare yet: a group of the layer behind then copies from beginnings of
  lines. Which of them it should be is for training to find out, from all that the layers before say of those places.

The circuit reads and writes dimensions of the residual stream that nothing else may change before it has done its
work: `plant` says which entries of which parameters those are, and the optimizers hold them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from parlay.train.planting import (
    between,
    constant_key,
    look_back,
    orthonormal_columns,
    orthonormal_rows,
    padded,
    set_group,
    sharpen,
    turned,
)

Pins = dict[str, Tensor]
"""By name of a parameter: True where training must leave it as it is."""

_CONSTANT = 1.0  # residual dimension 0 holds this for every token: what position-only queries are made of
_EMBEDDING_STD = 0.5  # large, or what the layers learn to write soon drowns the token itself
_BEFORE, _AVERAGE, _MATCH, _BEGIN = 2.5, 1.6, 4.5, 1.6  # query and key norm weights: how sharp each layer's heads are
_FINAL = 0.16
_FURTHEST = 8  # tokens back in layer 0
_DISTANCE = 200  # tokens back, about where the text to copy is
_FADE = 0.05  # by how much less a fit counts for each token further back
_CENTRES = (14, 28)  # tokens back, where the two averages are taken
_AVERAGE_SIZE, _AVERAGE_FIT = 2.0, 2.0  # averages are short vectors: how much louder they are stored and compared
_RESTING, _SLOTS = 1, 2  # residual dimension that marks the resting token, and where the slots begin
_REST = 20.0  # size of that mark in a key: what else the resting token's key holds does not count
_FAST, _MIDDLE = (0.03, 9.0), (0.004, 0.13)  # radians per position: pairs that find one token, and a neighbourhood


@dataclass(frozen=True, slots=True)
class Match:
    """One group of heads: tokens and averages that it compares, the fit that it asks for, how loud it copies, and how
    many tokens beyond the next one it looks."""

    slots: int
    averages: int
    fit: float
    loud: float
    beyond: int = 0


_DEEP = (Match(8, 2, 0.7, 26.0), Match(6, 0, 0.75, 6.0), Match(3, 0, 0.62, 2.5), Match(7, 0, 0.8, 6.0, beyond=1))
_START = Match(1, 0, 0.5, 8.0)


@dataclass(frozen=True, slots=True)
class Marks:
    """Tokens that the circuit knows: the one with which every text begins (``rest``), a line break, and the marks
    around turns, the last of which comes before an answer. When texts are compared, these count as line breaks: an
    answer that repeats a text begins after such a mark, the text itself after a line break."""

    rest: int
    line: int
    turns: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Residual dimensions: a constant, the mark of the resting token, a slot per earlier token, the averages, the
    token's code by which texts are compared, its identity which is copied, and those that belong to everyone."""

    slot: int
    slots: int
    average: int
    averages: int
    identity: int
    width: int

    @classmethod
    def of(cls, config: Qwen3Config) -> Layout:
        """A slot for each head that looks back, together at most a fourth of the width; averages in deep models."""
        slots, width = min(_FURTHEST, config.num_attention_heads), config.hidden_size
        deep = config.num_hidden_layers > 3 and config.num_key_value_heads >= len(_DEEP)
        averages = len(_CENTRES) if deep else 0
        slot, identity = min(config.head_dim, width // (4 * slots)), min(max(32, width // 8), width // 4)
        return cls(slot, slots, width // 16, averages, identity, width)

    def place(self, back: int) -> slice:
        """Where the code of the token ``back`` places before is; ``back`` counts from 1."""
        return slice(_SLOTS + self.slot * (back - 1), _SLOTS + self.slot * back)

    def around(self, index: int) -> slice:
        """Where average ``index`` is."""
        start = _SLOTS + self.slot * self.slots + self.average * index
        return slice(start, start + self.average)

    @property
    def code(self) -> slice:
        """Where the token's code is."""
        start = self.around(self.averages).start
        return slice(start, start + self.slot)

    @property
    def token(self) -> slice:
        """Where the token's identity is."""
        return slice(self.code.stop, self.code.stop + self.identity)

    @property
    def beyond(self) -> slice:
        """Where the identity of the token after the next one is written: the last slots, once they have been read."""
        stop = self.around(0).start
        return slice(stop - self.identity, stop)

    @property
    def held(self) -> slice:
        """All dimensions that belong to the circuit."""
        return slice(0, self.token.stop)


@dataclass(frozen=True, slots=True)
class _Circuit:
    """What all parts share."""

    layout: Layout
    marks: Marks
    draw: torch.Generator


def plant(model: Qwen3ForCausalLM, marks: Marks, seed: int = 0) -> Pins:
    """Overwrites the start weights of ``model`` in place; it needs two layers and tied embeddings.

    All other heads and every MLP begin with zero output, and may become what they will.

    Raises:
        ValueError: for a model of one layer or with untied embeddings.
    """
    config = model.config
    layout = Layout.of(config)
    if config.num_hidden_layers < 2 or not config.tie_word_embeddings:
        raise ValueError("an induction circuit needs two layers and tied embeddings")
    draw = torch.Generator().manual_seed(seed)
    turn = float(config.rope_parameters["rope_theta"]) ** (-2 * torch.arange(config.head_dim // 2) / config.head_dim)
    layers, embedding = model.model.layers, model.model.embed_tokens.weight
    last = 2 if layout.averages else 1
    pins = {"model.embed_tokens.weight": (torch.arange(layout.width) < layout.held.stop).expand(embedding.shape)}
    with torch.no_grad():
        for layer in layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(_FINAL)
        circuit = _Circuit(layout, marks, draw)
        _plant_tokens(embedding, circuit)
        groups = [_plant_before(layers[0].self_attn, circuit, turn)]
        if layout.averages:
            groups.append(_plant_averages(layers[1].self_attn, circuit, turn))
        groups.append(_plant_matches(layers[last].self_attn, circuit, turn))
        if layout.averages:
            _plant_start(layers[last + 1].self_attn, embedding, circuit)
    for at, used in enumerate(groups):
        own = _pins(layers[at], layout, used, alone=at < last)
        pins.update({f"model.layers.{at}.{name}": mask for name, mask in own.items()})
    return pins


def _plant_tokens(embedding: Tensor, circuit: _Circuit) -> None:
    """A constant, room for what is stored, an identity of the same length for every token, and noise."""
    layout, marks = circuit.layout, circuit.marks
    embedding.normal_(0, _EMBEDDING_STD, generator=circuit.draw)
    embedding[:, 0] = _CONSTANT
    embedding[:, 1 : layout.code.start] = 0
    for part in (layout.code, layout.token):
        own = embedding[:, part]
        own *= _EMBEDDING_STD * own.shape[1] ** 0.5 / own.norm(dim=1, keepdim=True)
    for mark in marks.turns:
        embedding[mark, layout.code] = embedding[marks.line, layout.code]
    embedding[marks.rest, layout.code.start : layout.token.stop] = 0
    embedding[marks.rest, _RESTING] = 1


def _plant_before(attention: Qwen3Attention, circuit: _Circuit, turn: Tensor) -> list[int]:
    """Head h looks h + 1 back: constant query and key whose product, turned by position, peaks there."""
    layout = circuit.layout
    size = 2 * len(turn)
    fast = between(turn, _FAST)
    sharpen(attention, _BEFORE)
    groups = list(range(layout.slots // attention.num_key_value_groups))
    for group in groups:
        set_group(attention, group, constant_key(fast, layout.width), padded(_own_code(layout), size))
    for head in range(layout.slots):
        look_back(attention, head, head + 1, fast, turn)
        attention.o_proj.weight[layout.place(head + 1), head * size : head * size + layout.slot] = torch.eye(
            layout.slot
        )
    return groups


def _plant_averages(attention: Qwen3Attention, circuit: _Circuit, turn: Tensor) -> list[int]:
    """The last group of heads takes averages; pairs of middle speed blur the place where it looks."""
    layout = circuit.layout
    size = 2 * len(turn)
    middle = between(turn, _MIDDLE)
    sharpen(attention, _AVERAGE)
    group = attention.config.num_key_value_heads - 1
    code = _code(layout.average, layout, circuit.draw)
    set_group(attention, group, constant_key(middle, layout.width), padded(_reading(code, layout), size))
    for index, centre in enumerate(_CENTRES):
        head = group * attention.num_key_value_groups + index
        look_back(attention, head, centre, middle, turn)
        stored = torch.eye(layout.average) * _AVERAGE_SIZE
        attention.o_proj.weight[layout.around(index), head * size : head * size + layout.average] = stored
    return [group]


def _plant_matches(attention: Qwen3Attention, circuit: _Circuit, turn: Tensor) -> list[int]:
    """Groups of heads that compare; in a shallow model one, over all slots, and the other groups stay free.

    Their slow pairs turn a little all the same, and of equal fits the nearer one would win. What is copied lies further
    back than what was just written, so that queries are made to meet keys best at `_DISTANCE`."""
    layout = circuit.layout
    sharpen(attention, _MATCH)
    matches = _DEEP if layout.averages else (Match(layout.slots, 0, 0.75, 5.0),)
    for group, match in enumerate(matches):
        query, key = _compared(layout, match)
        spread = _spread(attention.head_dim, len(query), circuit.draw)
        _plant_copy(attention, group, (turned(spread @ query, _DISTANCE, turn), spread @ key), match, circuit)
    return list(range(len(matches)))


def _plant_start(attention: Qwen3Attention, embedding: Tensor, circuit: _Circuit) -> None:
    """The first group of a later layer: after the mark of an answer it looks for what follows a line break. It is not
    pinned, and not sharp, so that training can choose among those places."""
    layout, marks = circuit.layout, circuit.marks
    sharpen(attention, _BEGIN)
    mark = embedding[marks.turns[-1]].clone()
    mark[: layout.token.start] = 0
    line = embedding[marks.line, layout.code]
    spread = _spread(attention.head_dim, layout.slot, circuit.draw)
    query = torch.outer(line * _length(layout, _START) / line.norm(), mark / mark.dot(mark))
    key = torch.zeros(layout.slot, layout.width)
    key[:, layout.place(1)] = torch.eye(layout.slot)
    _plant_copy(attention, 0, (spread @ query, spread @ key), _START, circuit)


def _compared(layout: Layout, match: Match) -> tuple[Tensor, Tensor]:
    """What a query reads of the present text, and what a key reads of a place: rows that should agree."""
    codes = match.slots * layout.slot
    query, key = torch.zeros(2, codes + match.averages * layout.average, layout.width)
    for at in range(match.slots):
        rows = slice(at * layout.slot, (at + 1) * layout.slot)
        weight = (1 - _FADE * at) ** 0.5
        key[rows, layout.place(at + 1 + match.beyond)] = torch.eye(layout.slot) * weight
        if at:
            query[rows, layout.place(at)] = torch.eye(layout.slot) * weight
        else:
            query[rows] = _own_code(layout) * weight / _size_in_layer_0(layout)
    for index in range(match.averages):
        start = codes + index * layout.average
        for side in (query, key):
            side[start : start + layout.average, layout.around(index)] = torch.eye(layout.average) * _AVERAGE_FIT
    return query, key


def _length(layout: Layout, match: Match) -> float:
    """How long the compared part of a query or key is, about: codes as they were stored, averages half of that."""
    codes = sum(1 - _FADE * at for at in range(match.slots))
    averages = match.averages * (_AVERAGE_FIT * _AVERAGE_SIZE / 4) ** 2
    return math.sqrt(codes + averages) / _size_in_layer_0(layout)


def _size_in_layer_0(layout: Layout) -> float:
    """Root mean square of what enters layer 0, by which its norm divides."""
    return math.sqrt(_EMBEDDING_STD**2 + (_CONSTANT - _EMBEDDING_STD**2) / layout.width)


def _spread(size: int, codes: int, draw: torch.Generator) -> Tensor:
    """``[size, codes]``: takes codes to pairs of dimensions that hardly turn with position, all but the slowest."""
    half, slow = size // 2, max(1, 9 * size // 32 - 1)
    place = torch.cat([torch.arange(half - 1 - slow, half - 1), torch.arange(size - 1 - slow, size - 1)])
    spread = torch.zeros(size, codes)
    spread[place] = orthonormal_columns(len(place), codes, draw) * max(1.0, codes / len(place)) ** 0.5
    return spread


def _plant_copy(
    attention: Qwen3Attention, group: int, compared: tuple[Tensor, Tensor], match: Match, circuit: _Circuit
) -> None:
    """The heads of one group attend where a key fits a query, or rest, and write the identity of what they see."""
    (query, key), layout = compared, circuit.layout
    size, heads = attention.head_dim, attention.num_key_value_groups
    length = _length(layout, match)
    query[size // 2 - 1, 0] = length * match.fit
    key[size // 2 - 1, _RESTING] = length * _REST
    copy = orthonormal_rows(min(size, layout.identity), layout.identity, circuit.draw)
    set_group(attention, group, key, padded(_reading(copy, layout), size))
    place = layout.beyond if match.beyond else layout.token
    for head in range(group * heads, (group + 1) * heads):
        attention.q_proj.weight[head * size : (head + 1) * size] = query
        attention.o_proj.weight[:, head * size : (head + 1) * size] = 0
        attention.o_proj.weight[place, head * size : head * size + len(copy)] = copy.T * match.loud / heads


def _pins(layer: Qwen3DecoderLayer, layout: Layout, planted: Sequence[int], *, alone: bool) -> Pins:
    """What holds in one layer: where the planted groups of heads look and what they write, how they see the circuit's
    dimensions and, before the circuit ends (``alone``), that nothing else writes into those."""
    attention = layer.self_attn
    size, heads = attention.head_dim, attention.num_key_value_groups
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")
    linears = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, layer.mlp.down_proj)
    query, key, value, out, down = (torch.zeros_like(linear.weight, dtype=torch.bool) for linear in linears)
    for group in planted:
        key[group * size : (group + 1) * size] = True
        value[group * size : (group + 1) * size] = True
        query[group * heads * size : (group + 1) * heads * size] = True
        out[:, group * heads * size : (group + 1) * heads * size] = True
    if alone:
        out[layout.held] = down[layout.held] = True
    pins = {f"{name}.weight": mask for name, mask in zip(names, (query, key, value, out, down), strict=True)}
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        pins[f"{name}.weight"] = torch.ones(size, dtype=torch.bool)
    pins["input_layernorm.weight"] = torch.arange(layout.width) < layout.held.stop
    return pins


def _own_code(layout: Layout) -> Tensor:
    """Rows that read the token's code, to a length of about 1."""
    rows = torch.zeros(layout.slot, layout.width)
    rows[:, layout.code] = torch.eye(layout.slot) / (_EMBEDDING_STD * math.sqrt(layout.slot))
    return rows


def _code(size: int, layout: Layout, draw: torch.Generator) -> Tensor:
    """``[size, identity]``: takes an identity to a code of length about 1."""
    return orthonormal_rows(size, layout.identity, draw) / (_EMBEDDING_STD * math.sqrt(size))


def _reading(code: Tensor, layout: Layout) -> Tensor:
    """Value rows that read the code of the token."""
    rows = torch.zeros(len(code), layout.width)
    rows[:, layout.token] = code
    return rows
