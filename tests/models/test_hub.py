"""GGUF files on the Hub are found by their quantisation, and nothing else is fetched. The Hub is a folder here."""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import get_session

from parlay import LLM, SamplingParams
from parlay.models.fetch.hub import NotOnHub, asked, check_hashes
from parlay.models.fetch.resolving import resolve, resolve_tokenizer
from parlay.options import LoadOptions
from parlay.types import ParlayError
from tests.cli.conftest import Cli, cli
from tests.models import gguf_files

__all__ = ["cli"]

FILES = {
    "some/model-GGUF": (
        "README.md",
        "model-Q4_0.gguf",
        "model-Q4_0_4_4.gguf",
        "model-Q4_K_M.gguf",
        "model-f16.gguf",
        "mmproj-model-f16.gguf",
        "Q8_0/model-Q8_0-00001-of-00002.gguf",
        "Q8_0/model-Q8_0-00002-of-00002.gguf",
        "model.Q5_K_M.gguf",
        "other.Q5_K_M.gguf",
    ),
    "some/model": (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "consolidated-00001-of-00002.safetensors",
        "original/model.safetensors",
        "pytorch_model.bin",
        "additional_chat_templates/rag.jinja",
    ),
    "some/translator": ("config.json", "model.safetensors", "source.spm", "target.spm", "vocab.json", "rust_model.ot"),
    "some/mt5": ("config.json", "model.safetensors", "spiece.model", "tf_model.h5"),
}


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were asked for and are there, in order."""
    asked: list[str] = []

    def list_files(repo: str) -> list[str]:
        if repo not in FILES:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nlong story")
        return list(FILES[repo])

    def fetch(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str] | None) -> str:
        names = [n for n in list_files(repo) if any(fnmatch.fnmatchcase(n, pattern) for pattern in allow_patterns)]
        names = [n for n in names if not any(fnmatch.fnmatchcase(n, pattern) for pattern in ignore_patterns or ())]
        asked.extend(names)
        for name in names:
            path = tmp_path / "snapshot" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", list_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return asked


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("some/model-GGUF:Q4_K_M", ["model-Q4_K_M.gguf"]),
        ("hf.co/some/model-GGUF:q4_k_m", ["model-Q4_K_M.gguf"]),
        ("https://huggingface.co/some/model-GGUF:Q4_0", ["model-Q4_0.gguf"]),
        ("some/model-GGUF:Q8_0", ["model-Q8_0-00001-of-00002.gguf", "model-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_a_quantisation_names_a_file(model: str, names: list[str], fetched: list[str]) -> None:
    assert resolve(model).name == names[0]
    assert [Path(name).name for name in fetched] == names


def test_weights_are_fetched_once_though_a_repository_has_them_in_two_layouts(fetched: list[str]) -> None:
    resolve("some/model")
    weights = [name for name in fetched if name.endswith(".safetensors")]
    assert weights == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert "additional_chat_templates/rag.jinja" in fetched


@pytest.mark.parametrize(
    ("model", "files"),
    [("some/translator", {"source.spm", "target.spm", "vocab.json"}), ("some/mt5", {"spiece.model"})],
)
def test_tokenizers_of_encoder_decoders_are_fetched(model: str, files: set[str], fetched: list[str]) -> None:
    resolve(model)
    assert set(fetched) == {"config.json", "model.safetensors", *files}


def test_a_projector_is_not_the_model(fetched: list[str]) -> None:
    assert resolve("some/model-GGUF:F16").name == "model-f16.gguf"
    assert resolve_tokenizer("some/model-GGUF:F16").name == "model-f16.gguf"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("some/model-GGUF:Q3_K_S", r"has no Q3_K_S; its GGUF files are .*model-Q4_K_M"),
        ("some/model-GGUF:Q5_K_M", r"more than one Q5_K_M: model\.Q5_K_M\.gguf, other\.Q5_K_M\.gguf"),
        ("some/model-GGUF", "contains GGUF files: name one by its ending"),
        ("some/model-GGUF:*", "the quantisation after the colon of .* is missing"),
        ("some/absent:Q4_0", r"can't get 'some/absent' from the Hugging Face Hub \(no network\): name a local folder"),
        ("hf.co/some/absent", "can't get 'some/absent'"),
    ],
)
def test_what_is_not_there_is_one_line(model: str, message: str, fetched: list[str]) -> None:
    with pytest.raises(ParlayError, match=message) as caught:
        resolve(model)
    assert "\n" not in str(caught.value)


def test_pulled_files_are_held_against_the_hubs_hashes(tmp_path: Path) -> None:
    """The Hub's cache names the blob of a large file by its hash, and links to it."""
    content = b"weights"
    blob = tmp_path / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    check_hashes([link])
    blob.write_bytes(b"weighty")
    with pytest.raises(NotOnHub, match=r"model\.safetensors is not what the Hugging Face Hub says"):
        check_hashes([link])
    assert not blob.exists()


def test_a_model_from_the_hub_runs_and_its_draft_model_may_be_a_file_too(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = gguf_files.write(
        tmp_path / "mini.BF16.gguf", resolve("parlay-mini"), kind=gguf_files.Kind.BF16, tokenizer=True
    )
    draft = gguf_files.write(tmp_path / "draft.gguf", resolve("parlay-mini-draft"), kind=gguf_files.Kind.Q8_0)
    (tmp_path / "snapshot").mkdir()

    def fetch(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str] | None) -> str:
        shutil.copy(target, tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    llm = LLM("hf.co/me/mini:BF16", load=LoadOptions(dtype="float32", device="cpu"), draft_model=str(draft))
    params = SamplingParams(max_tokens=24, temperature=0)
    prompt = "The cat and the dog, the cat and the bird, the cat and the"
    plain, drafted = (llm.generate([prompt], params, strategy=name)[0].outputs[0] for name in ("none", "draft-model"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.accepted_tokens > 0
    pulled = cli("pull", "hf.co/me/mini:BF16")
    assert (pulled.code, pulled.out.strip()) == (0, str(tmp_path / "snapshot" / target.name))


def test_a_tokenizer_that_is_nowhere_is_told_with_what_to_name_instead() -> None:
    with pytest.raises(NotOnHub, match=r"can't get 'no such name' .*: name a local folder with the tokenizer instead"):
        resolve_tokenizer("no such name")


def test_a_network_that_is_down_is_one_line_whatever_the_hubs_library_asks_with() -> None:
    closed = "http://127.0.0.1:1"
    with pytest.raises(NotOnHub, match=r"can't get 'me/mini' from the Hugging Face Hub"):
        asked("me/mini", lambda: get_session().get(closed))
