"""A replay counts what decoding with the model that wrote the answers would count."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from parlay import LLM, SamplingParams
from parlay.bench.forwards import ForwardPrices
from parlay.bench.records import Results
from parlay.bench.replay.decode import Replay, replay
from parlay.bench.replay.run import MODEL, Texts, lacking, measure, read_texts, replayable, run
from parlay.bench.replay.tokens import Recorded, RecordedTokens, open_tokens
from parlay.drafters.resources import Resources
from parlay.strategies.catalogue import catalogue
from parlay.types import Draft, Needs, Observation, ParlayError, SequenceView

COPY = "Repeat after me: the cat sat on the mat, and the dog sat on the cat. The cat sat on the mat,"
PRICES = ForwardPrices("a model", {100: [(1, 1.0), (32, 1.0)]})
"""Where rows cost nothing, every draft pays."""


@pytest.fixture(scope="module")
def tokens() -> RecordedTokens:
    return open_tokens("parlay-mini")


@pytest.fixture(scope="module")
def texts(tokens: RecordedTokens) -> Texts:
    answers = ["the cat sat on the mat, and the dog sat on the cat.", "nothing of that"]
    prompt = tokens.encode(COPY)
    return Texts("copies", tuple(Recorded(prompt, tokens.encode(answer), (prompt,)) for answer in answers), 0.0)


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup", "suffix-automaton"])
def test_a_replay_of_a_models_answer_counts_what_the_model_did(strategy: str, tokens: RecordedTokens) -> None:
    whole = strategy if strategy == "none" else f"{strategy}:policy=fixed"
    with LLM("parlay-mini") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        (output,) = llm.generate([COPY], params, strategy=whole)
    record = Recorded(tuple(output.prompt_token_ids), tuple(output.outputs[0].token_ids))
    (done,) = replay(strategy, [record], tokens)
    real = output.outputs[0].metrics
    assert done.tokens == record.output
    assert (done.metrics.steps, done.metrics.outcomes) == (real.steps, real.outcomes)
    assert done.metrics.accepted_by_depth == real.accepted_by_depth
    assert done.metrics.drafted_by_depth == real.drafted_by_depth


@pytest.mark.parametrize("strategy", catalogue())
def test_every_strategy_replays_the_text_or_is_refused_in_a_line(
    strategy: str, texts: Texts, tokens: RecordedTokens
) -> None:
    row = measure(strategy, texts, tokens)
    assert row.cell.model == MODEL
    if row.error:
        assert "\n" not in row.error
        assert row.tokens == row.steps == 0
    else:
        assert (row.same, row.of) == (2, 2)
        assert row.tokens == row.steps + row.accepted
        assert not row.modelled


def test_copying_saves_steps_and_copies_nothing_that_is_not_there(texts: Texts, tokens: RecordedTokens) -> None:
    first, second = replay("prompt-lookup", texts.records, tokens)
    assert first.metrics.tokens_per_step > 2
    assert second.metrics.accepted_tokens == 0


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("jacobi", "most likely tokens"),
        ("token-recycling", "most likely tokens"),
        ("layer-skip", "layers"),
        ("draft-model", "draft model"),
        ("universal-draft", "draft model"),
        ("union", "draft model"),
        ("prompt-lookup:rule=typical", "probabilities"),
        ("datastore", "file=PATH"),
        ("no-such", "unknown strategy"),
    ],
)
def test_who_needs_more_than_the_text_is_refused_with_the_reason(
    strategy: str, reason: str, texts: Texts, tokens: RecordedTokens
) -> None:
    assert reason in measure(strategy, texts, tokens).error


def test_seconds_come_from_prices_and_are_called_modelled(texts: Texts, tokens: RecordedTokens) -> None:
    plain, fast = (measure(strategy, texts, tokens, PRICES) for strategy in ("none", "prompt-lookup"))
    assert plain.modelled
    assert fast.modelled
    assert plain.cell.model == f"{MODEL}, priced as a model"
    assert plain.verify_seconds == plain.steps - plain.requests  # a second each; prefill is not decoding
    assert fast.verify_seconds == fast.steps - fast.requests
    assert fast.tokens_per_second > plain.tokens_per_second
    assert fast.decode_seconds == fast.verify_seconds + fast.draft_seconds


def test_where_rows_are_dear_the_default_policy_stops_drafting(texts: Texts, tokens: RecordedTokens) -> None:
    dear = ForwardPrices("a model", {100: [(1, 1.0), (32, 320.0)]})
    assert measure("prompt-lookup", texts, tokens, dear).proposed < measure("prompt-lookup", texts, tokens).proposed


def test_one_prompt_may_have_several_answers(tokens: RecordedTokens) -> None:
    run = Replay("prompt-lookup", tokens)
    for answer in ((5, 6, 7, 8), (5, 6, 9, 9)):
        assert run.answer(0, Recorded((1, 5, 6, 7), answer)).tokens == answer


def test_answers_are_cut_where_they_loop_and_empty_ones_left_out(tmp_path: Path, tokens: RecordedTokens) -> None:
    looping = "the same words over and over again, as small models do when they are asked for more, "
    records = [{"prompt": "a", "output": ""}, {"prompt": "b", "output": looping * 3}, {"prompt": "c", "output": "d"}]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    read = read_texts(path, tokens)
    assert read.name == "x"
    assert len(read.records) == 2
    assert read.looped > 0.5
    assert len(read.records[0].output) < len(tokens.encode(looping * 3)) / 2
    assert len(read_texts(path, tokens, limit=1).records) == 1


def test_a_file_without_any_text_is_named(tmp_path: Path, tokens: RecordedTokens) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "", "output": "a"}\n{"prompt": "a", "output": ""}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no recorded answer with any text"):
        read_texts(path, tokens)


def test_a_chat_template_is_put_around_the_prompt(tokens: RecordedTokens) -> None:
    assert tokens.base is not None
    text = tokens.base.decode(tokens.asked("Hello"))
    assert text != "Hello"
    assert "Hello" in text


def test_a_missing_tokenizer_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(ParlayError, match=r"pip install 'parlay\[replay\]'"):
        open_tokens("mistral-common:v3")
    with pytest.raises(ValueError, match="choose one of v1, v2, v3, v7, tekken"):
        open_tokens("mistral-common:v9")


def test_a_run_measures_every_strategy_on_every_text_once(tmp_path: Path, texts: Texts, tokens: RecordedTokens) -> None:
    both, strategies = [texts, replace(texts, name="more")], ["none", "prompt-lookup", "jacobi"]
    first = Results(tmp_path / "r.jsonl", {})
    assert len(list(run(lacking(both, strategies, first), tokens, first))) == 6
    again = Results(tmp_path / "r.jsonl", {})
    assert again.rows == first.rows
    assert not lacking(both, strategies, again)
    assert len(lacking(both, strategies, again, PRICES)) == 6


def test_only_strategies_that_need_no_more_than_the_text_are_replayed_by_default(tokens: RecordedTokens) -> None:
    names = replayable(tokens)
    assert {"none", "prompt-lookup", "suffix-decoding"} <= set(names)
    assert not {"jacobi", "draft-model", "swift", "datastore"} & set(names)


class Faulty:
    """Raises when it is asked."""

    needs = Needs()

    def __init__(self, resources: Resources) -> None:
        """Needs nothing."""

    def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
        raise RuntimeError("no idea")

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learns nothing."""

    def release(self, sequence: int) -> None:
        """Holds nothing."""


def test_a_drafter_that_raises_is_told_of_in_the_row(texts: Texts, tokens: RecordedTokens) -> None:
    row = measure(f"{__name__}:Faulty", texts, tokens)
    assert (row.same, row.of, row.proposed) == (2, 2, 0)
    assert "the drafter failed in 2 of 2 answers" in row.note
