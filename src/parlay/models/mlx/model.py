"""An mlx-lm model over a pool of slots: the runner sets its rows' positions and masks, and keys may lie in any slots.

mlx-lm's models ask their cache for the position of the first row, for a mask, and to store keys and values. The layers
of `MlxPool` answer with each row's position, the mask of `SlotRows`, and all slots. Rotary embeddings are wrapped, as
mlx-lm's own count positions up from one offset.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import torch
from mlx import nn
from mlx_lm.models import rope_utils
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model
from torch import Tensor

from parlay.models.config import UnsupportedModel, read_json
from parlay.models.slots import LEAST_SLOTS, SlotPool, SlotRows
from parlay.types import first_line

_log = logging.getLogger(__name__)
_ROTATIONS = (
    nn.RoPE,
    rope_utils.Llama3RoPE,
    rope_utils.YarnRoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.ProportionalRoPE,
)
_SPAN = 256
"""Attention reads slots up to a multiple of this, so that few shapes occur."""
_BARE_ROWS = 32
"""From this many rows without logits on, they run in a call of their own, as mlx-lm's LM head runs on all rows of a
call."""


class MlxFacts(NamedTuple):
    """Facts read from config.json and a first forward. ``tapped`` are the layers whose hidden states can be tapped."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    eos_ids: tuple[int, ...]
    dtype: str
    device: str
    tapped: frozenset[int]
    token_bytes: int
    """Bytes of a token's keys and values in all layers."""


class _Rotation:
    """A rotary embedding for rows at any positions."""

    def __init__(self, inner: nn.Module) -> None:
        self._inner = inner

    def __call__(self, x_BHND: Any, offset: Any = 0) -> Any:
        """Rotate rows by an array ``[N]`` of positions, or from an offset on, as the wrapped module does."""
        if not isinstance(offset, mx.array):
            return self._inner(x_BHND, offset=offset)
        return self._inner(x_BHND.transpose(2, 1, 0, 3), offset=offset).transpose(2, 1, 0, 3)


class _Tap:
    """Wraps a norm, and keeps its last input (or output, with ``after``)."""

    def __init__(self, norm: nn.Module, *, after: bool) -> None:
        self._norm, self._after = norm, after
        self.state_BNH: Any = None

    def __call__(self, x_BNH: Any) -> Any:
        normed_BNH = self._norm(x_BNH)
        self.state_BNH = normed_BNH if self._after else x_BNH
        return normed_BNH


class MlxPool(SlotPool):
    """The slots of an mlx-lm model's layers. ``windows`` are the most keys that a row sees in each layer; None: all."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__()
        self.layers = [_PoolLayer(self, window) for window in windows]
        self.positions_N = self.slots_N = self.seen_NK = self.distances_NK = mx.array([])
        self._places = np.zeros(LEAST_SLOTS, dtype=np.int32)

    def grow(self, capacity: int) -> None:
        self._places = np.pad(self._places, (0, capacity - self.capacity))
        super().grow(capacity)
        for layer in self.layers:
            layer.grow(capacity)

    def write_to(self, rows: SlotRows, part: slice) -> None:
        """Make the next forward run this part of the rows, with their positions and mask."""
        positions, slots = np.array(rows.positions[part], dtype=np.int32), np.array(rows.slots[part], dtype=np.int32)
        self._places[slots] = positions
        seen_NK = rows.seen_NK[part].numpy()
        used = np.flatnonzero(seen_NK.any(axis=0))[-1] + 1
        width = min(self.capacity, -(-int(used) // _SPAN) * _SPAN)
        self.positions_N, self.slots_N = mx.array(positions), mx.array(slots)
        self.seen_NK = mx.array(seen_NK[:, :width])
        self.distances_NK = self.positions_N[:, None] - mx.array(self._places[:width])[None]

    def arrays(self) -> list[Any]:
        """Return the keys and values of all layers."""
        return [array for layer in self.layers for array in (layer.keys, layer.values) if array is not None]


class _PoolLayer:
    """A layer's keys and values, each ``[1, H, K, D]``, with the interface of mlx-lm's caches."""

    def __init__(self, pool: MlxPool, window: int | None) -> None:
        self._pool, self._window = pool, window
        self.keys: Any = None
        self.values: Any = None

    @property
    def offset(self) -> Any:
        """Return the rows' positions ``[N]``."""
        return self._pool.positions_N

    def update_and_fetch(self, keys_BHND: Any, values_BHND: Any) -> tuple[Any, Any]:
        """Write rows ``[1, H, N, D]`` to their slots, and return all slots that some row sees."""
        if self.keys is None:
            self.keys, self.values = self._room(keys_BHND), self._room(values_BHND)
        slots_N, width = self._pool.slots_N, self._pool.seen_NK.shape[1]
        self.keys[:, :, slots_N] = keys_BHND
        self.values[:, :, slots_N] = values_BHND
        return self.keys[:, :, :width], self.values[:, :, :width]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask ``[N, K]``, True where a row sees a slot; of mlx-lm's arguments only the window matters."""
        window = window_size or self._window
        seen_NK = self._pool.seen_NK
        return seen_NK if window is None else seen_NK & (self._pool.distances_NK < window)

    def grow(self, capacity: int) -> None:
        if self.keys is not None:
            wider = [(0, 0), (0, 0), (0, capacity - self.keys.shape[2]), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, wider), mx.pad(self.values, wider)

    def _room(self, rows_BHND: Any) -> Any:
        batch, heads, _, size = rows_BHND.shape
        return mx.zeros((batch, heads, self._pool.capacity, size), dtype=rows_BHND.dtype)


class MlxModel:
    """A folder's model, loaded by mlx-lm. Raises UnsupportedModel if mlx-lm can't load it, or if it can't run over
    slots.

    ``device`` is that of `LoadOptions`, and must exist.
    """

    def __init__(self, folder: Path, name: str, device: Any) -> None:
        self.name, self._device = name, device
        with mx.stream(device):
            self._model, config = _loaded(folder, name)
            windows = _windows(self._model, name)
            _say_if_left_out(config, windows, name)
            self.pool = MlxPool(windows)
            _wrap_rotations(self._model)
            self._taps = _wrap_norms(self._model)
            self.facts = self._found(config)

    def full(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits ``[N, V]`` of a plain forward over the whole text, without the pool."""
        with mx.stream(self._device):
            return _as_tensor(self._model(mx.array([list(tokens)]))[0])

    def run(self, rows: SlotRows, wanted: Sequence[int], taps: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """Run rows, and write their keys and values to their slots: returns logits of the ``wanted`` rows and hidden
        states of all."""
        bare = wanted[0] if wanted else len(rows)
        parts = [slice(0, bare), slice(bare, len(rows))] if bare >= _BARE_ROWS else [slice(0, len(rows))]
        logits, states = list[Tensor](), list[dict[int, Tensor]]()
        with mx.stream(self._device):
            for part in parts:
                if part.start < part.stop:
                    chosen = [row - part.start for row in wanted if part.start <= row < part.stop]
                    logits_NV, found = self._run(rows, part, chosen, taps)
                    logits.append(logits_NV)
                    states.append(found)
        return torch.cat(logits), {tap: torch.cat([found[tap] for found in states]) for tap in taps}

    def _run(
        self, rows: SlotRows, part: slice, wanted: Sequence[int], taps: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        self.pool.write_to(rows, part)
        out_BNV = self._model(mx.array([rows.ids[part]]), cache=self.pool.layers)
        chosen = [out_BNV[0][mx.array(list(wanted))]] if wanted else []
        states = [self._taps[tap].state_BNH[0] for tap in taps]
        mx.eval(*chosen, *states, *self.pool.arrays())  # the LM head is never computed for rows without logits
        for tap in self._taps.values():
            tap.state_BNH = None
        empty_NV = torch.empty(0, out_BNV.shape[-1])
        return _as_tensor(chosen[0]) if chosen else empty_NV, {
            tap: _as_tensor(state) for tap, state in zip(taps, states, strict=True)
        }

    def _found(self, config: dict[str, Any]) -> MlxFacts:
        """Run two rows, and take the keys' shapes from them. Models of text and images describe the text in a part of
        the config."""
        text = config.get("text_config") or config
        slots = self.pool.take(2)
        seen_NK = torch.zeros(2, self.pool.capacity, dtype=torch.bool)
        seen_NK[:, list(slots)] = torch.tensor([[True, False], [True, True]])
        try:
            logits_NV, _ = self.run(SlotRows([0, 0], [0, 1], list(slots), seen_NK), [0, 1], ())
        except Exception as error:  # a foreign model may raise anything for an unknown cache
            raise UnsupportedModel(
                f"{self.name}: its model in mlx-lm runs over no cache of ours ({first_line(error)})"
            ) from error
        self.pool.drop(slots)
        arrays = self.pool.arrays()
        ends = config.get("eos_token_id", text.get("eos_token_id"))
        return MlxFacts(
            vocab_size=logits_NV.shape[1],
            hidden_size=int(text.get("hidden_size", 0)),
            num_layers=len(self.pool.layers),
            max_context=int(text.get("max_position_embeddings", 0)),
            eos_ids=tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),),
            dtype=str(arrays[0].dtype).removeprefix("mlx.core."),
            device=str(self._device),
            tapped=frozenset(self._taps),
            token_bytes=sum(array.nbytes for array in arrays) // self.pool.capacity,
        )


def chosen_device(name: str) -> Any:
    """Return the device of this name, or None if it does not exist here; ``auto`` is MLX's own choice."""
    if name == "auto":
        return mx.default_device()
    kind = mx.cpu if name == "cpu" else mx.gpu
    return mx.Device(kind) if mx.is_available(kind) else None


def _loaded(folder: Path, name: str) -> tuple[nn.Module, dict[str, Any]]:
    config = read_json(folder / "config.json")
    if "model_file" in config:
        raise UnsupportedModel(f"{name} brings code of its own (model_file in config.json), which Parlay never runs")
    if not str(config.get("model_type")).replace("-", "_").replace(".", "_").isidentifier():
        raise UnsupportedModel(f"{name}: config.json names no model_type")
    try:
        model, config = load_model(folder, model_config=_as_before(config))
    except Exception as error:  # a library may raise anything for invalid files
        raise UnsupportedModel(f"mlx-lm can't load {name}: {first_line(error)}") from error
    return model, config


def _as_before(config: dict[str, Any]) -> dict[str, Any]:
    """Move ``rope_parameters`` of transformers 5 to the older keys, which mlx-lm reads."""
    rope_fields = config.get("rope_parameters")
    if not isinstance(rope_fields, dict) or "rope_theta" in config:
        return {}
    rope = rope_fields.get("full_attention", rope_fields)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    found = {"rope_theta": rope.get("rope_theta"), "rope_scaling": scaling}
    found["partial_rotary_factor"] = rope.get("partial_rotary_factor")
    found["rope_local_base_freq"] = rope_fields.get("sliding_attention", {}).get("rope_theta")
    return {key: value for key, value in found.items() if value is not None and key not in config}


def _windows(model: nn.Module, name: str) -> list[int | None]:
    """Return the window of each layer. Raises UnsupportedModel for a cache that is not the keys and values of all
    tokens."""
    caches = make_prompt_cache(model)
    kinds = {type(cache).__name__ for cache in caches if type(cache) not in (KVCache, RotatingKVCache)}
    if kinds:
        raise UnsupportedModel(
            f"{name} keeps more than keys and values in mlx-lm ({', '.join(sorted(kinds))}), which can't be taken back "
            "where a draft fails: remove the runner"
        )
    return [cache.max_size if type(cache) is RotatingKVCache else None for cache in caches]


def _say_if_left_out(config: dict[str, Any], windows: Sequence[int | None], name: str) -> None:
    """Log a warning if config.json has a window that mlx-lm's model ignores."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and not any(windows):
        _log.warning(
            "%s: mlx-lm ignores the sliding window of %d tokens, so longer texts differ from those of other runners",
            name,
            window,
        )


def _wrap_rotations(model: nn.Module) -> None:
    for module in model.modules():
        for key, child in list(module.items()):
            if isinstance(child, _ROTATIONS):
                setattr(module, key, _Rotation(child))


def _wrap_norms(model: nn.Module) -> dict[int, _Tap]:
    """Tap each layer's input and the last norm's output, if these modules have their usual names."""
    taps = dict[int, _Tap]()
    for number, layer in enumerate(model.layers):
        if "input_layernorm" in layer:
            taps[number] = _Tap(layer.input_layernorm, after=False)
            layer.input_layernorm = taps[number]
    if "model" in model and "norm" in model.model:
        taps[len(model.layers)] = _Tap(model.model.norm, after=True)
        model.model.norm = taps[len(model.layers)]
    return taps


def _as_tensor(numbers: Any) -> Tensor:
    """Return the numbers as float32 in host memory."""
    return torch.from_numpy(np.array(numbers.astype(mx.float32)))
