"""`head=user/name` opens a head from the Hugging Face Hub, a folder here; of a whole model it fetches no more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from safetensors.torch import save_file

from parlay.drafters.heads.proving import ProvedHeads
from parlay.heads.artefact import BadHead
from parlay.models.config import DecoderConfig
from parlay.models.fetch.hub import NotOnHub
from parlay.options import UsageError
from tests.heads.layouts import published

REPO = "someone/published"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the one repository holds; `tmp_path / "fetched"` is the cache."""
    held, fetched = tmp_path / "held", tmp_path / "fetched"
    held.mkdir()
    fetched.mkdir()

    def fetch(repo: str, *, allow_patterns: Sequence[str], ignore_patterns: Sequence[str] | None) -> str:
        if repo != REPO:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network")
        for path in held.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, fetched / path.name)
        return str(fetched)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    return held


@pytest.mark.parametrize("name", [REPO, f"hf.co/{REPO}"])
def test_a_repository_opens(name: str, hub: Path, config: DecoderConfig, find: ProvedHeads) -> None:
    published.write(hub, *published.medusa(config))
    assert find("medusa", name) is not None


def test_of_a_whole_models_files_those_alone_are_fetched_that_hold_the_head(
    hub: Path, config: DecoderConfig, find: ProvedHeads, tmp_path: Path
) -> None:
    said, tensors = published.deepseek_mtp(config)
    own = {name: each for name, each in tensors.items() if name.startswith(f"model.layers.{config.num_layers}.")}
    parts = {"a.safetensors": {name: tensors[name] for name in tensors.keys() - own.keys()}, "b.safetensors": own}
    (hub / "config.json").write_text(json.dumps(said))
    for file, part in parts.items():
        save_file(part, hub / file)
    index = {name: file for file, part in parts.items() for name in part}
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert find("mtp", REPO) is not None
    assert not (tmp_path / "fetched" / "a.safetensors").exists()
    (hub / "b.safetensors").unlink()
    (tmp_path / "fetched" / "b.safetensors").unlink()
    with pytest.raises(BadHead, match=r"b\.safetensors is damaged or cut short"):
        find("mtp", REPO)


def test_what_is_not_on_the_hub_and_what_is_no_name_are_one_line(hub: Path, find: ProvedHeads) -> None:
    with pytest.raises(NotOnHub, match="can't get 'someone/absent' from the Hugging Face Hub"):
        find("medusa", "someone/absent")
    with pytest.raises(UsageError, match="no folder of one"):
        find("medusa", "some/where/else")
