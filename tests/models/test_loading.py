"""Loading is strict: a checkpoint holds exactly the weights its config calls for, or the error names what not."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from shutil import copyfile

import huggingface_hub
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from parlay import LLM, SamplingParams
from parlay.models.families.reading import read_config
from parlay.models.families.table import FAMILIES
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer, load_weights
from parlay.models.lora import read_adapter
from parlay.models.opening import load
from parlay.models.weights.shapes import BadCheckpoint
from parlay.options import LoadOptions
from parlay.testing.adapters import save_adapter
from parlay.testing.checkpoints import NATIVE, random_model, save_random
from parlay.types import ParlayError
from tests.models import gguf_files


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save_random("llama", tmp_path)
    return tmp_path


def rewrite(directory: Path, changes: dict[str, Tensor | None]) -> None:
    tensors: dict[str, Tensor | None] = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / "model.safetensors")


@pytest.mark.parametrize("name", NATIVE)
def test_every_family_loads_with_the_weights_transformers_wrote(name: str, tmp_path: Path) -> None:
    """Under the decoder's names; norms with the family's offset."""
    saved, config = save_random(name, tmp_path).state_dict(), read_config(tmp_path)
    family, weights = FAMILIES[config.architecture], load_weights(tmp_path, config)
    expected = {family.renamed(key): tensor + family.norm_offset * (tensor.dim() == 1) for key, tensor in saved.items()}
    assert set(weights) == set(expected) - ({"lm_head.weight"} if config.tie_embeddings else set())
    assert all(weights[key].equal(expected[key]) for key in weights)


def test_sharded_checkpoints_load_and_an_absent_shard_is_named(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert set(load_weights(tmp_path, read_config(tmp_path))) == set(model.state_dict())
    shards[1].unlink()
    with pytest.raises(BadCheckpoint, match=shards[1].name):
        load_weights(tmp_path, read_config(tmp_path))


def test_a_whole_file_counts_whatever_else_lies_beside_it(llama: Path) -> None:
    """As in transformers: the same weights in their makers' layout, an adapter's, and the index of an earlier save."""
    expected = load_weights(llama, read_config(llama))
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"w": torch.zeros(2)}, llama / name)
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    found = load_weights(llama, read_config(llama))
    assert all(found[name].equal(weight) for name, weight in expected.items())


@pytest.mark.parametrize("name", ["llama-tied", "qwen2", "gemma3"])
def test_a_model_that_was_saved_without_its_head_loads(name: str, tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: names begin behind "model."."""
    save_random(name, tmp_path)
    expected, tensors = load_weights(tmp_path, read_config(tmp_path)), load_file(tmp_path / "model.safetensors")
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    found = load_weights(tmp_path, read_config(tmp_path))
    assert found.keys() == expected.keys()
    assert all(found[key].equal(weight) for key, weight in expected.items())


def test_a_model_of_embeddings_that_has_no_head_anywhere_says_so(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Qwen3-Embedding-8B is published; a model with its usual names lacks a weight."""
    rewrite(llama, {"lm_head.weight": None})
    with pytest.raises(BadCheckpoint, match=r"1 missing: lm_head\.weight"):
        load_weights(llama, read_config(llama))
    tensors = load_file(llama / "model.safetensors")
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, llama / "model.safetensors")
    assert len(load_weights(llama, read_config(llama))) == len(tensors) + 1
    assert "has no LM head" in caplog.text


def test_biases_of_a_family_whose_norms_have_an_offset_stay_as_they_are(tmp_path: Path) -> None:
    projections = [name for name in save_random("gemma", tmp_path).state_dict() if ".self_attn." in name]
    sizes = {name: len(load_file(tmp_path / "model.safetensors")[name]) for name in projections}
    biases = {name.replace(".weight", ".bias"): torch.linspace(-1, 1, size) for name, size in sizes.items()}
    rewrite(tmp_path, {**biases})
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**said, "attention_bias": True}))
    weights = load_weights(tmp_path, read_config(tmp_path))
    assert all(weights[name].equal(bias) for name, bias in biases.items())


def test_missing_extra_and_misshaped_tensors_are_named_together(llama: Path) -> None:
    changes = {
        "model.norm.weight": None,
        "model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2),
        "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 31),
    }
    rewrite(llama, changes)
    with pytest.raises(BadCheckpoint) as caught:
        load_weights(llama, read_config(llama))
    message = str(caught.value)
    assert "1 missing: model.norm.weight" in message
    assert "1 extra: model.layers.7.mlp.up_proj.weight" in message
    assert "model.layers.0.mlp.up_proj.weight [64, 31] instead of [64, 32]" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.0.self_attn.qkv_proj.weight", torch.tensor(1.0), "extra: model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(64, 32, dtype=torch.int64), "up_proj.weight stored as int64"),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(64, 32, dtype=torch.bool), "up_proj.weight stored as bool"),
        ("model.layers.0.x.bias", torch.ones(4, dtype=torch.complex64), "extra: model.layers.0.x.bias"),
    ],
)
def test_tensors_of_no_dimension_or_no_fractions_are_named(
    llama: Path, name: str, tensor: Tensor, message: str
) -> None:
    rewrite(llama, {name: tensor})
    with pytest.raises(BadCheckpoint, match=message):
        load_weights(llama, read_config(llama))


@pytest.mark.parametrize(
    "named",
    [["model.safetensors"], {"a": 5}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": ".."}, {"a": ""}, 7],
)
def test_an_index_names_files_of_its_own_folder(llama: Path, named: object) -> None:
    (llama / "model.safetensors").rename(llama / "model-00001-of-00001.safetensors")
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    with pytest.raises(BadCheckpoint, match=r"index\.json names no files of its own folder"):
        load_weights(llama, read_config(llama))


@pytest.mark.parametrize("size", [3, 500, -100])
def test_a_file_that_is_cut_short_is_named(llama: Path, size: int) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is damaged or cut short"):
        load_weights(llama, read_config(llama))


def test_pipes_are_no_weights_and_are_not_waited_for(llama: Path) -> None:
    os.mkfifo(llama / "another.safetensors")
    assert load_weights(llama, read_config(llama))


def test_stored_rotary_tables_and_a_repeated_tied_head_are_harmless(tmp_path: Path) -> None:
    model = save_random("llama-tied", tmp_path)
    embedding = model.state_dict()["model.embed_tokens.weight"]
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": embedding.clone()}
    rewrite(tmp_path, {**buffers})
    assert "lm_head.weight" not in load_weights(tmp_path, read_config(tmp_path))
    rewrite(tmp_path, {"lm_head.weight": embedding + 1})
    with pytest.raises(BadCheckpoint, match=r"1 extra: lm_head\.weight"):
        load_weights(tmp_path, read_config(tmp_path))


def test_names_resolve_to_folders_or_to_one_clear_line(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert resolve(str(llama)) == llama
    assert (resolve("parlay-mini") / "config.json").is_file()
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ParlayError, match=r"no config\.json"):
        resolve(str(empty))
    with pytest.raises(ParlayError, match="no folder"):
        resolve("./not/there")
    with pytest.raises(ParlayError, match="is a file"):
        resolve(str(llama / "config.json"))


def test_an_adapter_is_no_model(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "adapter_model.safetensors")
    with pytest.raises(
        ParlayError, match="only the weights of an adapter: name its base model, and this folder with --lora"
    ):
        resolve(str(llama))
    (llama / "config.json").rename(llama / "adapter_config.json")
    with pytest.raises(ParlayError, match="an adapter but no model: name its base model, and this folder with --lora"):
        resolve(str(llama))


def test_pickled_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(ParlayError, match=r"only pickled weights.*safetensors"):
        resolve(str(llama))


def test_the_hub_is_asked_for_no_pickles_and_its_failures_are_one_line(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fetch(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str] | None) -> str:
        asked.append(allow_patterns)
        if repo == "some/absent":
            raise huggingface_hub.errors.LocalEntryNotFoundError("offline\nlong story")
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("some/model") == llama
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked[0])
    with pytest.raises(ParlayError, match="local folder instead") as caught:
        resolve("some/absent")
    assert "\n" not in str(caught.value)


def test_the_built_in_tokenizer_loads_and_an_absent_one_is_one_line(llama: Path) -> None:
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    assert tokenizer.decode(tokenizer.encode("hello there")) == "<|endoftext|>hello there"
    with pytest.raises(ParlayError, match="can't load a tokenizer") as caught:
        load_tokenizer(llama)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "there is no tokenizer.json; copy it there"), ("{}", "tokenizer.json is damaged or unknown here")],
)
def test_a_missing_or_damaged_file_of_a_tokenizer_is_named(content: str | None, reason: str, tmp_path: Path) -> None:
    copyfile(resolve("parlay-mini") / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ParlayError, match=reason):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_folder_without_a_tokenizer_takes_token_ids_and_no_text(name: str, tmp_path: Path) -> None:
    """transformers makes up an empty tokenizer for some families, and none for others."""
    save_random(name, tmp_path)
    with LLM(str(tmp_path), dtype="float32") as llm:
        assert (
            len(llm.generate([[5, 9, 11]], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids) == 4
        )
        with pytest.raises((ParlayError, ValueError), match="tokenizer"):
            llm.generate(["The cat"], SamplingParams(max_tokens=4))


def test_weights_are_mapped_rather_than_copied(llama: Path) -> None:
    """A file that is rewritten in place shows through the mapping, so nothing was read eagerly."""
    weights = load_weights(llama, read_config(llama))
    header = int.from_bytes((llama / "model.safetensors").read_bytes()[:8], "little")
    names = json.loads((llama / "model.safetensors").read_bytes()[8 : 8 + header])
    begin, _ = names["model.norm.weight"]["data_offsets"]
    with (llama / "model.safetensors").open("r+b") as file:
        file.seek(8 + header + begin)
        file.write(torch.tensor([123.0]).numpy().tobytes())
    assert float(weights["model.norm.weight"][0]) == 123.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", ["folder", "BF16", "F32", "Q8_0"])
@pytest.mark.parametrize("compiled", ["plain", "0"])
def test_no_file_is_needed_once_a_model_is_loaded(
    form: str, dtype: str, compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has a file mapped ends when somebody cuts it short, as copying another over it does."""
    monkeypatch.setenv("PARLAY_COMPILED", compiled)
    save_random("qwen2", tmp_path)
    if form != "folder":
        gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=Kind[form])
    runner = load(str(tmp_path if form == "folder" else tmp_path / "model.gguf"), LoadOptions(dtype=dtype))
    assert_unmapped(tmp_path)
    del runner


@pytest.mark.parametrize("compiled", ["plain", "0"])
@pytest.mark.parametrize("family", ["gpt-oss", "glm4-moe"])
def test_no_vector_of_a_mixture_is_needed_either(
    family: str, compiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks, biases of experts and those that choose them are float32 in files already: nothing converts them."""
    monkeypatch.setenv("PARLAY_COMPILED", compiled)
    save_random(family, tmp_path)
    runner = load(str(tmp_path), LoadOptions(dtype="float32"))
    assert_unmapped(tmp_path)
    del runner


def test_no_file_of_an_adapter_is_needed_once_it_is_read(llama: Path) -> None:
    config = read_config(llama)
    save_adapter(llama / "adapter", config)
    adapter = read_adapter(llama / "adapter", config, "its name")
    assert_unmapped(llama)
    del adapter


def assert_unmapped(folder: Path) -> None:
    """No file of the folder is mapped into this process."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("the system does not tell which files are mapped")
    gc.collect()
    assert str(folder) not in maps.read_text()
