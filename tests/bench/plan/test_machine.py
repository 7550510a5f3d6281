"""This machine measured through the runners that people decode with, and models read without their weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parlay.bench.plan.machine import cache_bytes, calibrate_here, calibration_path
from parlay.bench.plan.shapes import config_of, known_name, read_model, shape_of
from parlay.bench.plan.weights import Blocks, stored_type, weight_type
from parlay.cost.roofline import ForwardShape
from parlay.models.fetch.pulled import place_of
from parlay.models.fetch.resolving import resolve_config
from parlay.models.weights.formats import Format
from parlay.options import LoadOptions
from parlay.types import ParlayError
from tests.bench.plan.conftest import TINY, WORKS
from tests.models import gguf_files

WIDE = replace(TINY, hidden_size=256, intermediate_size=256, num_heads=16, num_kv_heads=4)


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
    assert "timing steps of the engine" in lines


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_weights_in_blocks_have_their_own_bytes(kind: str, tmp_path: Path) -> None:
    """Those of the file, and not eight bits for all."""
    mini = resolve_config("parlay-mini")
    found = stored_type(gguf_files.write(tmp_path / "blocks.gguf", mini, kind=gguf_files.Kind[kind]))
    assert found is not None
    assert found.name == kind.lower()
    assert found.bytes == pytest.approx(weight_type(kind).bytes, rel=0.02)
    assert stored_type(gguf_files.write(tmp_path / "plain.gguf", mini, kind=gguf_files.Kind.BF16)) is None


@pytest.mark.usefixtures("without_links")
def test_a_machine_is_calibrated_with_decoders_in_the_same_blocks() -> None:
    made = calibrate_here(LoadOptions(), blocks=Blocks("q4_k", Format.Q4_K), shapes=(WIDE,), works=WORKS)
    assert {sample.shape.weight_bytes for sample in made.samples} == {144 / 256}
    assert made.provenance["weights"] == "q4_k"
    assert int(made.provenance["memory_bytes"]) > 1 << 30


@pytest.mark.usefixtures("without_links")
def test_each_matrix_of_a_mix_is_priced_in_its_own_format(tmp_path: Path) -> None:
    """Six bits inside a file of mostly four have kernels of their own."""
    mixed = weight_type("q4_k_m").blocks
    assert mixed is not None
    made = calibrate_here(LoadOptions(), blocks=mixed, shapes=(WIDE,), works=WORKS)
    (each,) = {sample.shape.weight_bytes for sample in made.samples}
    assert 144 / 256 < each < 210 / 256
    assert [mixed.of(f"model.layers.{layer}.mlp.down_proj.weight", 4).name for layer in range(4)] == [
        *("Q6_K", "Q6_K", "Q4_K", "Q4_K")
    ]
    assert mixed.of("model.layers.3.self_attn.q_proj.weight", 4) is Format.Q4_K
    assert mixed.of("model.embed_tokens.weight", 4) is Format.Q6_K


def test_names_of_types_are_those_that_people_write() -> None:
    assert weight_type("Q4_K_M").bytes == pytest.approx(0.61, abs=0.01)
    assert weight_type("bfloat16").bytes == 2
    with pytest.raises(ValueError, match="'q4_q' are not known: use one of float64"):
        weight_type("q4_q")


SIZES = {
    "llama-3.1-8b": 8.03,
    "llama-3.3-70b": 70.55,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-2-7b": 6.738,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-7b": 7.616,
    "qwen2.5-32b": 32.76,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "mistral-7b": 7.248,
    "tinyllama-1.1b": 1.1,
    "phi-3-mini": 3.821,
}
"""Billions of parameters, as the makers count them."""


@pytest.mark.parametrize("name", SIZES)
def test_shapes_by_name_have_the_makers_number_of_parameters(name: str) -> None:
    shape = shape_of(read_model(name), weight_bytes=2, kv_bytes=2)
    assert shape.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.002)


def test_names_on_the_hub_are_known_too() -> None:
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-Coder-7B-Instruct", "mistralai/Mistral-7B-v0.3"):
        assert known_name(name), name
    assert not known_name("someone/else-8b")
    assert not known_name("./qwen3-8b")


def test_a_model_that_parlay_pulls_is_known_by_name_until_its_file_is_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file tells more than the name: its types of numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known_name("smollm2-135m")
    assert read_model("smollm2-135m").num_layers == 30
    file = place_of("smollm2-135m")
    file.parent.mkdir(parents=True)
    file.touch()
    assert not known_name("smollm2-135m")


def test_a_shape_is_the_config_it_came_from() -> None:
    assert shape_of(config_of(TINY, max_context=128), weight_bytes=4, kv_bytes=4) == TINY


@pytest.mark.usefixtures("without_links")
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
