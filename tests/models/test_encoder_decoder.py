"""T5 and Marian layouts: a source is the beginning of a prompt, and texts are those of `transformers.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoModelForSeq2SeqLM, BartConfig, PreTrainedModel

from parlay import LLM, BeamSearchParams, RequestFailed, SamplingParams
from parlay.cli import main
from parlay.models import UnsupportedModel
from parlay.models.transformers_adapter.encoder_decoder import EncoderDecoderRunner
from parlay.serve.app import create_app
from parlay.serve.settings import Settings
from parlay.testing.checkpoints import PAIRS, VOCAB_SIZE, save_random
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.types import NO_TREE, Segment
from tests.serve.conftest import Shared

SOURCES = [[5, 9, 11, 4, 2], [7, 7, 30, 21, 33, 40, 2], [12, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=16)
DRAFTS = "prompt-lookup:policy=fixed,k=4"


def save(name: str, folder: Path) -> PreTrainedModel:
    """Save a model and return what transformers reads: Marian's positions are computed, and never stored."""
    save_random(name, folder, seed=6)
    toy_tokenizer(VOCAB_SIZE).save_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    model.generation_config.forced_eos_token_id = None  # Marian's last token may be any, as at max_tokens
    return model


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LLM]:
    folder = tmp_path_factory.mktemp(request.param)
    return save(request.param, folder), LLM(str(folder))


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("marian")
    return save("marian", folder), folder


def generated(model: PreTrainedModel, source: Sequence[int], **options: object) -> tuple[int, ...]:
    with torch.no_grad():
        ids = model.generate(torch.tensor([list(source)]), **{"do_sample": False, "max_new_tokens": 16, **options})
    return tuple(ids[0].tolist()[1:])


def texts(llm: LLM, params: SamplingParams, strategy: str) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in llm.generate(SOURCES, params, strategy=strategy)]


def test_greedy_texts_are_those_of_transformers(pair: tuple[PreTrainedModel, LLM]) -> None:
    expected = [generated(pair[0], source) for source in SOURCES]
    assert len(set(expected)) > 1
    assert texts(pair[1], GREEDY, "none") == expected
    assert texts(pair[1], GREEDY, "auto") == expected


def test_sequences_of_one_length_run_together(pair: tuple[PreTrainedModel, LLM]) -> None:
    calls: list[int] = []
    handle = pair[0].get_decoder().register_forward_hook(lambda module, given, out: calls.append(len(out[0])))
    runner = EncoderDecoderRunner(pair[0])
    try:
        for number, source in enumerate(SOURCES):
            runner.open(number, source)
            runner.forward([Segment(number, (*source, 0))])
            runner.keep(number, ())
        calls.clear()
        together = runner.forward([Segment(number, (9, 4)) for number in range(len(SOURCES))])
        assert calls == [len(SOURCES)]
    finally:
        handle.remove()
    for number, source in enumerate(SOURCES):
        runner.keep(number, ())
        runner.check()
        with torch.no_grad():
            alone = pair[0](input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[0, 9, 4]])).logits[0, 1:]
        first = together.starts[number]
        assert torch.allclose(together.logits_RV[first : first + 2], alone, atol=1e-4)


def test_drafts_from_the_source_change_no_text(pair: tuple[PreTrainedModel, LLM]) -> None:
    for params in (GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=16)):
        assert texts(pair[1], params, DRAFTS) == texts(pair[1], params, "none")
    copied = pair[1].generate([SOURCES[0]], GREEDY, strategy=DRAFTS, documents=[generated(pair[0], SOURCES[0])])
    assert copied[0].outputs[0].token_ids == generated(pair[0], SOURCES[0])
    reused = (
        pair[1]
        .generate([SOURCES[0]], GREEDY, strategy="prediction", prediction=list(generated(pair[0], SOURCES[0])))[0]
        .outputs[0]
    )
    assert reused.token_ids == generated(pair[0], SOURCES[0])
    assert reused.metrics.steps < len(reused.token_ids)


def test_the_best_beam_is_at_least_as_likely_as_that_of_transformers(pair: tuple[PreTrainedModel, LLM]) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0, include_stop_str_in_output=True)
    best = pair[1].beam_search([SOURCES[0]], params)[0].sequences[0]
    target = best.tokens[len(SOURCES[0]) + 1 :]
    assert best.cum_logprob == pytest.approx(likelihood(pair[0], SOURCES[0], target), abs=1e-4)
    theirs = generated(pair[0], SOURCES[0], num_beams=3, max_new_tokens=6, length_penalty=0.0, early_stopping="never")
    theirs = theirs[: theirs.index(2) + 1] if 2 in theirs else theirs
    assert best.cum_logprob >= likelihood(pair[0], SOURCES[0], theirs) - 1e-4


def likelihood(model: PreTrainedModel, source: Sequence[int], target: Sequence[int]) -> float:
    ids = torch.tensor([[0, *target]])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(source)]), decoder_input_ids=ids[:, :-1]).logits
    return float(logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum())


def test_a_prompt_may_hold_the_beginning_of_the_answer(pair: tuple[PreTrainedModel, LLM]) -> None:
    whole = generated(pair[0], SOURCES[1])
    rest = pair[1].generate([[*SOURCES[1], 0, *whole[:5]]], SamplingParams(temperature=0, max_tokens=11))[0]
    assert rest.outputs[0].token_ids == whole[5:]


def test_texts_stay_the_same_where_prompts_come_in_parts_and_memory_is_short(
    marian: tuple[PreTrainedModel, Path],
) -> None:
    runner = EncoderDecoderRunner(marian[0], max_tokens_cached=40)
    llm = LLM(str(marian[1]), max_num_batched_tokens=3, max_num_seqs=3)
    expected = [generated(marian[0], source) for source in SOURCES]
    assert texts(llm, GREEDY, "none") == expected
    assert runner.capacity() == 40
    samples = llm.generate([SOURCES[0]], SamplingParams(temperature=1, n=3, seed=1, max_tokens=8))[0].outputs
    alone = [
        llm.generate([SOURCES[0]], SamplingParams(temperature=1, n=3, seed=1, max_tokens=8))[0].outputs[at]
        for at in range(3)
    ]
    assert [each.token_ids for each in samples] == [each.token_ids for each in alone]


def test_a_served_model_completes_a_source(marian: tuple[PreTrainedModel, Path]) -> None:
    client = TestClient(create_app({"pair": Shared(LLM(str(marian[1])))}, Settings()))
    body = {"model": "pair", "prompt": SOURCES[0], "max_tokens": 16, "temperature": 0}
    reply = client.post("/v1/completions", json=body).json()
    expected = generated(marian[0], SOURCES[0])
    decoded = client.post("/detokenize", json={"model": "pair", "tokens": list(expected)}).json()["prompt"]
    assert reply["choices"][0]["text"] == decoded


def test_tokens_that_the_checkpoint_bars_are_not_written(marian: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    model = save("marian", tmp_path)
    barred = generated(model, SOURCES[0])[0]
    model.generation_config.bad_words_ids = [[barred]]
    model.save_pretrained(tmp_path)
    text = texts(LLM(str(tmp_path)), GREEDY, "none")[0]
    assert barred not in text
    assert text == generated(model, SOURCES[0])


def test_the_source_s_tokens_are_not_penalised(pair: tuple[PreTrainedModel, LLM]) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.8)
    expected = [generated(pair[0], source, repetition_penalty=1.8) for source in SOURCES]
    assert expected != [generated(pair[0], source) for source in SOURCES]
    assert texts(pair[1], params, "none") == texts(pair[1], params, DRAFTS) == expected


def test_the_decoder_s_last_place_ends_a_text(marian: tuple[PreTrainedModel, Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    output = LLM(str(marian[1])).generate([SOURCES[1]], params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (39, "length")


@pytest.mark.parametrize(
    ("prompt", "params", "strategy", "words"),
    [
        ([3] * 41, GREEDY, "none", "the source has 41 tokens, but the encoder of .* reads 40: shorten it"),
        ([0, 5], GREEDY, "none", "must be a source and then its start token, 0"),
        ([5, 0, *[6] * 39], GREEDY, "none", "40 tokens from the start token on, but the decoder of .* has 40 places"),
        ([5], SamplingParams(prompt_logprobs=1), "none", "encoder-decoder and has no prompt_logprobs"),
        ([5], GREEDY, "denoise", "writes its text in order: choose another"),
        ([5], GREEDY, "layer-skip", "can't skip any: choose another strategy"),
    ],
    ids=["long source", "no source", "long target", "prompt logprobs", "canvases", "own layers"],
)
def test_what_can_t_be_done_is_refused_in_a_line(
    marian: tuple[PreTrainedModel, Path], prompt: list[int], params: SamplingParams, strategy: str, words: str
) -> None:
    with pytest.raises((ValueError, RequestFailed), match=words) as caught:
        LLM(str(marian[1])).generate([prompt], params, strategy=strategy)
    assert "\n" not in str(caught.value)


def test_other_encoder_decoders_and_other_views_are_refused(marian: tuple[PreTrainedModel, Path]) -> None:
    config = BartConfig(vocab_size=8, d_model=16, encoder_layers=1, decoder_layers=1)
    with pytest.raises(UnsupportedModel, match=r"Bart.*only marian, mt5, t5"):
        EncoderDecoderRunner(AutoModelForSeq2SeqLM.from_config(config))
    runner = EncoderDecoderRunner(marian[0])
    runner.open(0, (5, 0))
    with pytest.raises(ValueError, match="can't run cached tokens again"):
        runner.forward([Segment(0, (5, 0), NO_TREE, base=-1)])


def test_the_command_line_runs_a_folder(
    marian: tuple[PreTrainedModel, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    text = toy_tokenizer(VOCAB_SIZE).decode(SOURCES[0])
    words = ("--max-tokens", "16", "--temperature", "0", "--strategy", DRAFTS)
    assert main(("generate", text, "--model", str(marian[1]), *words)) == 0
    source = toy_tokenizer(VOCAB_SIZE).encode(text)
    expected = toy_tokenizer(VOCAB_SIZE).decode(generated(marian[0], source), skip_special_tokens=True)
    assert capsys.readouterr().out.strip("\n") == expected
