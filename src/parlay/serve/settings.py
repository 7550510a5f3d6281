"""Limits, keys and flags of a server, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from parlay.types import ScoreBy

PROMPT_LOG = "parlay.serve.prompts"
"""The logger of requests' bodies, at level info, if the settings ask for it."""


MOST_URGENT = -16
InfillOrder = Literal["psm", "line", "spm"]
"""Where fill-in-the-middle cuts the text before the cursor: nowhere, so that all of it is the prefix; at the start of
the cursor's line; or at its own start, so that the suffix stands first (arXiv 2207.14255)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyLimits:
    """None is no limit. ``tokens`` counts those of prompts and outputs a minute, ``priority`` is the most urgent one.
    ``record``: the key's owner agrees that its prompts and answers are kept, where the server keeps any.

    Raises ValueError for a value that can't be used.
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
        """Return a copy with changes, each as ``name=number``. Raises ValueError."""
        changes: dict[str, Any] = {}
        for word in words:
            name, equals, number = word.partition("=")
            if not equals or name not in {known.name for known in fields(self)} or not number.lstrip("-").isdecimal():
                raise ValueError(f"{word!r} is no limit of a key: write requests=N, tokens=N, priority=N or record=1")
            changes[name] = bool(int(number)) if name == "record" else int(number)
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits, keys and flags of one server; sizes in bytes, times in seconds, None for no limit of its own.

    ``keys``: one of them must come with every request that runs or tells something; none given, none asked for.
    ``key_limits`` are those of each key, ``own_limits`` those of single keys instead.
    ``hosts``: names that the Host header may carry, so that no web page reaches a server without keys under a name
    of its own (DNS rebinding); none given, any name. ``concurrency`` counts requests under way, those that wait in
    the engine's queue included. ``request_timeout`` limits a request from arrival to last token, ``body_timeout``
    the arrival of its body. ``max_tokens`` is the most that a request may ask for, ``default_max_tokens`` the end of an
    output whose request names none. Of models that are loaded on demand, ``max_loaded`` are in memory at most, and one
    that no request has named for ``idle_seconds`` is unloaded. ``strict``: fields that have no effect are refused.
    ``parse_special``: control tokens that messages spell are read as such (`ChatOptions`).
    ``infill_order`` and ``infill_suffix``: how fill-in-the-middle cuts a file (`Gap.cut`).
    ``cache_reuse``: from how many tokens on a run that an earlier request to fill in the middle has at another place is
    not computed again; 0: never. ``responses_kept``: how many earlier responses of a key can be gone on with.
    ``lora_folder``: adapters below it may be loaded by requests; None: none may. ``score_by``: how texts are compared
    where a request does not say. ``ngrams``: a file by which superposed drafts are scored.
    Raises ValueError for a value that can't be used.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    own_limits: Mapping[str, KeyLimits] = field(default_factory=dict, repr=False)
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    default_max_tokens: int | None = 4096
    max_n: int = 16
    concurrency: int = 512
    request_timeout: float | None = None
    body_timeout: float = 60.0
    drain_seconds: float = 30.0
    max_loaded: int = 3
    idle_seconds: float | None = None
    retry_after: int = 1
    log_prompts: bool = False
    strict: bool = False
    parse_special: bool = False
    infill_order: InfillOrder = "psm"
    infill_suffix: int | None = None
    cache_reuse: int = 0
    responses_kept: int = 256
    lora_folder: Path | None = None
    score_by: ScoreBy = "cosine"
    ngrams: Path | None = None

    def __post_init__(self) -> None:
        if not all(_is_key(key) for key in self.keys):
            raise ValueError("an API key must be printable ASCII without spaces, at least one character")
        _check_above_zero("max_body_bytes", self.max_body_bytes)
        _check_above_zero("max_prompt_tokens", self.max_prompt_tokens)
        _check_above_zero("max_tokens", self.max_tokens)
        _check_above_zero("infill_suffix", self.infill_suffix)
        _check_above_zero("default_max_tokens", self.default_max_tokens)
        _check_above_zero("max_n", self.max_n)
        _check_above_zero("concurrency", self.concurrency)
        _check_above_zero("request_timeout", self.request_timeout)
        _check_above_zero("body_timeout", self.body_timeout)
        _check_above_zero("retry_after", self.retry_after)
        _check_above_zero("max_loaded", self.max_loaded)
        _check_above_zero("idle_seconds", self.idle_seconds)
        if self.cache_reuse < 0:
            raise ValueError(f"cache_reuse must be at least 0, got {self.cache_reuse}")
        if self.responses_kept < 0:
            raise ValueError(f"responses_kept must be at least 0, got {self.responses_kept}")
        if not self.drain_seconds >= 0:
            raise ValueError(f"drain_seconds must be at least 0, got {self.drain_seconds:g}")


def _is_key(text: str) -> bool:
    return text.isascii() and text.isprintable() and text != "" and " " not in text


def _check_above_zero(name: str, value: float | None) -> None:
    """NaN is refused too; None passes."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be above 0, got {value:g}")
