"""Rules of votes, replayed on recorded chains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.reasoning import difference
from benchmarks.vote_rules import Chains, Replayed, append, read, replay
from parlay import VoteParams

CHAINS = Chains(7, "5", ("4", "5", "5", "5"), (2, 3, 4, 9))


def test_a_replay_counts_the_tokens_that_chains_in_step_would_write() -> None:
    assert replay(CHAINS, VoteParams(n=4, early=False)) == Replayed("5", 2 + 3 + 4 + 9, 9)
    early = replay(CHAINS, VoteParams(n=4))
    assert early == Replayed("5", 2 + 3 + 4 + 9, 9), "at four tokens the last chain may still make it a tie"
    alone = replay(CHAINS, VoteParams(n=4, at_once=1, refill=True))
    assert alone == Replayed("5", 2 + 3 + 4 + 9, 18)
    agreed = Chains(7, "5", ("5", "5", "5", "4"), (2, 3, 4, 9))
    assert replay(agreed, VoteParams(n=4)) == Replayed("5", 2 + 3 + 3 + 3, 3)


def test_few_problems_have_a_wide_interval() -> None:
    assert difference([(1, 0)]) == "-"
    assert difference([(1, 0), (0, 0), (1, 1), (0, 0)]) == "+25.0 (-54.6 to +104.6)"


def test_chains_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "chains.jsonl"
    append(path, CHAINS)
    assert read(path) == [CHAINS]
    path.write_text(json.dumps({"place": 1}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no chains"):
        read(path)
