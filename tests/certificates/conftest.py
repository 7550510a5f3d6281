"""The built-in model, and certificates of lossy strategies for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parlay import LLM, SamplingParams
from parlay.certificates.certificate import Binding, Certificate, Certified, Claim, Sampling, write

GREEDY = SamplingParams(temperature=0, max_tokens=16)
PROMPTS = ["Once upon a time there was a king who", "def add(a, b):\n    return", "The weather was", "In the year 1900"]

Certify = Callable[..., Path]


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini") as model:
        yield model


@pytest.fixture
def certify(llm: LLM, tmp_path: Path) -> Certify:
    """``certify(strategy, **changes)`` writes a certificate that claims a floor of 0.9, true or not."""

    def made(
        *strategies: str,
        good: int = 100,
        params: SamplingParams = GREEDY,
        binding: Binding | None = None,
        **changes: object,
    ) -> Path:
        claimed = {"answers": 100, "prompts": "", "max_tokens": 16, "floor": 0.9, "score": "agreement"}
        claim = Claim(**{**claimed, "agreement": 1.0, "confidence": 0.95, **changes})  # type: ignore[arg-type]
        certified = tuple(Certified(strategy=name, good=good, speed=1.5) for name in strategies)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        write(Certificate(binding or llm.gate.binding(), Sampling.of(params), claim, certified), path)
        return path

    return made


def damaged(path: Path, change: Callable[[dict[str, object]], object]) -> Path:
    """Change the JSON of a file, and return its path."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path
