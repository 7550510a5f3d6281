"""A whole run at toy size: it ends in a checkpoint that `transformers` loads, resumes, and distils."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from parlay.train.lm import Trainer, TrainOptions, train
from parlay.train.optimizers import Optimizers, TrainingClock, learning_rate, row_length
from parlay.types import ParlayError
from tests.train.tiny_lm import tiny


def options(data: Path, tmp_path: Path) -> TrainOptions:
    """About a second of training: one step at least, however busy the machine is."""
    return tiny(TrainOptions, data, tmp_path, hours=1.5 / 3600)


def test_train_resume_and_distil(data: Path, tmp_path: Path) -> None:
    first = options(data, tmp_path)
    out = train(first)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer.encode("The harbour was quiet."), skip_special_tokens=True).endswith("quiet.")

    record = json.loads((out / "provenance.json").read_text())
    assert record["steps"] >= 1
    assert len(record["data"]["files"]) == 2
    assert record["checks"][-1]["loss"] > 0
    assert str(tmp_path) not in json.dumps(record), "a checkpoint names no absolute path"

    train(dataclasses.replace(first, hours=record["hours"] + first.hours, resume=True))
    assert json.loads((out / "provenance.json").read_text())["steps"] > record["steps"]

    student = dataclasses.replace(first, out=tmp_path / "student", teacher=out)
    assert AutoModelForCausalLM.from_pretrained(train(student)).num_parameters() == model.num_parameters()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Signals raise as in a command, also where the suite runs in the background and inherits that one is ignored."""
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_update_that_is_interrupted_is_saved_whole(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    """Else the state would have weights of an update that is made once more from there."""
    step, updated = Optimizers.step, []

    def interrupted(optimizers: Optimizers, factor: float) -> None:
        signal.raise_signal(sent)
        step(optimizers, factor)
        updated.append(factor)

    monkeypatch.setattr(Optimizers, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(dataclasses.replace(options(data, tmp_path), tokens=100_000))
    state = torch.load(tmp_path / "work" / "state-tiny.pt", weights_only=True)
    assert len(updated) == state["progress"]["step"] == 1


def test_a_teacher_with_another_vocabulary_is_refused(data: Path, tmp_path: Path) -> None:
    out = train(options(data, tmp_path))
    other = dataclasses.replace(options(data, tmp_path), work=tmp_path / "other", vocab_size=350, teacher=out)
    with pytest.raises(ValueError, match="another vocabulary"):
        train(other)


def test_a_folder_without_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ValueError, match="no text in"):
        train(options(tmp_path / "data", tmp_path))


def test_too_little_text_for_the_context_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give more text, or a shorter --context"):
        train(dataclasses.replace(options(data, tmp_path), context=4096))


def test_a_state_of_another_model_and_other_texts_are_noticed(data: Path, tmp_path: Path) -> None:
    first = dataclasses.replace(options(data, tmp_path), tokens=1)
    train(first)
    with pytest.raises(ValueError, match=r"is from a run with .*400.*, not .*350.*: --resume needs the same options"):
        train(dataclasses.replace(first, vocab_size=350, resume=True))
    state = tmp_path / "work" / "state-tiny.pt"
    for bad in (state.read_bytes()[:1000], b""):
        state.write_bytes(bad)
        with pytest.raises(ValueError, match=r"state-tiny\.pt is damaged, or from a run with other options"):
            train(dataclasses.replace(first, resume=True))
    (data / "more.txt").write_text("Nobody knew of this page. " * 40)
    record = json.loads((train(first) / "provenance.json").read_text())
    assert len(record["data"]["files"]) == 3, "a file that came later is read, too"


def test_a_loss_that_is_no_number_changes_no_weight(data: Path, tmp_path: Path) -> None:
    def spoiled(asked: TrainOptions) -> Trainer:
        run = Trainer(asked)
        run.loss = lambda ids_BT, labels_BT: run.model.lm_head.weight.sum() * torch.nan
        return run

    with pytest.raises(ValueError, match=r"the loss became nan at step 0: resume from .* by --resume"):
        train(dataclasses.replace(options(data, tmp_path), tokens=1000), spoiled)
    assert not list((tmp_path / "work").glob("state-*"))


def test_a_model_that_can_t_be_written_leaves_the_one_before(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = train(dataclasses.replace(options(data, tmp_path), tokens=1))
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def full(self: object, folder: Path) -> None:
        (Path(folder) / "tokenizer.json").write_text("cut sh")
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with pytest.raises(
        ParlayError, match=r"can't write the model to .*out \(No space .*earlier files there are unchanged"
    ):
        train(dataclasses.replace(options(data, tmp_path), tokens=1))
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hours": 0}, "hours must be more than 0, got 0"),
        ({"shape": "giant"}, "giant"),
        ({"context": 9999}, "9999"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"threads": -1}, "threads must be at least 0"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options(tmp_path, tmp_path), **change)  # type: ignore[arg-type]


def test_progress_ends_at_the_end(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step may have more tokens than are left: no line says 200 %, or that less than no time is left."""
    train(dataclasses.replace(options(data, tmp_path), tokens=1))
    told = "".join(capsys.readouterr())
    assert "100.0%" in told
    assert " 0.0 min left" in told


def test_the_rate_warms_up_and_lands_at_zero() -> None:
    rates = [learning_rate(share / 100) for share in range(101)]
    assert rates[0] < 0.1
    assert max(rates) == 1.0
    assert rates[-1] == 0.0
    assert sorted(rates[30:], reverse=True) == rates[30:]


def test_rows_grow_and_never_pass_the_context() -> None:
    lengths = [row_length(share / 100, 2048) for share in range(101)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (512, 2048)
    assert {row_length(share / 100, 700) for share in range(101)} == {512, 700}


def test_a_pause_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped for ten minutes loses none of its training time."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = TrainingClock()
    for seconds in [1.0] * 10 + [600.0] + [1.0]:
        now += seconds
        clock.lap()
    assert clock.elapsed == pytest.approx(15.0)
    with clock.uncapped():
        now += 60.0
    assert clock.elapsed == pytest.approx(75.0)
