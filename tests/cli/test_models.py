"""Models on this machine are listed and removed, what can't be found or used is said at once, and shells complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parlay.models.fetch.pulled import place_of
from tests.cli.conftest import Cli


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with one pulled model, and an empty Hub's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place = place_of("smollm2-135m")
    place.parent.mkdir(parents=True)
    place.write_bytes(b"GGUF")
    return place


def test_models_are_listed_and_pulled_ones_removed(cli: Cli, pulled: Path) -> None:
    rows = {row["name"]: row for row in json.loads(cli("models", "--json").out)}
    assert rows["parlay-mini"]["source"] == "built-in"
    pulled_row = {"name": "smollm2-135m", "source": "pulled", "bytes": 4, "place": str(pulled), "end_tokens": []}
    assert rows["smollm2-135m"] == {**pulled_row, "parameters": None}
    assert rows["parlay-mini"]["parameters"] == 6_950_912
    assert rows["parlay-mini"]["end_tokens"]
    assert str(pulled) in cli("models").out
    assert f"ends at {' '.join(rows['parlay-mini']['end_tokens'])}" in cli("models").out
    assert "removed smollm2-135m" in cli("rm", "smollm2-135m").out
    assert not pulled.exists()
    assert str(pulled) not in cli("models").out


def test_a_model_from_the_hub_is_removed_with_all_its_revisions(
    cli: Cli, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the Hub about it, which takes a minute where there is no network."""
    for name in ("fetch_folder", "fetch_gguf"):
        monkeypatch.setattr(f"parlay.models.fetch.hub.{name}", lambda *_: pytest.fail("asked the Hub"))
    place = tmp_path / "hub" / "models--someone--small"
    for revision in ("1" * 40, "2" * 40):
        (place / "snapshots" / revision).mkdir(parents=True)
        (place / "snapshots" / revision / "model.safetensors").write_bytes(revision.encode())
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("2" * 40)
    assert "someone/small" in cli("models").out
    assert "removed someone/small" in cli("rm", "someone/small").out
    assert not place.exists()
    assert pulled.exists()


def test_a_terminal_obeys_no_name_of_a_folder(
    cli: Cli, pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "hub" / "models--someone--\x1b[31mred" / "snapshots" / ("1" * 40)
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    listed, removed = cli("models").out, cli("rm", "someone/\x1b[31mred").out
    assert "[31mred" in listed
    assert "removed someone/" in removed
    assert "\x1b" not in listed + removed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("rm", "parlay-mini"), "part of Parlay"),
        (("rm", "smollm"), "did you mean smollm2-135m?"),
        (("generate", "x", "--model", "smollm2-135m:Q8_0"), "remove :Q8_0"),
        (("run", "llama3:8b"), "user/repo:Q4_K_M"),
        (("chat", "--model", "./nowhere"), "no folder or file ./nowhere"),
    ],
)
def test_names_that_mean_nothing_are_told_in_one_line(
    cli: Cli, pulled: Path, words: tuple[str, ...], told: str
) -> None:
    result = cli(*words)
    assert result.code in (1, 2)
    assert told in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "words", [("generate", "x", "--model"), ("chat", "--model"), ("serve", "--port", "0"), ("plan", "--model")]
)
def test_a_model_that_is_not_there_is_told_before_torch_is_loaded(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "no-model.gguf").write_text("version https://git-lfs.github.com/spec/v1\n")
    lines = [[*words, "./nowhere"], [*words, str(tmp_path / "no-model.gguf")]]
    code = f"import sys, parlay.cli\nprint([parlay.cli.main(words) for words in {lines!r}], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1, 1] False"


@pytest.mark.parametrize(("text", "told"), [("{bad", "is not JSON"), ('{"type": "nonsense"}', "is not valid")])
def test_the_error_of_a_schema_names_its_flag_and_file(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    (tmp_path / "form.json").write_text(text)
    monkeypatch.chdir(tmp_path)  # an error shortens the long name of a file
    result = cli("generate", "x", "--model", "parlay-mini", "--json-schema", "form.json")
    assert result.code == 2
    assert f"--json-schema form.json {told}" in result.err


def test_a_shell_completes_commands_flags_and_strategies(cli: Cli) -> None:
    pytest.importorskip("shtab")
    script = cli("completion", "bash").out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert {"generate", "--max-tokens", "prompt-lookup"} <= set(script.replace('"', "'").replace("'", " ").split())
    assert "_shtab_parlay_train_eagle3_option_strings=(-h --help --config" in script, "a recipe's flags come late"
