"""Settings that all benchmarks share: how much to measure, with which models and workloads."""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parlay.bench import workloads
from parlay.bench.prepare import lasting
from parlay.bench.workloads import Workload
from parlay.llm import LLM
from parlay.models.fetch.resolving import BUILT_IN_DRAFTS, resolve
from parlay.models.loading import weight_files
from parlay.testing.checkpoints import save_dense
from parlay.testing.widen import widen

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2-135m"
"""SmolLM2 as `parlay pull` fetches it: GGUF, Q4_1."""
SMOLLM2_BF16 = "smollm2-135m-bf16"
"""SmolLM2's weights in bfloat16."""
MINI = "parlay-mini"
DRAFT = "parlay-mini-draft"
WIDE = "parlay-mini-100m"
WIDE_PARAMETERS = 100_000_000
KINDS: Mapping[str, str] = {
    "edit": "editeval",
    "copy": "llma-questions",
    "calls": "bfcl-simple",
    "maths": "spec-bench/math_reasoning",
    "code": "humaneval",
    "prose": "spec-bench/writing",
    "translation": "spec-bench/translation",
}
"""The kinds of text, each a built-in workload, and the published set that replaces it with ``--data``."""
DRAWN = 8
"""The number of prompts tried for each one wanted, because the texts of many loop at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much to measure. ``prompts`` counts those of each kind. The fields ``wide_`` are for models that take
    long."""

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
    """The settings of a run. If ``data`` is None, built-in prompts are used; ``cache`` keeps models that take long
    to make."""

    scale: Scale
    data: Path | None
    cache: Path

    def directory(self, model: str) -> Path:
        """Return the checkpoint of a model by its name. A model that is made from another is made at the first call."""
        made = {WIDE: self._widened, SMOLLM2_BF16: self._dense}
        return made[model]() if model in made else resolve(model)

    def llm(self, model: str) -> LLM:
        """Open a model with default options. A model that is made from another gets that one's draft model."""
        drafts = {WIDE: DRAFT, SMOLLM2_BF16: BUILT_IN_DRAFTS[SMOLLM2]}
        name = str(self.directory(model)) if model in drafts else model
        return LLM(name, draft_model=drafts.get(model), router_memory="off")

    def workloads(self, model: str, kinds: Sequence[str] = tuple(KINDS)) -> tuple[Workload, ...]:
        """Choose prompts of each kind, as many as the scale wants for that model, and prefer those whose text does not
        loop.

        For the widened model they are chosen with the built-in one, which writes the same text.
        """
        count = self.scale.prompts if model == MINI else self.scale.wide_prompts
        with self.llm(MINI if model == WIDE else model) as llm:
            return tuple(lasting(llm, self.drawn(kind, DRAWN * count), count, self.scale.tokens) for kind in kinds)

    def drawn(self, kind: str, most: int) -> Workload:
        """Load the first ``most`` prompts of a kind."""
        (workload,) = workloads.load([kind if self.data is None else KINDS[kind]], most, self.data)
        return replace(workload, name=kind)

    def _widened(self) -> Path:
        source = resolve(MINI)
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in weight_files(source))).hexdigest()[:12]
        return self._made(f"{WIDE}-{digest}", lambda out: widen(source, out, WIDE_PARAMETERS))

    def dense(self, model: str) -> Path:
        """Return a folder of bfloat16 weights for engines that read no GGUF, made from a GGUF file; any other model
        as it is."""
        file = resolve(model)
        if file.suffix != ".gguf":
            return file
        return self._made(f"{file.stem}-bf16", lambda out: save_dense(file, out))

    def _dense(self) -> Path:
        return self._made(SMOLLM2_BF16, lambda out: save_dense(resolve(SMOLLM2), out))

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return a folder of the cache, made completely or not at all."""
        directory = self.cache / name
        if not directory.exists():
            logger.info("making %s", name)
            unfinished = self.cache / f"{name}.part"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            make(unfinished)
            unfinished.rename(directory)
        return directory
