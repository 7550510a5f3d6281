"""What a server allows, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

PROMPT_LOG = "parlay.serve.prompts"
"""The logger that is told of requests' bodies, at level info, where the settings say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits, keys and flags of one server; sizes in bytes, times in seconds, None for no limit of its own.

    ``keys``: one of them must come with every request that runs or tells something; none given, none asked for.
    ``hosts``: names that the Host header may carry, so that no web page reaches a server without keys under a name
    of its own (DNS rebinding); none given, any name. ``concurrency`` counts requests under way, those that wait in
    the engine's queue included. ``request_timeout`` limits a request from arrival to last token, ``body_timeout``
    the arrival of its body. Raises ValueError for a value that can't be used.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_n: int = 16
    concurrency: int = 512
    request_timeout: float | None = None
    body_timeout: float = 60.0
    drain_seconds: float = 30.0
    retry_after: int = 1
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not all(_is_key(key) for key in self.keys):
            raise ValueError("an API key must be printable ASCII without spaces, at least one character")
        _check_above_zero("max_body_bytes", self.max_body_bytes)
        _check_above_zero("max_prompt_tokens", self.max_prompt_tokens)
        _check_above_zero("max_tokens", self.max_tokens)
        _check_above_zero("max_n", self.max_n)
        _check_above_zero("concurrency", self.concurrency)
        _check_above_zero("request_timeout", self.request_timeout)
        _check_above_zero("body_timeout", self.body_timeout)
        _check_above_zero("retry_after", self.retry_after)
        if not self.drain_seconds >= 0:
            raise ValueError(f"drain_seconds must be at least 0, got {self.drain_seconds:g}")


def _is_key(text: str) -> bool:
    return text.isascii() and text.isprintable() and text != "" and " " not in text


def _check_above_zero(name: str, value: float | None) -> None:
    """NaN is refused too; None passes."""
    if value is not None and not value > 0:
        raise ValueError(f"{name} must be above 0, got {value:g}")
