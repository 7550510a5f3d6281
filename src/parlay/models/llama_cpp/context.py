"""A llama.cpp context as its runner uses it: cells of keys and values, and batches of rows that fill them.

llama.cpp is called through the package llama-cpp-python, which is imported when a file is opened.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from parlay.models.config import UnsupportedModel
from parlay.types import ParlayError, first_line

ROWS = 512
"""Most rows of one ``llama_decode`` call."""
_STEP = 256
"""llama.cpp rounds the number of cells up to a multiple of this."""
_ALL_LAYERS = 1 << 10
_CACHE_TYPES = {"auto": 1, "float32": 0, "bfloat16": 30, "q8_0": 8}
"""ggml's numbers of the cache types; auto is llama.cpp's default, float16."""
_CACHE_BYTES = {"auto": 2.0, "float32": 4.0, "bfloat16": 2.0, "q8_0": 34 / 32}
_NO_PACKAGE = (
    "the runner llama.cpp needs the package llama-cpp-python: pip install 'parlay[llama-cpp]', which compiles llama.cpp"
)
_log = logging.getLogger(__name__)


class BatchRow(NamedTuple):
    """A row of a batch; it sees the cells of its first sequence up to its position, and its cell joins all its
    sequences."""

    token: int
    position: int
    sequences: tuple[int, ...]
    wanted: bool
    """Whether its logits are wanted."""


class Decoded(NamedTuple):
    """``logits_WV``, float32, of the wanted rows, and if asked for the LM head's inputs ``states_NH`` of all rows."""

    logits_WV: Tensor
    states_NH: Tensor | None


@dataclass(frozen=True, slots=True)
class ContextFacts:
    """A model and its context of ``cells`` cells, which the sequences 0 to ``sequences`` - 1 share."""

    vocab_size: int
    max_context: int
    hidden_size: int
    num_layers: int
    eos_ids: tuple[int, ...]
    windows: bool
    """Whether some layers have sliding windows, so that llama.cpp may drop earlier keys."""
    cells: int
    sequences: int
    cell_bytes: int
    kernels: str


class Context(Protocol):
    """llama.cpp's functions that the runner needs: running rows, and managing cells. A cell belongs to all sequences
    whose path it is on."""

    @property
    def facts(self) -> ContextFacts: ...

    def decode(self, rows: Sequence[BatchRow], states: bool) -> Decoded:
        """Run rows in this order; each sequence's positions continue its cells."""
        ...

    def copy(self, source: int, target: int, end: int, first: int = 0) -> None:
        """Add ``source``'s cells at positions ``first`` to ``end`` - 1 to ``target``."""
        ...

    def remove(self, sequence: int, first: int) -> None:
        """Remove a sequence's cells from position ``first`` on; cells of no other sequence are freed."""
        ...

    def positions(self, sequence: int) -> tuple[int, int]:
        """The first and last position of a sequence; -1 and -1 if it has no cells."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOptions:
    """How a file is opened; ``cells`` maps the bytes of a cell and the model's context to the number of cells."""

    cells: Callable[[int, int], int]
    threads: int
    offload: bool
    cached: str = "auto"


def package() -> Any:
    """Import llama-cpp-python. Raises ParlayError if it is missing, or can't load its library."""
    try:
        import llama_cpp
    except ImportError:
        raise ParlayError(_NO_PACKAGE) from None
    except (OSError, RuntimeError) as error:  # its shared library is missing or for another system
        raise ParlayError(f"llama-cpp-python can't load llama.cpp ({first_line(error)}): install it again") from None
    return llama_cpp


class LlamaContext(Context):
    """A GGUF file opened by llama.cpp, which is freed with this object.

    Raises UnsupportedModel for a file that llama.cpp does not load, and for a model whose cache is not only keys and
    values, as rejected drafts could not be removed.
    """

    def __init__(self, path: Path, options: ContextOptions) -> None:
        self._lib = lib = package()
        heard = _heard(lib)
        heard.clear()
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = _ALL_LAYERS if options.offload else 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise UnsupportedModel(f"llama.cpp can't load {path}: {heard.reason()}")
        weakref.finalize(self, lib.llama_model_free, self._model)
        self._refuse(path)
        self._facts, self._context = self._opened(path, options, heard)
        weakref.finalize(self, lib.llama_free, self._context)  # finalizers run in reverse order
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(ROWS, 0, self._facts.sequences)
        weakref.finalize(self, lib.llama_batch_free, self._batch)

    @property
    def facts(self) -> ContextFacts:
        return self._facts

    def decode(self, rows: Sequence[BatchRow], states: bool) -> Decoded:
        """See `Context.decode`. Raises ParlayError if llama.cpp refuses the rows."""
        parts = [self._decode(rows[begin : begin + ROWS], states) for begin in range(0, len(rows), ROWS)]
        found = [part.states_NH for part in parts if part.states_NH is not None]
        return Decoded(torch.cat([part.logits_WV for part in parts]), torch.cat(found) if states else None)

    def copy(self, source: int, target: int, end: int, first: int = 0) -> None:
        if first < end:
            self._lib.llama_memory_seq_cp(self._memory, source, target, first, end)

    def remove(self, sequence: int, first: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._memory, sequence, first, -1):
            raise ParlayError(f"llama.cpp can't take tokens from {first} on back, so nothing can be verified with it")

    def positions(self, sequence: int) -> tuple[int, int]:
        lib = self._lib
        return (
            lib.llama_memory_seq_pos_min(self._memory, sequence),
            lib.llama_memory_seq_pos_max(self._memory, sequence),
        )

    def _refuse(self, path: Path) -> None:
        lib, model = self._lib, self._model
        kinds = {
            "is recurrent": lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model),
            "has an encoder": lib.llama_model_has_encoder(model),
            "fills places in any order": lib.llama_model_is_diffusion(model),
        }
        if kind := next((kind for kind, so in kinds.items() if so), None):
            raise UnsupportedModel(f"{path} {kind}, which Parlay can't run through llama.cpp: remove the runner")

    def _opened(self, path: Path, options: ContextOptions, heard: _Heard) -> tuple[ContextFacts, Any]:
        """Open the context, whose number of cells depends on the model."""
        lib, model = self._lib, self._model
        context, cell_bytes = lib.llama_model_n_ctx_train(model), self._cell_bytes(options.cached)
        cells = options.cells(cell_bytes, context)
        params = lib.llama_context_default_params()
        params.n_ctx = -(-cells // _STEP) * _STEP
        params.n_batch = params.n_ubatch = ROWS
        params.n_seq_max = sequences = lib.llama_max_parallel_sequences()
        params.n_threads = params.n_threads_batch = options.threads
        params.type_k = params.type_v = _CACHE_TYPES[options.cached]
        if options.cached == "float32":
            params.flash_attn_type = 0  # it would round to float16
        params.kv_unified = params.swa_full = True  # sequences share cells, and windows allow truncating
        params.offload_kqv = params.op_offload = options.offload
        made = lib.llama_init_from_model(model, params)
        if not made:
            raise UnsupportedModel(f"llama.cpp can't open a context of {cells} tokens for {path}: {heard.reason()}")
        vocabulary = lib.llama_model_get_vocab(model)
        size = lib.llama_vocab_n_tokens(vocabulary)
        facts = ContextFacts(
            vocab_size=size,
            max_context=context,
            hidden_size=lib.llama_model_n_embd(model),
            num_layers=lib.llama_model_n_layer(model),
            eos_ids=tuple(token for token in range(size) if lib.llama_vocab_is_eog(vocabulary, token)),
            windows=lib.llama_model_n_swa(model) > 0,
            cells=cells,
            sequences=sequences,
            cell_bytes=cell_bytes,
            kernels=self._kernels(options),
        )
        return facts, made

    def _cell_bytes(self, cached: str) -> int:
        """Bytes of a token's keys and values in all layers."""
        lib, model = self._lib, self._model
        head = self._number("attention.key_length") or lib.llama_model_n_embd(model) // lib.llama_model_n_head(model)
        numbers = 2 * lib.llama_model_n_layer(model) * lib.llama_model_n_head_kv(model) * head
        return int(numbers * _CACHE_BYTES[cached])

    def _number(self, key: str) -> int:
        """A numeric key of the model's architecture; 0 if it is missing."""
        architecture = self._said("general.architecture")
        text = self._said(f"{architecture}.{key}")
        return int(text) if text.isdigit() else 0

    def _said(self, key: str) -> str:
        text = ctypes.create_string_buffer(256)
        self._lib.llama_model_meta_val_str(self._model, key.encode(), text, len(text))
        return text.value.decode(errors="replace")

    def _kernels(self, options: ContextOptions) -> str:
        text = ctypes.create_string_buffer(256)
        self._lib.llama_model_desc(self._model, text, len(text))
        where = "layers on the devices of its build" if options.offload else f"{options.threads} CPU threads"
        version = metadata.version("llama-cpp-python")
        return f"llama.cpp (llama-cpp-python {version}), {text.value.decode(errors='replace')}, {where}"

    def _decode(self, rows: Sequence[BatchRow], states: bool) -> Decoded:
        lib, batch, facts = self._lib, self._batch, self._facts
        batch.n_tokens = len(rows)
        for index, row in enumerate(rows):
            batch.token[index], batch.pos[index] = row.token, row.position
            batch.n_seq_id[index] = len(row.sequences)
            for place, sequence in enumerate(row.sequences):
                batch.seq_id[index][place] = sequence
            batch.logits[index] = row.wanted or states
        lib.llama_set_embeddings(self._context, states)
        if code := lib.llama_decode(self._context, batch):
            raise ParlayError(f"llama.cpp refuses a batch of {len(rows)} rows: {_heard(lib).reason()} (code {code})")
        wanted = [index for index, row in enumerate(rows) if row.wanted]
        count = len(rows) if states else len(wanted)
        if not count:
            lib.llama_synchronize(self._context)
            return Decoded(torch.empty(0, facts.vocab_size), None)
        logits_WV = _copied(lib.llama_get_logits(self._context), (count, facts.vocab_size))
        if not states:
            return Decoded(logits_WV, None)
        return Decoded(logits_WV[wanted], _copied(lib.llama_get_embeddings(self._context), (count, facts.hidden_size)))


def _copied(numbers: Any, shape: tuple[int, int]) -> Tensor:
    """Copy the numbers at a pointer of llama.cpp, which are valid until its next call."""
    return torch.from_numpy(np.ctypeslib.as_array(numbers, shape).copy())


class _Heard:
    """Receives llama.cpp's log, for this module's log, and keeps the last error for messages."""

    def __init__(self, lib: Any) -> None:
        self._error = ""
        self._callback = lib.llama_log_callback(self._hear)
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    def clear(self) -> None:
        self._error = ""

    def reason(self) -> str:
        return self._error or "it does not say why"

    def _hear(self, level: int, text: bytes, user_data: object) -> None:
        line = text.decode(errors="replace").strip()
        if level == 3 and line:
            self._error = line
        _log.debug("%s", line)


@cache
def _heard(lib: Any) -> _Heard:
    """The process's log receiver; llama.cpp has only one, which must live as long as it may be called."""
    return _Heard(lib)
