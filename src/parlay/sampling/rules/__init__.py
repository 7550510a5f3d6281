"""Accept rules: from a draft and the target's logits to the tokens that are committed. One file a family."""

from __future__ import annotations

from parlay.sampling.rules.shared_noise import SharedNoise

__all__ = ["SharedNoise"]
