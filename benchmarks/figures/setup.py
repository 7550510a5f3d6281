"""What every part is given: how much to measure, with which prompts and models."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from benchmarks.figures import prompts
from benchmarks.figures.lasting import lasting_first
from benchmarks.figures.prompts import Prompt
from parlay.llm import LLM
from parlay.models.loading import load_tokenizer, weight_files
from parlay.models.resolving import resolve
from parlay.testing.widen import widen

logger = logging.getLogger(__name__)

MINI = "parlay-mini"
DRAFT = "parlay-mini-draft"
WIDE = "parlay-mini-100m"
WIDE_PARAMETERS = 100_000_000
DRAWN = 8
"""Prompts drawn for each one wanted: the text of many loops at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to measure. ``prompts`` are of each kind; fewer, and fewer rounds, where a part takes long."""

    prompts: int = 8
    wide_prompts: int = 6
    tokens: int = 128
    rounds: int = 3
    wide_rounds: int = 2
    steps: int = 400
    launches: int = 5


FULL = Scale()
QUICK = Scale(prompts=2, wide_prompts=1, tokens=32, rounds=2, wide_rounds=1, steps=60, launches=2)


@dataclass(frozen=True, slots=True)
class Setup:
    """``data`` None takes the prompts that ship here. ``cache`` keeps what is expensive to make between runs."""

    scale: Scale
    data: Path | None
    cache: Path

    def directory(self, model: str) -> Path:
        """The checkpoint of a model by its name here; the wide one is made when it is first asked for."""
        return resolve(model) if model != WIDE else self._widened()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one that all models here share."""
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(resolve(MINI))
        return tokenizer

    def llm(self, model: str) -> LLM:
        """The model with everything at its defaults."""
        return LLM(MINI) if model == MINI else LLM(str(self.directory(model)), draft_model=DRAFT)

    def prompts(self, model: str, kinds: Sequence[str] = prompts.KINDS) -> Mapping[str, Sequence[Prompt]]:
        """So many prompts of each kind as the scale wants for that model, by preference those whose text lasts."""
        count = self.scale.prompts if model == MINI else self.scale.wide_prompts
        tokenizer, most = self.tokenizer(), DRAWN * self.scale.prompts
        if self.data is None:
            drawn = prompts.built_in(tokenizer, most)
        else:
            drawn = prompts.heldout(self.data, tokenizer, most, self.cache)
        drawn = lasting_first(drawn, resolve(MINI), self.scale.tokens, self.cache)
        return {kind: drawn[kind][:count] for kind in kinds}

    def _widened(self) -> Path:
        source = resolve(MINI)
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in weight_files(source))).hexdigest()[:12]
        directory = self.cache / f"{WIDE}-{digest}"
        if not directory.exists():
            logger.info("widening %s to %d parameters", MINI, WIDE_PARAMETERS)
            unfinished = self.cache / f"{WIDE}-{digest}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            widen(source, unfinished, WIDE_PARAMETERS)
            unfinished.rename(directory)
        return directory
