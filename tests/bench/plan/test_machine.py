"""This machine measured through the runners that people decode with, and models read without their weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parlay.bench.plan.machine import (
    cache_bytes,
    calibrate_here,
    calibration_path,
    config_of,
    load_here,
    read_model,
    shape_of,
)
from parlay.cost.roofline import ForwardShape
from parlay.models.fetch.resolving import resolve_config
from parlay.options import LoadOptions
from parlay.types import ParlayError
from tests.bench.plan.conftest import TINY, WORKS
from tests.models import gguf_files


def test_forwards_and_engine_steps_of_random_decoders_make_a_machine() -> None:
    """Of the native decoder, loaded as a checkpoint is; where it ran is written down."""
    lines: list[str] = []
    made = calibrate_here(LoadOptions(dtype="float32", device="cpu"), shapes=(TINY,), works=WORKS, log=lines.append)
    assert {sample.work for sample in made.samples} == set(WORKS)
    assert {sample.shape for sample in made.samples} == {TINY}
    engine = made.machine.engine
    assert 0 < engine.of_step(1) <= engine.of_step(4) <= engine.of_step(4, 16)
    assert engine.of_level(8) >= engine.of_level(1) >= 0
    assert made.machine.forward(TINY, ForwardShape(context=16)) > 0
    assert {"device", "processor", "dtype", "threads", "kernels", "torch", "date"} <= made.provenance.keys()
    assert (made.provenance["device"], made.provenance["dtype"]) == ("cpu", "float32")
    assert lines[-1] == "timing steps of the engine"


def test_a_file_with_weights_in_blocks_is_modelled_with_weights_of_eight_bits(tmp_path: Path) -> None:
    """And not with those of a plain checkpoint, whose forwards move several times as many bytes."""
    mini = resolve_config("parlay-mini")
    blocks = gguf_files.write(tmp_path / "blocks.gguf", mini, kind=gguf_files.Kind.Q8_0)
    plain = gguf_files.write(tmp_path / "plain.gguf", mini, kind=gguf_files.Kind.BF16)
    usual = LoadOptions(threads=2)
    assert load_here(str(blocks), usual) == LoadOptions(dtype="bfloat16", quantize="int8", threads=2)
    assert load_here(str(plain), usual) == load_here("parlay-mini", usual)
    assert load_here(str(blocks), LoadOptions(dtype="float32")) == LoadOptions(dtype="float32")


def test_a_shape_is_the_config_it_came_from() -> None:
    assert shape_of(config_of(TINY, max_context=128), weight_bytes=4, kv_bytes=4) == TINY


def test_eight_bits_are_one_byte() -> None:
    made = calibrate_here(LoadOptions(dtype="float32", device="cpu", quantize="int8"), shapes=(TINY,), works=WORKS)
    assert {sample.shape.weight_bytes for sample in made.samples} == {1}
    assert (made.provenance["weights"], made.provenance["dtype"]) == ("int8", "float32")


def test_a_folder_with_config_json_alone_is_enough(config_only: Path) -> None:
    assert read_model(str(config_only)).hidden_size == 32
    assert read_model("parlay-mini").num_layers > 1


def test_what_is_no_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ParlayError, match=r"no config\.json in"):
        resolve_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ParlayError, match="MambaForCausalLM"):
        read_model(str(tmp_path))


def test_the_largest_cache_is_told_by_the_system_or_assumed(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "32768K", "?")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 32 << 20
    assert cache_bytes(tmp_path / "nowhere") == 16 << 20


def test_calibrations_are_kept_in_the_cache_folder_by_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_path("bfloat16") == tmp_path / "parlay" / "calibration-bfloat16.json"
