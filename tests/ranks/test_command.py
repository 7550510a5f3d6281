"""One command starts all ranks of a machine and ends them; others can be started by hand."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from parlay import LLM, SamplingParams
from parlay.cli import main
from parlay.ranks.leader import Leader
from parlay.ranks.wire import SECRET

GREEDY = SamplingParams(temperature=0, max_tokens=40)
PROMPTS = ["Once upon a time", "def add(a, b):"]


def test_an_llm_of_two_ranks_starts_and_ends_its_child_process() -> None:
    """Under every strategy it writes the text of its own plain decoding."""
    with LLM("parlay-mini", tensor_parallel_size=2, dtype="float32") as llm:
        assert isinstance(llm.runner, Leader)
        (child,) = llm.runner.followers.children
        plain = llm.generate(PROMPTS, GREEDY, strategy="none")
        for strategy in ("auto", "prompt-lookup", "token-recycling"):
            found = llm.generate(PROMPTS, GREEDY, strategy=strategy)
            assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in plain]
    assert child.returncode == 0


def test_a_rank_that_nobody_waits_for_says_until_when_it_waits_and_then_that_it_ends(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the ranks\n")
    command = [sys.executable, "-m", "parlay", "rank", "--join", "127.0.0.1:1", "--rank-timeout", "1"]
    done = subprocess.run([*command, "--rank-secret-file", str(secret)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    waits, ends = done.stderr.splitlines()
    assert waits.startswith("parlay: nothing answers at 127.0.0.1:1 yet: waiting until ")
    assert ends.startswith("parlay: error: nobody answers at 127.0.0.1:1 within 1 s")


def test_a_child_of_a_rank_0_that_ends_at_once_speaks_of_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SECRET, "a secret of the ranks")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].close()).start()
        assert main(["rank", "--of-parent", "--join", f"127.0.0.1:{listener.getsockname()[1]}"]) == 1
    assert capsys.readouterr().err == "parlay: error: rank 0 ended before this rank had joined\n"
