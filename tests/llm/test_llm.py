"""The Python API: vLLM's names, one text whatever the strategy, and clear refusals."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from parlay import LLM, ParlayError, RequestFailed, SamplingParams
from parlay.llm import vocabulary
from parlay.llm.outputs import RequestOutputs
from parlay.llm.vocabulary import Vocabulary
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.options import UsageError
from parlay.types import StructuredOutputsParams, Tokenizer

PROMPT = (
    "Repeat this text exactly: the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on.\n\nThe text:"
)
PROMPTS = [PROMPT, "def add(a, b):\n    return", "The weather was", "Once upon a time there was a king who"]
STRATEGIES = ["none", "prompt-lookup", "prompt-lookup:policy=fixed,k=5", "draft-model", "union"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", seed=1) as model:
        yield model


def test_the_quick_start_of_vllm_runs_with_another_import_line() -> None:
    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model="parlay-mini")
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.outputs[0].text
        assert len(output.outputs[0].token_ids) <= 16


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_strategy_alone_and_in_a_mixed_batch_gives_one_text(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
    plain = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, strategy="none")]
    for strategy in STRATEGIES:
        assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, strategy=strategy)] == plain
    mixed = llm.generate(PROMPTS, params, strategy=STRATEGIES[1:])
    assert [out.outputs[0].token_ids for out in mixed] == plain
    assert [out.outputs[0].strategy for out in mixed] == STRATEGIES[1:]


def test_sample_i_of_n_is_the_same_request_with_that_sample_index(llm: LLM) -> None:
    (three,) = llm.generate(PROMPT, SamplingParams(n=3, max_tokens=12, seed=9))
    (two,) = llm.generate(PROMPT, SamplingParams(n=2, max_tokens=12, seed=9), strategy="none")
    assert [out.token_ids for out in two.outputs] == [out.token_ids for out in three.outputs[:2]]
    assert len({out.token_ids for out in three.outputs}) > 1
    assert [out.index for out in three.outputs] == [0, 1, 2]


def test_a_prompt_is_found_cached_until_the_prefix_cache_is_reset(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2)

    def cached() -> int:
        (output,) = llm.generate(PROMPT, params, strategy="none")
        return output.outputs[0].metrics.cached_tokens

    cached()
    assert cached() > 0
    llm.reset_prefix_cache()
    assert cached() == 0


def test_models_and_tokenizers_may_be_paths() -> None:
    """As in transformers, whatever argument names them."""
    path = resolve("parlay-mini")
    with LLM(path, tokenizer=path, draft_model=resolve("parlay-mini-draft"), strategy="draft-model") as llm:
        (found,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    with LLM("parlay-mini", ensemble=path) as llm:
        (both,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4))
    assert found.outputs[0].token_ids == both.outputs[0].token_ids


def test_prompts_share_cached_prefixes_only_within_a_cache_salt(llm: LLM) -> None:
    """As in vLLM. A salt changes no text."""

    def decoded(**salt: str) -> tuple[int, tuple[int, ...]]:
        prompt: Any = {"prompt": PROMPT + " A salted one.", **salt}
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), strategy="none")
        return output.outputs[0].metrics.cached_tokens, output.outputs[0].token_ids

    llm.reset_prefix_cache()
    (fresh, text), (again, _), (salted, same), (within, _) = (
        decoded(), decoded(), decoded(cache_salt="one"), decoded(cache_salt="one"),
    )  # fmt: skip
    assert fresh == 0 < again
    assert salted == 0 < within
    assert same == text


def test_a_seed_of_numpy_is_the_number_that_it_is(llm: LLM) -> None:
    (one,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, seed=7))
    (other,) = llm.generate(PROMPT, SamplingParams(max_tokens=8, seed=np.int64(7), min_p=np.float32(0)))  # type: ignore[arg-type]
    assert other.outputs[0].token_ids == one.outputs[0].token_ids


def test_a_drawn_seed_is_reported_and_reproduces_the_text(llm: LLM) -> None:
    (first,) = llm.generate(PROMPT, SamplingParams(max_tokens=12))
    (again,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, seed=first.outputs[0].seed))
    assert int(float(first.outputs[0].seed)) == first.outputs[0].seed  # as JavaScript reads it
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_closed_llm_says_so() -> None:
    llm = LLM("parlay-mini", dtype="float32")
    llm.close()
    llm.close()
    assert repr(llm) == "LLM(closed)"
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ParlayError, match="this LLM is closed"):
            ask(PROMPT, SamplingParams(max_tokens=1))


def test_an_llm_with_a_seed_repeats_itself() -> None:
    texts = []
    for _ in range(2):
        with LLM("parlay-mini", seed=7, dtype="float32") as model:
            texts.append([out.outputs[0].text for out in model.generate(PROMPTS, SamplingParams(max_tokens=8))])
    assert texts[0] == texts[1]


def test_a_stream_adds_up_to_the_generated_text_with_its_sources(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=32)
    stream = llm.stream(PROMPT, params)
    events = list(stream)
    (whole,) = llm.generate(PROMPT, params)
    assert "".join(event.text for event in events) == whole.outputs[0].text == stream.output.outputs[0].text
    assert events[-1].output is not None
    sources = {piece.source for event in events for piece in event.pieces}
    assert "target" in sources


def test_a_closed_stream_keeps_what_was_generated_and_frees_the_engine(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True), strategy="none")
    for _ in range(3):
        next(stream)
    with pytest.raises(ParlayError, match="under way"):
        _ = stream.output
    stream.close()
    assert stream.output.outputs[0].finish_reason == "abort"
    assert len(stream.output.outputs[0].token_ids) == 3
    assert llm.engine.idle


def test_one_stream_at_a_time(llm: LLM) -> None:
    """Another's events would have nobody to go to."""
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    next(stream)
    with pytest.raises(ParlayError, match="under way"):
        llm.generate(PROMPT, SamplingParams(max_tokens=1))
    assert len([*stream]) > 0
    assert len(stream.output.outputs[0].token_ids) == 8


def test_calls_from_several_threads_wait_for_each_other(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = {prompt: llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in PROMPTS}
    stream = llm.stream(PROMPT, params)
    next(stream)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = {prompt: pool.submit(llm.generate, [prompt], params) for prompt in PROMPTS}
        assert not any(future.done() for future in asked.values())  # the stream was first
        stream.close()
        assert {prompt: future.result(600)[0].outputs[0].token_ids for prompt, future in asked.items()} == expected


def test_stop_strings_end_the_text_inside_an_accepted_run(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    text = whole.outputs[0].text
    assert len(text) > 8
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
    for strategy in STRATEGIES:
        (cut,) = llm.generate(PROMPT, params, strategy=strategy)
        assert cut.outputs[0].text == text.split(stop, maxsplit=1)[0]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_logprobs_are_bit_equal_under_every_strategy(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, max_tokens=16, seed=3, logprobs=3, prompt_logprobs=1)
    plain, *others = [llm.generate(PROMPT, params, strategy=strategy)[0] for strategy in STRATEGIES]
    assert plain.outputs[0].logprobs is not None
    assert len(plain.outputs[0].logprobs) == len(plain.outputs[0].token_ids)
    for other in others:
        assert other.outputs[0].logprobs == plain.outputs[0].logprobs
        assert other.prompt_logprobs == plain.prompt_logprobs


def test_penalties_bias_and_processors_work_under_every_strategy(llm: LLM) -> None:
    def ban_even(ids, logits):  # type: ignore[no-untyped-def]
        logits[::2] = -float("inf")
        return logits

    for params in (
        SamplingParams(temperature=0, max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(temperature=0.8, seed=2, max_tokens=16, logit_bias={5: 3.0}, min_p=0.02, presence_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=12, logits_processors=[ban_even]),
    ):
        texts = {llm.generate(PROMPT, params, strategy=strategy)[0].outputs[0].token_ids for strategy in STRATEGIES}
        assert len(texts) == 1


def test_chat_uses_the_models_own_format(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8))
    text = llm.tokenizer.decode(output.prompt_token_ids)
    assert "<|user|>" in text
    assert text.rstrip().endswith("<|assistant|>")


def test_metrics_and_exactness_come_with_every_result(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20))
    metrics = output.outputs[0].metrics
    assert metrics.completion_tokens == len(output.outputs[0].token_ids)
    assert metrics.prompt_tokens == len(output.prompt_token_ids)
    assert metrics.exactness == output.outputs[0].exactness == llm.runner.spec.exactness


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": ""}, "empty"),
        ({"prompts": "word " * 5000}, "context"),
        ({"prompts": [[5, -1]]}, "the prompt has a token id that is not from 0 to 4095"),
        ({"prompts": "half a pair: \ud83d"}, "the prompt is not valid Unicode text"),
        ({"prompts": "x", "sampling_params": SamplingParams(bad_words=["\udc00"])}, "bad_words are not valid Unicode"),
        ({"prompts": "x", "strategy": "prompt-lookdown"}, "prompt-lookup"),
        ({"prompts": "x", "strategy": "prompt-lookup:kk=3"}, "kk"),
        ({"prompts": ["x", "y"], "strategy": ["none"]}, "2 prompts"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(llm: LLM, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(**arguments)  # type: ignore[arg-type]
    assert llm.engine.idle


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "a conversation is a list of messages"),
        ([["hello"]], "a conversation is a list of messages"),
        ([{"role": "user"}], r"messages\[0\] has no content: give it a text"),
        ({"role": "user", "content": "hello"}, "a conversation is a list of messages"),
        ([{"role": "user", "content": "\ud83d"}], "not valid Unicode text"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, messages: list[dict[str, str]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.chat(messages)
    assert llm.engine.idle


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [5]}, "stop must be a list of strings, or one string, got"),
        ({"bad_words": "return"}, "bad_words must be a list"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"top_k": 10**400}, "top_k must be at most 9223372036854775807, got an integer of 1329 bits"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"max_tokens": 8.0}, "max_tokens must be a whole number, got 8.0"),
        ({"top_p": 10**400}, "top_p must be above 0 and at most 1"),
        ({"repetition_penalty": -(10**400)}, "repetition_penalty"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"bad_words": "word"}, "bad_words must be a list of non-empty strings, got 'word'"),  # not each letter of it
        ({"stop": ["a", None]}, "stop must be a list of strings"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids must be a list of token ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of token ids, got 5"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must map token ids to numbers, got {'5': 1.0}"),
        ({"logit_bias": [5]}, "logit_bias must map token ids to numbers"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens must be a whole number, got 1.5"),
        ({"temperature": math.inf}, "temperature must be a finite number of at least 0, got inf"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"logprobs": True}, "logprobs must be a whole number, got True"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"logprobs_mode": "many"}, "logprobs_mode must be raw or processed, got 'many'"),
        ({"logits_processors": [5]}, "logits_processors must be a list of functions"),
        ({"structured_outputs": 5}, "structured_outputs must be StructuredOutputsParams or a dict, got 5"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**fields)  # type: ignore[arg-type]


LEFT_OPEN = ["max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "seed"]
NUMBERS = [each.name for each in fields(SamplingParams) if type(each.default) in (int, float)]


@pytest.mark.parametrize("value", ["many", None, True, float("nan"), -3.5, [1]], ids=repr)
@pytest.mark.parametrize("name", [*LEFT_OPEN, *(name for name in NUMBERS if name not in LEFT_OPEN)])
def test_what_is_no_number_is_refused_by_the_name_of_its_parameter(name: str, value: object) -> None:
    """None too, which stands for something only where the parameter may be left open."""
    if value is None and name in LEFT_OPEN:
        assert SamplingParams(**{name: None}) is not None  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=f"^{name} must be [^\n]+$") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ParlayError)
    assert caught.value.fields == (name,)


@pytest.mark.parametrize("value", ["many", True, 2.5, float("nan"), -1, [1]], ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "context_parallel_size",
        "threads",
        "memory",
        "audit_share",
        "seed",
    ],
)
def test_a_wrong_number_is_refused_by_the_name_of_its_argument(name: str, value: object) -> None:
    """Before a model is loaded or runs, in one line."""
    if (name, value) == ("seed", -1):
        return  # any whole number is a seed
    with pytest.raises(ValueError, match=f"^{name} [^\n]+$") as caught, LLM("parlay-mini", **{name: value}):  # type: ignore[arg-type]
        pass
    assert isinstance(caught.value, UsageError)


def test_a_step_has_room_for_each_sequence_that_may_run() -> None:
    with pytest.raises(UsageError, match=r"^max_num_batched_tokens=8: must be at least max_num_seqs, 9$"):
        LLM("parlay-mini", max_num_seqs=9, max_num_batched_tokens=8)


def test_a_model_that_is_not_there_is_one_line_with_the_alternative() -> None:
    with pytest.raises(ParlayError) as failure:
        LLM("no-such-folder-anywhere")
    assert "\n" not in str(failure.value)


def test_a_draft_model_that_is_not_there_is_an_error_at_once() -> None:
    with pytest.raises(ParlayError, match=r"no folder or file \./no-such-draft: name a local folder"):
        LLM("parlay-mini", draft_model="./no-such-draft")


def test_a_failed_sample_keeps_the_others(llm: LLM) -> None:
    def explode(ids, logits):  # type: ignore[no-untyped-def]
        raise RuntimeError("boom")

    params = [SamplingParams(max_tokens=4, logits_processors=[explode]), SamplingParams(temperature=0, max_tokens=4)]
    with pytest.raises(RequestFailed, match="boom") as failure:
        llm.generate(PROMPTS[:2], params)
    assert len(failure.value.outputs[1].outputs[0].token_ids) == 4


@pytest.mark.parametrize("name", ["trie-lookahead", "suffix-decoding", "suffix-automaton", "token-recycling"])
def test_what_a_store_learned_is_in_its_file_when_the_model_closes(name: str, tmp_path: Path) -> None:
    """However few requests there were: the command line runs one at a time."""
    store = tmp_path / "store"
    with LLM("parlay-mini", strategy=f"{name}:store={store}") as llm:
        llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=24))
    assert store.stat().st_size > 0


def test_a_model_that_is_loaded_again_reads_texts_with_the_earlier_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("parlay-mini", dtype="float32", seed=1) as first:
        first.vocabulary.prepare()
        expected = [out.outputs[0].text for out in first.generate(PROMPTS, SamplingParams(seed=5, max_tokens=16))]

    def refuse(_: Path) -> None:
        raise AssertionError("it was read again")

    monkeypatch.setattr("parlay.llm.vocabulary.load_tokenizer", refuse)
    with LLM("parlay-mini", dtype="float32", tokenizer=first.vocabulary, seed=1) as again:
        texts = [out.outputs[0].text for out in again.generate(PROMPTS, SamplingParams(seed=5, max_tokens=16))]
        form = StructuredOutputsParams(choice=["yes"])
        (formed,) = again.generate(PROMPT, SamplingParams(max_tokens=8, structured_outputs=form))
    assert (texts, formed.outputs[0].text) == (expected, "yes")


def test_a_vocabulary_of_another_model_lends_only_its_tokenizer() -> None:
    with LLM("parlay-mini") as llm:
        other = Vocabulary(llm.tokenizer, vocab_size=7, eos_ids=[3])
        with LLM("parlay-mini", tokenizer=other) as own:
            assert own.vocabulary is not other
            assert own.tokenizer is llm.tokenizer


def test_a_misspelled_sampling_parameter_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="has no field temprature: did you mean temperature\\?"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no field zzz: choose one of n, temperature"):
        SamplingParams(zzz=1)  # type: ignore[call-arg]


def test_a_call_tells_its_rate_while_it_runs_and_afterwards(llm: LLM) -> None:
    notes: list[str] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            notes.append(s)

    outputs = llm.generate([PROMPT] * 2, SamplingParams(max_tokens=4), lambda **options: Bar(**options, disable=True))
    assert len(notes) == 2
    assert all(re.fullmatch(r"est. speed input: [\d.]+ toks/s, output: [\d.]+ toks/s", note) for note in notes)
    assert isinstance(outputs, RequestOutputs)
    assert outputs.tokens_per_second == pytest.approx(8 / outputs.seconds)
    assert outputs[0].metrics is outputs[0].outputs[0].metrics


def test_a_draft_model_that_is_larger_than_the_target_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It runs all the same, and the text is the target's."""
    with LLM("parlay-mini-draft", draft_model="parlay-mini", strategy="draft-model", router_memory="off") as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        drafted = llm.generate("Once", params)[0].outputs[0].token_ids
        assert drafted == llm.generate("Once", params, strategy="none")[0].outputs[0].token_ids
    (line,) = [each.getMessage() for each in caplog.records if "larger than its target" in each.getMessage()]
    assert line.endswith("choose a smaller one, or swap the two")


def test_a_draft_model_of_another_vocabulary_is_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing is logged beside the error."""
    with pytest.raises(ParlayError, match=r"draft-model: smollm2-135m-draft has a vocabulary of \d+ tokens and"):
        LLM("parlay-mini", draft_model="smollm2-135m-draft", strategy="draft-model", router_memory="off")
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_a_prompt_that_memory_can_not_hold_is_refused_in_one_line() -> None:
    """Before anything is read, with what it would take and what there is."""
    with LLM("parlay-mini", memory="2MiB", router_memory="off") as llm:
        most = llm.engine.longest
        with pytest.raises(
            ValueError, match=r"holds \d+: shorten the prompt, lower max_tokens, or allow more memory"
        ) as told:
            llm.generate({"prompt_token_ids": [5] * most}, SamplingParams(max_tokens=4))
        assert "\n" not in str(told.value)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Ids that stand for other letters, and more of them than the model has, would be read and written as rubbish."""
    own = resolve("parlay-mini")
    tokenizer = json.loads((own / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    shutil.copytree(own, tmp_path / "turned")
    turned = {piece: vocabulary[other] for piece, other in zip(pieces, reversed(pieces), strict=True)}
    changed = {**tokenizer, "model": {**tokenizer["model"], "vocab": turned}}
    (tmp_path / "turned" / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match=r"turned is not the model's: token \d+ is .* in it, and .* in the model's"):
        LLM("parlay-mini", tokenizer=str(tmp_path / "turned"))
    shutil.copytree(own, tmp_path / "large")
    more = [{**tokenizer["added_tokens"][0], "id": len(vocabulary) + n, "content": f"<extra {n}>"} for n in range(9)]
    added = {**tokenizer, "added_tokens": [*tokenizer["added_tokens"], *more]}
    (tmp_path / "large" / "tokenizer.json").write_text(json.dumps(added))
    with pytest.raises(UsageError, match=r"large is not the model's: it has [\d,]+ tokens, and the model [\d,]+"):
        LLM("parlay-mini", tokenizer=str(tmp_path / "large"))
    with LLM("parlay-mini", tokenizer=str(own), dtype="float32") as llm:
        assert llm.generate("The", SamplingParams(temperature=0, max_tokens=2))[0].chosen.token_ids


def test_a_draft_model_with_another_tokenizer_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Everything that loads an `LLM` says it: the commands, a server, and Python."""
    folder = Path(shutil.copytree(resolve("parlay-mini-draft"), tmp_path / "draft"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["T"], vocabulary["x"] = vocabulary["x"], vocabulary["T"]
    for differs in (False, True):
        if differs:
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        with LLM("parlay-mini", draft_model=str(folder), strategy="draft-model", router_memory="off"):
            assert ("differs from the target's" in caplog.text) == differs


def test_the_same_tokenizer_is_not_loaded_again_for_a_draft_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To load a large one holds Python's lock for seconds, in which a server's streams stand still."""
    folder = shutil.copytree(resolve("parlay-mini-draft"), tmp_path / "draft")
    loaded: list[Path] = []

    def load(path: Path) -> Tokenizer:
        loaded.append(path)
        return load_tokenizer(path)

    monkeypatch.setattr(vocabulary, "load_tokenizer", load)
    with LLM("parlay-mini", draft_model=str(folder), strategy="draft-model", router_memory="off"):
        assert loaded == [resolve("parlay-mini")]
