"""Strategies that guess all tokens at once and iterate: Jacobi, lookahead."""

from __future__ import annotations

from parlay.drafters.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
