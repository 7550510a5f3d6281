"""Predicted outputs through the Python API and the command: fewer steps, the same text, honest counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parlay import LLM, SamplingParams
from parlay.llm.outputs import PredictionUse
from parlay.llm.request_options import RequestOptions
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.text.prompts import predictions
from tests.cli.conftest import Cli, cli

__all__ = ["cli"]

PROMPT = "Once upon a time there was a"
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
ALL_OF_IT = "prediction:policy=fixed"
"""How much is drafted by default hangs on what forwards cost on the machine."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", seed=1) as model:
        yield model


@pytest.fixture(scope="module")
def plain(llm: LLM) -> Any:
    return llm.generate(PROMPT, PARAMS, strategy="none")[0].outputs[0]


def test_a_prediction_is_drafted_from_and_the_text_stays(llm: LLM, plain: Any) -> None:
    (output,) = llm.generate(PROMPT, PARAMS, prediction=plain.text)
    (sample,) = output.outputs
    assert sample.strategy == DEFAULT_STRATEGY
    assert sample.token_ids == plain.token_ids
    assert sample.prediction is not None
    assert sample.prediction.accepted == sample.sources.count("prediction") > 0
    assert plain.prediction is None


def test_one_that_is_the_answer_takes_a_step_for_each_draft(llm: LLM, plain: Any) -> None:
    """What is not accepted then are the tokens that the target writes itself, one in each step."""
    (sample,) = llm.generate(PROMPT, PARAMS, strategy=ALL_OF_IT, prediction=plain.token_ids)[0].outputs
    assert sample.token_ids == plain.token_ids
    assert sample.metrics.steps < 4
    assert sample.prediction == PredictionUse(40 - sample.metrics.steps, sample.metrics.steps)


def test_accepted_and_rejected_tokens_add_up_to_the_prediction(llm: LLM, plain: Any) -> None:
    wrong = list(reversed(plain.token_ids))
    (sample,) = llm.generate(PROMPT, PARAMS, prediction=wrong)[0].outputs
    assert sample.token_ids == plain.token_ids
    assert sample.prediction is not None
    assert sample.prediction.accepted + sample.prediction.rejected == len(wrong)
    assert sample.prediction.accepted < 10


def test_what_a_stop_or_a_length_cuts_off_is_rejected(llm: LLM, plain: Any) -> None:
    ids = plain.token_ids
    for params in (
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[ids[11]]),
    ):
        (sample,) = llm.generate(PROMPT, params, prediction=ids)[0].outputs
        assert sample.token_ids == ids[: len(sample.token_ids)]
        assert sample.prediction is not None
        assert sample.prediction.accepted <= len(sample.token_ids) <= 12
        assert sample.prediction.accepted + sample.prediction.rejected == len(ids)


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2, "seed": 3},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.8, "top_p": 0.9, "seed": 4, "stop": ["the"], "min_tokens": 3},
    ],
)
def test_whatever_is_asked_for_beside_it(llm: LLM, plain: Any, options: dict[str, Any]) -> None:
    """Tokens and logprobs are those of plain decoding, and each sample has its own counts."""
    params = SamplingParams(max_tokens=20, **options)
    (expected,) = llm.generate(PROMPT, params, strategy="none")
    (output,) = llm.generate(PROMPT, params, prediction=plain.text)
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in expected.outputs]
    assert [one.logprobs for one in output.outputs] == [one.logprobs for one in expected.outputs]
    for one in output.outputs:
        assert one.prediction is not None
        assert one.prediction.accepted == one.sources.count("prediction")


def test_a_strategy_that_is_named_is_kept_and_has_the_prediction_to_copy_from(llm: LLM, plain: Any) -> None:
    named = "aggressive:policy=fixed"
    (sample,) = llm.generate(PROMPT, PARAMS, strategy=named, prediction=plain.text, documents=["Else."])[0].outputs
    assert (sample.strategy, sample.token_ids) == (named, plain.token_ids)
    assert sample.metrics.steps < 10
    assert sample.prediction == PredictionUse(0, sample.prediction.rejected)
    assert sample.prediction.rejected > 25


def test_inside_another_strategy_its_drafts_still_count(llm: LLM, plain: Any) -> None:
    nested = "union:of=prediction+reference-copy,policy=fixed"
    (sample,) = llm.generate(PROMPT, PARAMS, strategy=nested, prediction=plain.text)[0].outputs
    assert sample.token_ids == plain.token_ids
    assert sample.prediction is not None
    assert sample.prediction.accepted > 10


@pytest.mark.parametrize("prediction", ["", [], None, [None]])
def test_an_empty_prediction_is_none(llm: LLM, plain: Any, prediction: Any) -> None:
    (sample,) = llm.generate(PROMPT, PARAMS, prediction=prediction)[0].outputs
    assert (sample.token_ids, sample.prediction, sample.strategy) == (plain.token_ids, None, DEFAULT_STRATEGY)


@pytest.mark.parametrize("prediction", ["word " * 9000, "<|im_end|>\n<|im_start|>user\nno", "\x00\u200b🙂" * 50])
def test_endless_and_odd_predictions_change_nothing(llm: LLM, plain: Any, prediction: str) -> None:
    assert llm.generate(PROMPT, PARAMS, prediction=prediction)[0].outputs[0].token_ids == plain.token_ids


def test_one_for_all_prompts_or_one_for_each(llm: LLM, plain: Any) -> None:
    both = llm.generate([PROMPT, PROMPT], PARAMS, prediction=plain.text)
    first, second = llm.generate([PROMPT, PROMPT], PARAMS, prediction=[None, plain.text])
    assert {one.outputs[0].token_ids for one in (*both, first, second)} == {plain.token_ids}
    assert [one.outputs[0].prediction is None for one in (*both, first, second)] == [False, False, True, False]
    with pytest.raises(ValueError, match="prediction has length 1 for 2 prompts"):
        llm.generate([PROMPT, PROMPT], PARAMS, prediction=["a"])


def test_chat_and_stream_take_it_too(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    text = llm.chat(messages, PARAMS, strategy="none")[0].outputs[0].text
    (chat,) = llm.chat(messages, PARAMS, strategy=ALL_OF_IT, prediction=text)
    stream = llm.stream(messages, PARAMS, strategy=ALL_OF_IT, prediction=text)
    assert "".join(event.text for event in stream) == chat.outputs[0].text == text
    assert stream.output.outputs[0].metrics.steps == chat.outputs[0].metrics.steps < 20


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        (7, "a prediction must be text or a list of token ids, not int"),
        (b"x", "not bytes"),
        ({"type": "content", "content": "x"}, "not dict"),
        ([1.5], "one holds something else"),
        ([4096], "from 0 to 4095"),
        ("\ud800", "a prediction is not valid Unicode"),
    ],
)
def test_what_is_no_prediction_is_refused_before_anything_runs(llm: LLM, prediction: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(PROMPT, PARAMS, prediction=prediction)
    with pytest.raises(ValueError, match=words):
        llm.job(PROMPT, PARAMS, RequestOptions(prediction=prediction))
    assert llm.engine.idle


def test_a_job_takes_one_prediction_and_no_list_of_them(llm: LLM) -> None:
    with pytest.raises(ValueError, match="one holds something else"):
        llm.job(PROMPT, PARAMS, RequestOptions(prediction=["text"]))  # type: ignore[list-item]


def test_without_a_tokenizer_ids_still_work() -> None:
    assert predictions([1, 2], 2, None, 9) == [(1, 2), (1, 2)]
    assert predictions([[1], None], 2, None, 9) == [(1,), ()]
    with pytest.raises(ValueError, match="give a prediction as token ids"):
        predictions("text", 1, None, 9)


# ---------------------------------------------------------------------------------------------------------- the command

ASKED = ("generate", PROMPT, "--model", "parlay-mini", "--max-tokens", "40", "--ignore-eos")


def test_the_command_reads_it_from_a_file(cli: Cli, tmp_path: Path) -> None:
    plain = cli(*ASKED, "--strategy", "none")
    path = tmp_path / "before"
    path.write_text(plain.out, encoding="utf-8")
    fast = cli(*ASKED, "--prediction", str(path))
    assert fast.out == plain.out
    assert "from prediction" in fast.err
    assert "prediction [" not in cli(*ASKED, "--prediction", str(path), "--strategy", "none").err
    missing = cli(*ASKED, "--model", "/nowhere/at/all", "--prediction", str(tmp_path / "none"))
    assert missing.code == 2
    assert "can't read the prediction" in missing.err
