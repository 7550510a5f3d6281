"""Drafters are kept by target, method and kind of texts; they come from and go to the Hub. The Hub is a folder here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, RepoUrl

from parlay import models
from parlay.drafters.options import EAGLE3
from parlay.heads import artefact
from parlay.heads.artefact import CARD, CONFIG, GENERAL, WEIGHTS, HeadArtefact
from parlay.heads.hub import TAG
from parlay.heads.opening import TargetHeads, heads_of
from parlay.options import UsageError
from parlay.testing.checkpoints import save_random
from tests.cli.conftest import Cli, cli
from tests.heads.conftest import LOAD

__all__ = ["cli"]

REPO, COMMIT = "someone/toy-drafter", "c" * 40
SHIPPED = [
    "qwen2.5-coder-1.5b-instruct-eagle3-general",
    "smollm2-135m-eagle3-general",
    "smollm2-135m-medusa-general",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(head: HeadArtefact, tmp_path: Path) -> Path:
    """A trained head, for code."""
    artefact.save(tmp_path / "head", head, "# A toy\n")
    return tmp_path / "head"


@dataclass
class Hub:
    """``folder`` is what the one repository holds. ``sent`` are files that were uploaded, by name."""

    folder: Path
    asked: list[str] = field(default_factory=list)
    sent: dict[str, bytes] = field(default_factory=dict)

    def fetch(self, repo: str, *, revision: str | None, allow_patterns: Sequence[str]) -> str:
        if repo != REPO:
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nlong story")
        for name in allow_patterns:
            self.asked.append(name)
            (self.folder.parent / COMMIT).mkdir(exist_ok=True)
            shutil.copy(self.folder / name, self.folder.parent / COMMIT / name)
        assert revision in (None, COMMIT)
        return str(self.folder.parent / COMMIT)

    def commit(self, repo: str, operations: Sequence[CommitOperationAdd], *, commit_message: str) -> None:
        assert repo == REPO
        for operation in operations:
            with operation.as_file() as file:
                self.sent[operation.path_in_repo] = file.read()


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.fetch)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda _, repo, **said: RepoUrl(f"https://huggingface.co/{repo}")
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "create_commit", lambda _, *said, **more: made.commit(*said, **more))
    return made


def listed(cli: Cli) -> list[str]:
    return [row["name"] for row in json.loads(cli("drafters", "list", "--json").out)]


def heads(model: Path) -> TargetHeads:
    return heads_of(str(model), models.load(str(model), LOAD).spec, None)


def test_strategies_find_a_stored_drafter_by_name_by_domain_and_by_themselves(
    cli: Cli, folder: Path, model: Path, tmp_path: Path
) -> None:
    find = heads(model)
    assert find(EAGLE3, "") is None
    assert "added toy-eagle3-code" in cli("drafters", "add", str(folder)).out
    assert cli("drafters", "add", str(folder), "--domain", GENERAL, "--name", "mine").code == 0
    assert listed(cli) == ["mine", "toy-eagle3-code", *SHIPPED]
    for name, domain in (("", GENERAL), ("mine", GENERAL), ("code", "code"), ("toy-eagle3-code", "code")):
        found = find(EAGLE3, name)
        assert found is not None
        assert found.artefact.origin.domain == domain
    save_random("llama", tmp_path / "other", seed=1)
    assert heads(tmp_path / "other")(EAGLE3, "") is None, "it is for another target"
    with pytest.raises(UsageError, match="did you mean mine"):
        find(EAGLE3, "mime")
    assert "removed mine" in cli("drafters", "remove", "mine").out
    assert listed(cli) == ["toy-eagle3-code", *SHIPPED]


def test_info_checks_and_shows_the_card(cli: Cli, folder: Path) -> None:
    said = json.loads(cli("drafters", "info", str(folder), "--json").out)
    assert (said["licence"], said["target"], said["domain"], said["checked"]) == (
        "apache-2.0",
        "someone/toy",
        "code",
        "ok",
    )
    assert "# A toy" in cli("drafters", "info", str(folder)).out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", "nowhere"), "no folder nowhere: name one that parlay train wrote"),
        (("add", "FOLDER", "--domain", "../x"), "take small letters"),
        (("remove", SHIPPED[0]), "part of Parlay"),
        (("remove", "../head"), "no drafter ../head"),
        (("info", "toy"), "no drafter toy on this machine"),
        (("pull", "someone/absent", "--yes"), "can't get 'someone/absent' from the Hugging Face Hub (no network)"),
        (("pull", REPO), "add --yes to agree to its licence (apache-2.0)"),
        (("recommend", "--prompts", "nowhere.txt"), "can't read nowhere.txt"),
        (("recommend", "--prompts", "x", "--rounds", "0"), "--rounds must be at least 1"),
    ],
)
def test_what_can_not_be_done_is_one_line(cli: Cli, hub: Hub, folder: Path, words: tuple[str, ...], told: str) -> None:
    result = cli("drafters", *(str(folder) if word == "FOLDER" else word for word in words))
    assert result.code in (1, 2)
    assert told in result.err
    assert result.err.count("\n") == 1
    assert listed(cli) == SHIPPED


def test_a_second_drafter_of_one_name_and_a_damaged_one_are_refused(cli: Cli, folder: Path, head: HeadArtefact) -> None:
    cli("drafters", "add", str(folder))
    assert "there is a drafter toy-eagle3-code already" in cli("drafters", "add", str(folder)).err
    fewer = {name: each for name, each in head.tensors.items() if name != "fc.weight"}
    artefact.save(folder, replace(head, tensors=fewer), "")
    assert "lacks fc.weight" in cli("drafters", "add", str(folder), "--name", "b").err
    (folder / WEIGHTS).write_bytes(b"cut")
    assert "SHA-256" in cli("drafters", "add", str(folder), "--name", "b").err
    assert listed(cli) == ["toy-eagle3-code", *SHIPPED]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"method": "eagel3"},
            "the drafter needs strategy eagel3, which this version does not have: did you mean eagle3",
        ),
        ({"method": 7}, "method is no text of one line"),
        ({"method": "eagle3\x1b[2J"}, "method is no text of one line"),
        ({"origin": {"target": "a\nb"}}, "target is no text of one line"),
        ({"origin": {"domain": 3}}, "domain is no text of one line"),
        ({"origin": {"owner": "me"}}, "holds no draft head that can be read"),
        ({"settings": None}, "settings are no table"),
        ({"settings": {"expected": "often"}}, "expected is not a share"),
        ({"layer": {}}, "config.json lacks 'rope'"),
        ({"format": "2"}, "holds no draft head that can be read"),
    ],
)
def test_a_config_that_says_something_else_is_refused_and_the_store_stays_usable(
    change: dict[str, object], why: str, cli: Cli, folder: Path
) -> None:
    said = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**said, **change}))
    result = cli("drafters", "add", str(folder))
    assert result.code in (1, 2)
    assert why in result.err
    assert result.err.count("\n") == 1
    assert listed(cli) == SHIPPED


def test_a_card_can_not_write_to_the_terminal_what_it_likes(cli: Cli, folder: Path) -> None:
    (folder / CARD).write_text("# A toy\n\x1b]0;owned\x07 \x1b[2J\n")
    out = cli("drafters", "info", str(folder)).out
    assert "# A toy\n" in out
    assert "\x1b" not in out
    assert "\x07" not in out


def test_a_pulled_drafter_shows_its_licence_first_and_is_pinned(cli: Cli, hub: Hub) -> None:
    refused = cli("drafters", "pull", REPO)
    assert "licence: apache-2.0" in refused.out
    assert WEIGHTS not in hub.asked, "nothing but config and card before the licence is agreed to"
    assert "added toy-eagle3-code" in cli("drafters", "pull", f"hf.co/{REPO}", "--yes").out
    (row,) = [row for row in json.loads(cli("drafters", "list", "--json").out) if not row["shipped"]]
    assert (row["repo"], row["commit"]) == (REPO, COMMIT)
    stored = Path(row["folder"])
    assert artefact.read_facts(stored).sha256 == row["sha256"]
    (stored / WEIGHTS).write_bytes((stored / WEIGHTS).read_bytes()[:-1] + b"x")
    assert "is not the file that config.json names" in cli("drafters", "info", row["name"]).err


def test_a_drafter_is_pushed_with_a_tag_and_nothing_else(cli: Cli, hub: Hub, folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    assert REPO in cli("drafters", "push", str(folder), REPO).out
    assert sorted(hub.sent) == ["README.md", "config.json", WEIGHTS]
    card = huggingface_hub.ModelCard(hub.sent["README.md"].decode())
    assert {TAG, EAGLE3} <= set(card.data.tags or ())
    assert (card.data.license, card.text.strip()) == ("apache-2.0", "# A toy")


def test_strategies_are_measured_on_own_prompts_and_ranked(cli: Cli, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The cat and the dog, the cat and the bird, the cat and the\n")
    amounts = ("--max-tokens", "24", "--rounds", "2", "--strategies", "prompt-lookup,jacobi", "--json")
    done = cli("drafters", "recommend", "--model", "parlay-mini", "--prompts", str(prompts), *amounts)
    said = json.loads(done.out)
    assert {each["strategy"] for each in said["strategies"]} == {"prompt-lookup", "jacobi"}
    for each in said["strategies"]:
        assert each["same"] == each["of"] == 2, each
    assert said["recommended"] in ("prompt-lookup", "jacobi", "none")
