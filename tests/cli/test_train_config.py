"""`parlay train RECIPE --config FILE`: options in a file, under the names of the flags, and nothing else in it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from parlay.cli.flags import add_config_flags, options_or_config
from parlay.cli.train import RECIPES
from parlay.options import Options, UsageError
from parlay.train import heads
from parlay.train.canvases import run as canvases
from parlay.train.lm import TrainOptions
from parlay.train.options import DistillTrainOptions, Eagle3TrainOptions
from parlay.train.translation import training as translation
from tests.cli.conftest import Cli


def parse(*argv: str) -> Eagle3TrainOptions:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, Eagle3TrainOptions)
    return options_or_config(Eagle3TrainOptions, parser.parse_args(argv))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def test_without_flags_or_file_the_defaults_hold() -> None:
    assert parse() == Eagle3TrainOptions()


def test_a_file_gives_what_flags_leave_out(config: Path) -> None:
    config.write_text("steps: 2\nbatch-tokens: 64\nslow_rate: 1e-3\nprompts: asked.jsonl\nwhole: false\nlicence: MIT\n")
    found = parse("--config", str(config), "--steps", "3", "--no-own-vocabulary")
    assert found == Eagle3TrainOptions(
        steps=3, batch_tokens=64, slow_rate=1e-3, prompts=Path("asked.jsonl"), whole=False, licence="MIT"
    )
    assert parse("--steps", "1", "--config", str(config)).steps == 1, "whichever comes first"


def test_a_flag_may_say_the_default(config: Path) -> None:
    config.write_text("steps: 2\nwhole: false\n")
    assert parse("--config", str(config), "--steps", "3", "--whole") == Eagle3TrainOptions()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("setps: 2", "no option is called setps: did you mean steps"),
        ("frobnicate: 2", "no option is called frobnicate: --help lists them"),
        ("steps: 2\nsteps: 3", "steps is given twice"),
        ("batch-tokens: 64\nbatch_tokens: 64", "batch_tokens is given twice"),
        ("steps: 0", "steps must be at least 1, got 0"),
        ("steps: many", "steps must be a whole number, got many"),
        ("steps: 1.5", "steps must be a whole number"),
        ("steps: true", "steps must be a whole number"),
        ("steps: [1, 2]", "steps must have one value"),
        ("steps:\n  of: 3", "steps must have one value"),
        ("- steps", "must contain lines of KEY: VALUE"),
        ("steps: [", "run.yaml as YAML: "),
        ("steps: 2026-99-99", "run.yaml as YAML: "),
        ("steps: %s" % ("9" * 5000), "run.yaml as YAML: "),
        ("steps: !!python/object/apply:os.getcwd []", "run.yaml as YAML: "),
        ("steps: !!int ''", "run.yaml as YAML: a value does not fit its tag"),
        ("steps: !!bool 2", "run.yaml as YAML: a value does not fit its tag"),
        ("steps: !!timestamp 2", "run.yaml as YAML: a value does not fit its tag"),
        ("out: 7", "out must be a path, got 7"),
        ("steps:", "steps must be a whole number, got None"),
        ("[" * 5000, "run.yaml as YAML: "),
        ("steps: 2\n--- \nsteps: 3", "run.yaml as YAML: "),
    ],
)
def test_what_is_wrong_is_named_with_the_file(text: str, why: str, config: Path) -> None:
    config.write_text(text)
    with pytest.raises(UsageError, match=str(config)) as raised:
        parse("--config", str(config))
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't read .*none\.yaml"):
        parse("--config", str(tmp_path / "none.yaml"))


def test_options_that_depend_on_each_other_are_checked_together(config: Path) -> None:
    config.write_text("source: student\n")
    parser = argparse.ArgumentParser()
    add_config_flags(parser, DistillTrainOptions)
    with pytest.raises(UsageError, match="source=student: name the model that writes"):
        options_or_config(DistillTrainOptions, parser.parse_args(["--config", str(config)]))


def test_what_must_be_given_may_stand_in_the_file(config: Path) -> None:
    parser = argparse.ArgumentParser()
    add_config_flags(parser, TrainOptions)
    config.write_text("data: texts\n")
    assert options_or_config(TrainOptions, parser.parse_args(["--config", str(config)])).data == Path("texts")
    with pytest.raises(UsageError, match="--data is missing"):
        options_or_config(TrainOptions, parser.parse_args([]))


def test_the_command_says_what_is_wrong_in_one_line(cli: Cli, config: Path) -> None:
    config.write_text("setps: 2\n")
    result = cli("train", "eagle3", "--config", str(config))
    assert result.code == 2
    assert "setps" in result.err
    assert result.err.count("\n") == 1


def test_every_recipe_has_its_options_and_a_way_to_train() -> None:
    assert all(issubclass(recipe.options_class(), Options) for recipe in RECIPES.values())
    named = {name for name, recipe in RECIPES.items() if recipe.named}
    assert named == heads.METHODS.keys() | canvases.METHODS.keys() | translation.METHODS.keys()


@pytest.mark.parametrize(
    "words",
    [["defer", "--model", "parlay-mini", "--assistant", "parlay-mini"], ["eagle3", "--work", "made/work"], ["lm"]],
)
def test_a_run_that_fails_early_leaves_no_empty_folder(
    cli: Cli, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = "--data" if words == ["lm"] else "--texts"
    result = cli("train", *words, texts, "none.txt", "--out", "made/out")
    assert result.err.startswith("parlay: error: no file or folder none.txt")
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "file", "text"),
    [
        ("medusa", "README.md", "notes"),
        ("medusa", "config.json", '{"method": "eagle3"}'),
        ("medusa", "config.json", '{"model_type": "llama"}'),
        ("distill", "config.json", '{"method": "medusa"}'),
        ("lm", "config.json", "[]"),
    ],
)
def test_a_run_writes_into_no_folder_of_something_else(
    cli: Cli, tmp_path: Path, kind: str, file: str, text: str
) -> None:
    (tmp_path / file).write_text(text)
    texts = ["--data" if kind == "lm" else "--texts", "none.txt"]
    result = cli("train", kind, *texts, "--out", str(tmp_path))
    assert result.code == 2
    what = "medusa head" if kind == "medusa" else "model"
    assert result.err == (f"parlay: error: --out {tmp_path} is not empty, and holds no {what}: name another folder\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == [text]


@pytest.mark.parametrize(("kind", "text"), [("medusa", '{"method": "medusa"}'), ("lm", '{"model_type": "llama"}')])
def test_a_run_may_replace_what_it_wrote_before(cli: Cli, tmp_path: Path, kind: str, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    texts = ["--data" if kind == "lm" else "--texts", str(tmp_path / "none.txt")]
    assert "no file or folder" in cli("train", kind, *texts, "--out", str(tmp_path)).err


def test_files_that_cannot_be_read_are_told_plainly(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["eagle3", "--config", "none.yaml"], ["mdlm", "--data", "none.yaml"]):
        assert cli("train", *words).err == "parlay: error: can't read none.yaml: No such file or directory\n"
