"""The page about a GPU: without one a line; its parts run here on CPU, and one that fails does not end the others."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from parlay.models.torch_ops import eager

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "error: torch sees no CUDA device here, so there is nothing to check\n"


def test_a_part_that_fails_does_not_end_the_page() -> None:
    def broken() -> str:
        raise RuntimeError("no kernel image\nis available")

    def warned() -> str:
        logging.getLogger("parlay.models").warning("no %s", "graphs")
        return "fine"

    text = "\n".join(gpu.page([gpu.Part("A", broken), gpu.Part("B", warned)]))
    assert "## A\n\nFAILED: RuntimeError: no kernel image is available" in text
    assert "## B\n\nfine\n\nWARNED: no graphs\n" in text


def test_forwards_are_timed_by_both_attentions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(eager, "paged_attention", lambda *args, device, **kwargs: asked.append(device))
    small = replace(
        gpu.SHAPE, vocab_size=32, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2, head_dim=16
    )
    lines = gpu.forwards(small, CPU, (16, 600), (1, 4)).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:6]] == [
        ["| 16", "1"],
        ["| 16", "4"],
        ["| 600", "1"],
        ["| 600", "4"],
    ]
    assert asked == [CPU, CPU]
    assert lines[0] == "| tokens before | rows | graphs, ms | Triton, ms | torch, ms |"


def test_conformance_and_the_machine_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "KIT", ("prompt-lookup",))
    monkeypatch.setattr(gpu, "KIT_CHECKS", ("greedy",))
    assert gpu.kit(CPU).splitlines() == [
        "- `prompt-lookup`, with graphs: passed",
        "- `prompt-lookup`, without graphs: passed",
    ]
    assert '"commit"' in gpu.machine(CPU)


def test_speeds_are_those_of_the_built_in_model() -> None:
    text = gpu.speeds("parlay-mini", CPU, gpu.Texts(("edit",), prompts=1, max_tokens=8), graphs=False)
    assert "tok/s" in text
    assert "edit" in text
