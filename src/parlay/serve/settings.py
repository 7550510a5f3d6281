"""Limits, keys and switches of a server, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from parlay.options import Options, check_values, option, whole
from parlay.types import ScoreBy

PROMPT_LOG = "parlay.serve.prompts"
"""The logger of request bodies, at level info, if the settings enable it."""


MOST_URGENT = -16
InfillOrder = Literal["psm", "line", "spm"]
"""Where fill-in-the-middle cuts the text before the cursor: at its end, so that all is prefix; at the start of the
cursor's line; or at its beginning, so that the suffix comes first (arXiv:2207.14255)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """Limits of an API key; None means no limit. ``tokens`` are those of prompts and outputs per minute; ``priority``
    is the most urgent one allowed. ``record``: the key's owner agrees that prompts and answers are recorded, if the
    server records any.

    Raises ValueError for an invalid value.
    """

    requests: int | None = None
    tokens: int | None = None
    priority: int = MOST_URGENT
    record: bool = False

    def __post_init__(self) -> None:
        for name, value in (("requests", self.requests), ("tokens", self.tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} of a key must be at least 1, got {value}")

    def but(self, words: list[str]) -> KeyLimits:
        """A copy with the changes in ``words``, each ``name=number``. Raises ValueError for an invalid change."""
        changes: dict[str, Any] = {}
        for word in words:
            name, _, number = word.partition("=")
            if name not in {known.name for known in fields(self)} or not number.removeprefix("-").isdecimal():
                raise ValueError(
                    f"{word!r} is not a setting of a key: write requests=N, tokens=N, priority=N or record=1"
                )
            changes[name] = bool(whole(number)) if name == "record" else whole(number)
        return replace(self, **changes)


IDLE_SECONDS = 300.0
"""After so long an idle model is unloaded, where the server has several and nothing else is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(Options):
    """Fields of a server's `Settings` that are flags of `parlay serve`; sizes in bytes, times in seconds.

    None is no limit of its own. Raises UsageError for a value that can't be used.
    """

    max_body_bytes: int = option(4 * 1024 * 1024, "largest request body, in bytes", low=1)
    max_prompt_tokens: int | None = option(None, "most tokens of a prompt (default: the model's context)", low=1)
    max_tokens: int | None = option(None, "most tokens of an output (default: the model's context)", low=1)
    default_max_tokens: int | None = option(
        4096, "max_tokens of requests that don't set it; 0: the model's context", low=1
    )
    max_n: int = option(16, "largest n, the number of samples, of a request", low=1)
    concurrency: int = option(512, "most requests at once, waiting ones included", low=1, flag="max-concurrency")
    """Those that wait in the engine's queue included."""
    request_timeout: float | None = option(
        None,
        "most seconds for one request, from arrival to last token (default: none)",
        above=0,
        metavar="SECONDS",
        flag="timeout",
    )
    """From arrival to last token."""
    drain_seconds: float = option(
        30.0, "seconds that running requests may take to finish when the server stops", low=0, metavar="SECONDS"
    )
    max_loaded: int = option(3, "most models in memory at once", low=1)
    """Of those that are loaded on demand."""
    idle_seconds: float | None = option(
        None,
        f"unload a model after so many seconds without a request for it (default: {IDLE_SECONDS:g} with several "
        "models, never with one)",
        above=0,
        metavar="SECONDS",
    )
    log_prompts: bool = option(False, "log the bodies of requests, prompts included", switch=True)
    strict: bool = option(
        False,
        "answer requests that have fields without effect with an error (default: report the fields in a header and "
        "the log)",
        switch=True,
    )
    parse_special: bool = option(
        False,
        "tokenize special tokens in messages as such, as llama.cpp's option does; clients can then forge system "
        "messages (default: treat them as text)",
        switch=True,
    )
    """See `ChatOptions`."""
    infill_order: InfillOrder = option(
        "psm",
        "order of fill-in-the-middle prompts: prefix first (psm), suffix first (spm, for models trained on it), or "
        "psm with the cursor's line after the suffix (line), which keeps the suffix cached while typing",
    )
    """See `Gap.cut`, as for ``infill_suffix``."""
    infill_suffix: int | None = option(
        None,
        "most tokens of the text after the cursor that fill-in-the-middle reads (default: all)",
        low=1,
        metavar="TOKENS",
    )
    cache_reuse: int = option(
        0,
        "fill-in-the-middle reuses cached chunks of at least so many tokens at shifted positions, as llama-server "
        "does; faster but lossy; 0: off",
        low=0,
        metavar="TOKENS",
    )
    responses_kept: int = option(256, "most earlier responses (/v1/responses) kept for each API key", low=0)
    lora_folder: Path | None = option(
        None,
        "allow /v1/load_lora_adapter to load adapters from this folder (default: not allowed)",
        metavar="FOLDER",
    )
    score_by: ScoreBy = option(
        "cosine",
        "how /v1/score and /v1/rerank compare texts: cosine of embeddings, or the yes or no of a chat model such as "
        "Qwen3-Reranker",
    )
    """Where a request does not say."""
    ngrams: Path | None = option(
        None, "n-gram model that scores superposed drafts (see parlay suggest)", metavar="FILE"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ServeOptions):
    """Limits, keys and flags of one server.

    ``keys``: every request that runs a model or shows something needs one of them; if empty, no key is needed.
    ``key_limits`` apply to each key, except for those in ``own_limits``. ``hosts``: names allowed in the Host header,
    so that no web page reaches a server without keys under its own name (DNS rebinding); if empty, any name is.
    ``body_timeout`` limits the arrival of a request's body. Raises ValueError for an invalid value.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    own_limits: Mapping[str, KeyLimits] = field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    body_timeout: float = 60.0
    retry_after: int = 1

    def __post_init__(self) -> None:
        check_values(self, ServeOptions)
        if not all(_is_key(key) for key in self.keys):
            raise ValueError("an API key must be printable ASCII without spaces, at least one character")
        for name, seconds in (("body_timeout", self.body_timeout), ("retry_after", self.retry_after)):
            if not seconds > 0:
                raise ValueError(f"{name} must be above 0, got {seconds:g}")


def _is_key(text: str) -> bool:
    return text.isascii() and text.isprintable() and text != "" and " " not in text
