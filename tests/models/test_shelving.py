"""Experts that are read from disk when rows choose them: the bits of a model in memory, or one clear line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay import LLM, SamplingParams
from parlay.models.compiled import streaming
from parlay.models.compiled.shelving import ExpertShelf, ExpertsOnDisk
from parlay.models.compiled.streaming import LayersLost
from parlay.models.native import NativeRunner
from parlay.options import LoadOptions
from parlay.testing.checkpoints import save_random
from parlay.types import RunnerLost, Segment
from tests.models.test_quantizing import written_of
from tests.models.test_streaming import (
    TEXT,
    check_early_ends,
    file_in,
    flip,
    folder,
    least,
    library,
    logits,
    opened,
    stream_of,
    two_threads,
)

__all__ = ["folder", "library", "two_threads"]  # fixtures


def shelf_of(runner: NativeRunner) -> ExpertShelf:
    streamed = runner._forward._weights.streamed  # type: ignore[attr-defined]
    assert streamed is not None
    assert isinstance(streamed.stream, ExpertShelf)
    return streamed.stream


def slot_of(model: Path, options: LoadOptions | None = None) -> int:
    """Bytes of one expert's place."""
    shelf = shelf_of(opened(model, least(model, options), options))
    return len(shelf._slots) // 2


@pytest.mark.parametrize("family", ["gemma4-moe", "mixtral", "qwen2-moe", "gpt-oss", "glm4-moe"])
def test_bits_are_those_of_a_model_in_memory(family: str, tmp_path: Path, folder: Path) -> None:
    """With two slots, with some, and with all but one; packed now, and read from the file of before."""
    model = tmp_path / family
    save_random(family, model)
    expected, room, each = logits(opened(model)), least(model), slot_of(model)
    experts = 2 + shelf_of(opened(model, room)).bytes // each
    for slots in (2, 5, experts - 1):
        runner = opened(model, room + (slots - 2) * each)
        assert shelf_of(runner).bytes == (experts - slots) * each
        for _ in range(2):
            assert torch.equal(logits(runner), expected)
    assert len(list(folder.iterdir())) == 1, "one file, whatever the room"


@pytest.mark.parametrize("asked", [{"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_bits_in_every_form_of_weights(asked: dict[str, str], tmp_path: Path, folder: Path) -> None:
    """Step sizes of int8 go with an expert, wherever it lies."""
    save_random("qwen2-moe", tmp_path)
    options = LoadOptions(device="cpu", **asked)  # type: ignore[arg-type]
    expected, room = logits(opened(tmp_path, None, options)), least(tmp_path, options)
    for more in (0, 5 * slot_of(tmp_path, options)):
        runner = opened(tmp_path, room + more, options)
        assert shelf_of(runner).bytes > 0
        assert torch.equal(logits(runner), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_bits_of_a_file_in_blocks(kind: str, tmp_path: Path, folder: Path) -> None:
    written = written_of("mixtral", tmp_path, kind)
    expected, runner = logits(opened(written)), opened(written, least(written))
    assert shelf_of(runner).bytes > 0
    assert torch.equal(logits(runner), expected)


def test_where_all_else_does_not_fit_layers_are_read(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_random("gemma4-moe", tmp_path)
    expected = logits(opened(tmp_path))
    monkeypatch.setattr(ExpertsOnDisk, "least", property(lambda self: 1 << 60))
    runner = opened(tmp_path, least(tmp_path))
    assert len(stream_of(runner).split.streamed) == 3
    assert torch.equal(logits(runner), expected)


def test_two_threads_give_the_same_bits(two_threads: None, tmp_path: Path, folder: Path) -> None:
    save_random("qwen2-moe", tmp_path)
    options = LoadOptions(device="cpu", threads=2)
    expected, room, each = logits(opened(tmp_path)), least(tmp_path), slot_of(tmp_path)
    for more in (0, 3, 9):
        runner = opened(tmp_path, room + more * each, options)
        for _ in range(4):
            assert torch.equal(logits(runner), expected)


def bytes_of(runner: NativeRunner, tokens: Sequence[int]) -> int:
    """Bytes that a forward of these rows reads."""
    before = shelf_of(runner).bytes_read
    runner.open("counted", tokens[:1])
    assert runner.reserve("counted", len(tokens))
    runner.forward([Segment("counted", tuple(tokens))])
    runner.release("counted")
    return shelf_of(runner).bytes_read - before


def test_a_forward_reads_what_its_rows_chose(tmp_path: Path, folder: Path) -> None:
    """Two of six experts in each of three layers for a row, and never more than the layers have."""
    save_random("gemma4-moe", tmp_path)
    room, each = least(tmp_path), slot_of(tmp_path)
    by_rows = [bytes_of(opened(tmp_path, room), TEXT[:rows]) for rows in (1, 4, 8)]
    assert by_rows[0] == 2 * 3 * each
    assert by_rows[0] < by_rows[1] <= by_rows[2] <= 6 * 3 * each
    whole = opened(tmp_path, room + 15 * each)
    assert bytes_of(whole, TEXT[:8]) == by_rows[2]
    assert bytes_of(whole, TEXT[:8]) < by_rows[2] / 2, "most of them are still there"


def test_what_was_read_long_ago_goes_first(tmp_path: Path, folder: Path) -> None:
    """Each layer has its share of the slots: a row that comes again finds its experts there."""
    save_random("gemma4-moe", tmp_path)
    runner = opened(tmp_path, least(tmp_path) + 4 * slot_of(tmp_path))
    assert bytes_of(runner, TEXT[:1]) > 0
    assert bytes_of(runner, TEXT[:1]) == 0


@pytest.mark.parametrize("said", ["was cut short", "is damaged"])
def test_a_file_that_changes_under_the_model(said: str, tmp_path: Path, folder: Path) -> None:
    """The request says so, never with another text; who loads the model next packs it anew."""
    save_random("mixtral", tmp_path)
    room = least(tmp_path)
    runner = opened(tmp_path, room)
    expected, file = logits(runner), file_in(folder)
    if said == "was cut short":
        os.truncate(file, 4096)
    else:
        for at in range(4096, file.stat().st_size, 4096):
            flip(file, at)
    assert runner.loss() == ""
    for _ in range(2):
        with pytest.raises(RunnerLost, match=said):
            logits(runner)
    assert said in runner.loss(), "a server then loads the model again"
    assert torch.equal(logits(opened(tmp_path, room)), expected)


def test_one_damaged_expert_harms_those_alone_that_choose_it(tmp_path: Path, folder: Path) -> None:
    """Each expert has a sum of its own."""
    save_random("mixtral", tmp_path)
    runner = opened(tmp_path, least(tmp_path))
    flip(file_in(folder), 4096)
    outcomes = [_outcome(runner, token) for token in range(5, 30)]
    assert "damaged" in outcomes
    assert "fine" in outcomes


def _outcome(runner: NativeRunner, token: int) -> str:
    try:
        bytes_of(runner, (token,))
    except LayersLost:
        runner.release("counted")
        return "damaged"
    return "fine"


def test_all_threads_leave_a_forward_that_ends_early(two_threads: None, tmp_path: Path, folder: Path) -> None:
    save_random("qwen2-moe", tmp_path)
    runner = opened(tmp_path, least(tmp_path), LoadOptions(device="cpu", threads=2))
    logits(runner)
    size = file_in(folder).stat().st_size
    check_early_ends(runner, file_in(folder), range(4096, size // 2, size // 9))


def test_a_disk_that_stalls(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for no time at all finds that every disk does. When it answers, the model goes on."""
    save_random("mixtral", tmp_path)
    room, expected = least(tmp_path), logits(opened(tmp_path))
    opened(tmp_path, room)
    with monkeypatch.context() as patched:
        patched.setattr(streaming, "PATIENCE", 1e-9)
        runner = opened(tmp_path, room)
        with pytest.raises(LayersLost, match=r"gave nothing of .* see whether it still answers"):
            _many_times(runner)
    assert torch.equal(logits(opened(tmp_path, room)), expected)


def _many_times(runner: NativeRunner) -> list[Tensor]:
    return [logits(runner) for _ in range(20)]


@pytest.mark.parametrize("strategy", ["prompt-lookup", "layer-skip"])
def test_texts_are_the_same_with_drafts(strategy: str, tmp_path: Path, folder: Path) -> None:
    save_random("mixtral", tmp_path)
    asks = [SamplingParams(temperature=0, max_tokens=16), SamplingParams(temperature=0.8, seed=3, max_tokens=16)]
    expected, found = (
        _texts(tmp_path, asks, each, memory)
        for each, memory in (("none", None), (strategy, f"weights={least(tmp_path)}"))
    )
    assert found == expected


def _texts(model: Path, asks: Sequence[SamplingParams], strategy: str, memory: str | None) -> list[tuple[int, ...]]:
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 5, 6, 7]}] * len(asks)
    with LLM(str(model), device="cpu", memory=memory, router_memory="off") as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(prompts, asks, strategy=strategy)]
