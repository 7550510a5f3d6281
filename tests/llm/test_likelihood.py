"""Embeddings and likelihoods in Python: perplexity, choices, scores of pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parlay import LLM
from parlay.cli import main
from parlay.llm.likelihood import Question, choose, log_likelihoods, perplexity
from parlay.types import Segment

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", strategy="none") as found:
        yield found


def test_perplexity_is_that_of_the_models_own_logits(llm: LLM) -> None:
    """In one window exactly; in several, each token counts once and has half a window before it."""
    ids = tuple(llm.get_tokenizer().encode(TEXT))
    llm.runner.open(99, ())
    assert llm.runner.reserve(99, len(ids))
    logits = llm.runner.forward([Segment(99, ids)]).logits_RV
    llm.runner.release(99)
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    found = perplexity(llm, TEXT)
    assert found.tokens == len(ids) - 1
    assert found.value == pytest.approx(math.exp(float(expected)), rel=1e-4)
    assert perplexity(llm, TEXT, window=16).tokens == len(ids) - 1
    with pytest.raises(ValueError, match="at least 2 tokens, and has"):
        perplexity(llm, "")


def test_a_choice_is_the_likeliest_ending(llm: LLM) -> None:
    """As the log-likelihoods of its tokens say."""
    question = Question("The quick brown", (" fox", " zebra crossing"), 0)
    texts = [tuple(llm.get_tokenizer().encode(question.prompt + choice)) for choice in question.choices]
    before = len(llm.get_tokenizer().encode(question.prompt))
    found = log_likelihoods(llm, [(ids, before) for ids in texts])
    assert choose(llm, question).likeliest == found.index(max(found))


def test_the_command_tells_perplexity_and_right_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each file, or one object; a line that is no question is named."""
    text, questions, bad = tmp_path / "text.txt", tmp_path / "questions.jsonl", tmp_path / "bad.jsonl"
    text.write_text(TEXT)
    questions.write_text(json.dumps({"prompt": "a", "choices": [" b", " c"], "answer": 1}) + "\n")
    assert main(["score", str(text), str(questions), "--model", "parlay-mini", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["perplexity"] > 1
    assert second["questions"] == 1
    bad.write_text("{}\n")
    assert main(["score", str(bad), "--model", "parlay-mini"]) == 2
    assert "line 1 must be a question" in capsys.readouterr().err


def test_the_command_names_the_file_that_it_cannot_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several files, the error says which text is too short, and that choices are counted from 0."""
    text, empty, bad = tmp_path / "text.txt", tmp_path / "empty.txt", tmp_path / "bad.jsonl"
    text.write_text(TEXT)
    empty.write_text("")
    assert main(["score", str(text), str(empty), "--model", "parlay-mini"]) == 2
    assert f"{empty}: the text must have at least 2 tokens, and has" in capsys.readouterr().err
    bad.write_text(json.dumps({"prompt": "a", "choices": [" b", " c"], "answer": 2}))
    assert main(["score", str(bad), "--model", "parlay-mini"]) == 2
    assert "the first one's is 0" in capsys.readouterr().err


def test_scores_are_of_pairs_or_of_one_query_with_each(llm: LLM) -> None:
    """The cosine of a text with itself is 1."""
    scores = [output.outputs.score for output in llm.score("The fox", ["The fox", "A cat"])]
    assert scores[0] == pytest.approx(1, abs=1e-6)
    assert scores[1] < 1
    with pytest.raises(ValueError, match="2 queries and 3 documents"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(ValueError, match="score_by must be cosine or yes-no, got 'words'"):
        llm.score("a", "b", score_by="words")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pooling 'max' is unknown"):
        llm.embed("a", pooling="max")  # type: ignore[arg-type]
