"""Texts to learn from: given conversations, and features that do not depend on how texts share forwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parlay import models
from parlay.models.loading import load_tokenizer
from parlay.models.resolving import resolve
from parlay.options import LoadOptions
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.train.data import features
from parlay.train.data.features import Featured, FeatureStore
from parlay.train.data.given import save_given
from parlay.train.data.prompts import ChatFrame, read_conversations
from parlay.train.data.texts import TrainingText, load_shard, save_shard, shard_path, shards
from parlay.train.recipes.linear_start import states_ahead
from parlay.types import ParlayError


def test_given_conversations_are_cut_and_nothing_in_them_is_the_targets(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    asked, said = "How are you today, my friend?", "I am well, and you? " * 9
    save_given(tmp_path, [(asked, said), ("Hi", "Ho")], tokenizer, prompt_tokens=3, tokens=5)
    (path,) = shards(tmp_path)
    long, short = load_shard(path)
    frame = ChatFrame.of(tokenizer)
    words, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (asked, said))
    assert long.ids == (*frame.around(words[:3]), *answer[:5])
    assert [text.answer for text in (long, short)] == [len(long.ids), len(short.ids)]


def test_conversations_need_both_sides(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"prompt": "Hello", "answer": "Good day"}\n{"prompt": "Hello"}\n')
    with pytest.raises(ParlayError, match="line 2 is no"):
        read_conversations(file)
    assert read_conversations(file, skip_broken=True) == [("Hello", "Good day")]


def test_features_are_the_same_in_any_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_ROWS", 64)
    save_random("llama", tmp_path / "target")
    runner = models.load(str(tmp_path / "target"), LoadOptions(dtype="float32", device="cpu"))
    lengths = (5, 200, 3, 40)
    texts = [TrainingText(tuple((7 * n + length) % VOCAB_SIZE for n in range(length)), 2) for length in lengths]
    together, alone = tmp_path / "together", tmp_path / "alone"
    for folder, parts in ((together, [texts]), (alone, [[text] for text in texts])):
        folder.mkdir()
        for number, part in enumerate(parts):
            save_shard(shard_path(folder, number), part)
        FeatureStore(folder, (0, 2)).compute(runner)
    pairs = zip(FeatureStore(together, (0, 2)).load(), FeatureStore(alone, (0, 2)).load(), strict=True)
    for (one, other), length in zip(pairs, lengths, strict=True):
        assert len(one.states_TF) == length
        assert torch.equal(one.states_TF, other.states_TF)


def test_heads_start_from_the_best_linear_guess_of_states_to_come() -> None:
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).Q
    states = [torch.randn(4, generator=torch.Generator().manual_seed(1))]
    for _ in range(200):
        states.append(turn @ states[-1])
    text = Featured(torch.zeros(201, dtype=torch.int64), 1, torch.stack(states))
    one, two = states_ahead(4, [text], 2)
    assert torch.allclose(one, turn, atol=0.02)
    assert torch.allclose(two, turn @ turn, atol=0.02)
