"""Strategies in which the target drafts for itself with some of its layers."""

from __future__ import annotations

from parlay.drafters.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
