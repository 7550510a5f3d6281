"""The families that the native decoder runs, by the names that config.json and GGUF files give them."""

from __future__ import annotations

from collections.abc import Mapping

from parlay.models.families.diffusion import DIFFUSION
from parlay.models.families.family import Family
from parlay.models.families.gemma import GEMMA2
from parlay.models.families.llama import LLAMA, MISTRAL
from parlay.models.families.qwen import QWEN2, QWEN3

FAMILIES: Mapping[str, Family] = {
    family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, *DIFFUSION)
}
"""By architecture, as config.json has it."""
GGUF_FAMILIES: Mapping[str, Family] = {family.gguf.name: family for family in FAMILIES.values() if family.gguf}
"""By ``general.architecture``."""
