"""What a model's makers recommend: read from its files, whatever stands there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parlay.models.sampling_defaults import sampling_defaults
from parlay.types import ParlayError


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"do_sample": True, "temperature": 0.7, "top_k": 20}, {"temperature": 0.7, "top_k": 20}),
        ({"do_sample": True, "top_k": 20.0}, {"top_k": 20}),
        ({"temperature": 0.7}, {}),
        ({"do_sample": True, "min_p": None}, {}),
        ({"top_p": "0.9", "typical_p": True}, {}),
        ({"do_sample": True, "temperature": 1e-9}, {"temperature": 0}),
    ],
)
def test_numbers_are_taken(said: dict[str, Any], expected: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    found = sampling_defaults(str(tmp_path))
    assert found == expected
    assert all(type(value) is type(expected[name]) for name, value in found.items() if name == "top_k")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"temperature": -5}, "temperature must be at least 0, got -5"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"top_p": 7}, "top_p must be above 0 and at most 1, got 7"),
        ({"temperature": "x"}, "temperature must be a number, got 'x'; correct it"),
        ({"top_k": "20"}, "top_k must be a whole number, got '20'; correct it"),
        ({"top_p": [0.9]}, r"top_p must be a number, got \[0.9\]; correct it"),
        ({"min_p": "x"}, "min_p must be a number"),
        ({"typical_p": True}, "typical_p must be a number, got True"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be at least 0, got nan"),
    ],
)
def test_what_nobody_can_sample_with_is_refused_by_the_files_name(
    said: dict[str, object], reason: str, tmp_path: Path
) -> None:
    """Every request without sampling parameters would fail otherwise, and none would say why."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **said}))
    with pytest.raises(ParlayError, match=f"generation_config.json has a value that can't be used: {reason}"):
        sampling_defaults(str(tmp_path))
