"""Facts are read from a model's files without loading them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from safetensors.torch import save_file

from parlay.models.facts import count_parameters, read_facts, ties_embeddings
from parlay.testing.checkpoints import save_random
from parlay.types import ParlayError
from tests.models import gguf_files


def make_folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    weights = {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7)}
    save_file(weights, path / "model.safetensors")
    return path


def test_a_folder_is_told_of_by_all_its_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "one")
    facts = read_facts(folder)
    assert (facts.form, facts.family, facts.parameters, facts.quantization) == ("safetensors", "llama", 22, "BF16")
    assert facts.bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert facts.digest == read_facts(make_folder(tmp_path / "two")).digest


def test_what_has_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "one")
    before = read_facts(folder)
    with monkeypatch.context() as patched:
        patched.setattr("parlay.models.facts.remembered_hash_of", lambda path: 1 / 0)
        assert read_facts(folder) == before
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    after = read_facts(folder)
    assert after.family == "qwen3"
    assert after.digest != before.digest


def test_a_file_is_told_of_by_its_own_hash(tmp_path: Path) -> None:
    save_random("llama", tmp_path)
    file = gguf_files.write(tmp_path / "model.gguf", tmp_path, kind=Kind.Q8_0)
    facts = read_facts(file)
    assert (facts.form, facts.family, facts.quantization) == ("gguf", "llama", "Q8_0")
    assert facts.digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert facts.bytes == file.stat().st_size
    file.unlink()
    assert facts.parameters == read_facts(tmp_path).parameters


def test_an_embedding_that_a_file_stores_twice_counts_once(tmp_path: Path) -> None:
    """Files of tied models often hold the LM head again, in a finer format; an untied head counts."""
    torch.manual_seed(1)
    embedding, other = torch.randn(96, 64), torch.randn(96, 64)
    for name, head, expected in (("tied", embedding, 96 * 64), ("untied", other, 2 * 96 * 64)):
        file = tmp_path / f"{name}.gguf"
        writer = GGUFWriter(file, "llama")
        for tensor, matrix, kind in (("token_embd", embedding, Kind.Q4_0), ("output", head, Kind.Q8_0)):
            gguf_files.add_tensor(writer, f"{tensor}.weight", matrix.numpy(), kind)
        gguf_files.finish(writer)
        assert read_facts(file).parameters == count_parameters(file) == expected
        assert ties_embeddings(file) == (name == "tied")


@pytest.mark.parametrize("config", ["[]", "{", "", "[" * 100_000], ids=["list", "half", "empty", "deep"])
def test_what_is_no_model_is_an_error_in_one_line(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ParlayError, match="no model can be read"):
        read_facts(tmp_path)
