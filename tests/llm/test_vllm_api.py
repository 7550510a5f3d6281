"""vLLM's offline API beyond its examples: what is told, what is refused by name, and searches held against others."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from tqdm import tqdm

from parlay import LLM, BeamSearchParams, ParlayError, SamplingParams, StructuredOutputsParams
from parlay.llm.vllm_arguments import strategy_of
from parlay.testing.checkpoints import VOCAB_SIZE, random_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("parlay-mini", dtype="float32", seed=1) as model:
        yield model


# ------------------------------------------------------------------------------------------------------- constructor


def test_arguments_without_effect_are_named_in_one_warning() -> None:
    with pytest.warns(UserWarning, match="swap_space, trust_remote_code") as told:
        LLM(
            "parlay-mini",
            tensor_parallel_size=1,
            enforce_eager=True,
            swap_space=4,
            revision=None,
            trust_remote_code=True,
        ).close()
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"quantization": "fp8"}, "quantization='fp8'.*GGUF"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"revision": "abc"}, "revision"),
        ({"hf_overrides": {"rope_theta": 1}}, "hf_overrides"),
        ({"task": "embed"}, "task='embed': remove it: LLM.embed"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode='processed'"),
        ({"generation_config": "folder"}, "generation_config"),
        ({"speculative_config": {"method": "dflash"}}, "dflash"),
        ({"speculative_config": "ngram"}, "speculative_config must be a dict"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "a dict with a method"),
        ({"strategy": ["auto"]}, "strategy must be a text"),
        ({"model": 5}, "model must be a name, a path"),
        ({"draft_model": 5}, "draft_model must be a name"),
        ({"speculative_config": {"method": "ngram", "rejection_sample_method": "block"}}, "rejection_sample_method"),
        ({"speculative_config": {"method": "ngram"}, "strategy": "none"}, "remove one of them"),
    ],
)
def test_arguments_that_would_matter_are_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LLM(**{"model": "parlay-mini", **arguments})


def test_a_context_beyond_the_models_is_told_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with LLM("parlay-mini", max_model_len=1_000_000) as llm:
        assert llm.engine.longest <= llm.runner.spec.max_context + 1
    assert "max_model_len=1000000" in caplog.text


def test_an_unknown_argument_is_answered_with_the_closest_one() -> None:
    with pytest.raises(TypeError, match="max_model_length: did you mean max_model_len"):
        LLM("parlay-mini", max_model_length=5)
    with pytest.raises(TypeError, match=r"no argument nonsense: help\(parlay.LLM\) lists them$"):
        LLM("parlay-mini", nonsense=1)


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        ({"method": "ngram"}, "prompt-lookup"),
        ({"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 3}, "prompt-lookup:max_ngram=4,k=3"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, "suffix-decoding:depth=24"),
        ({"model": "small", "num_speculative_tokens": 5}, "draft-model:k=5,model=small"),
        ({"method": "eagle3", "model": "folder"}, "eagle3:head=folder"),
        ({"method": "medusa", "model": "folder", "draft_tensor_parallel_size": 1}, "medusa:head=folder"),
    ],
)
def test_speculative_configs_stand_for_strategies(config: dict[str, Any], strategy: str) -> None:
    assert strategy_of(config) == strategy


# ------------------------------------------------------------------------------------------------- prompts and forms


def test_a_bad_word_may_be_white_space(llm: LLM) -> None:
    """It then bars nothing else: where line breaks are wanted most, and spaces next, there are spaces."""
    space, line = (llm.get_tokenizer().encode(text, add_special_tokens=False)[0] for text in (" ", "\n"))
    bias = {line: 100.0, space: 50.0}
    for words, text in (([], "\n\n\n"), (["\n"], "   "), ([" "], "\n\n\n")):
        params = SamplingParams(temperature=0, max_tokens=3, logit_bias=bias, bad_words=words)
        for strategy in ("none", "prompt-lookup"):
            assert llm.generate("One two", params, strategy=strategy)[0].outputs[0].text == text


def test_the_tokenizer_is_one_of_transformers(llm: LLM) -> None:
    """A program may render its chats itself, with the same ids as `LLM.chat`."""
    tokenizer, messages = llm.get_tokenizer(), [{"role": "user", "content": "Name a river."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) == llm.token_ids(messages)
    assert tokenizer.batch_decode([llm.token_ids(messages)]) == [text]
    assert tokenizer.eos_token == "<|end|>"
    assert llm.get_tokenizer() is tokenizer


@pytest.mark.parametrize("wrong", [{"temperature": 0}, [{"temperature": 0}], SamplingParams, 5])
def test_parameters_of_another_kind_are_refused_by_name(llm: LLM, wrong: Any) -> None:
    for call in (lambda: llm.generate("x", wrong), lambda: llm.chat([{"role": "user", "content": "x"}], wrong)):
        with pytest.raises(ValueError, match=r"^sampling_params must be a SamplingParams"):
            call()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": 5}, "^strategy must be a text"),
        ({"strategy": [{"a": 1}]}, "^strategy must be a text"),
        ({"exactness": 5}, "^exactness must be a text"),
        ({"prompts": b"abc"}, "a prompt must be a text"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(llm: LLM, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(**{"prompts": "x", "sampling_params": GREEDY, **arguments})


@pytest.mark.parametrize("tools", ["x", 5, ["x"], {"type": "function"}])
def test_tools_of_another_kind_are_refused_by_name(llm: LLM, tools: Any) -> None:
    with pytest.raises(ValueError, match=r"^tools must be a list of functions"):
        llm.chat([{"role": "user", "content": "x"}], GREEDY, tools=tools)


@pytest.mark.parametrize("messages", [None, 5, "hi", [{"content": "x"}], [{"role": 5, "content": "x"}]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match=r"a conversation is a list of messages|messages\[0\] has no role"):
        llm.chat(messages, GREEDY)


def test_parameters_may_be_changed_and_are_checked_when_they_are_used(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens = 3
    assert len(llm.generate("x", params)[0].outputs[0].token_ids) <= 3
    assert llm.get_default_sampling_params().max_tokens == 16
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p"):
        llm.generate("x", params)
    with pytest.raises(AttributeError):
        params.max_token = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["none", "draft-model:policy=fixed,k=3"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_top_k_of_minus_one_keeps_the_whole_vocabulary_as_zero_does(llm: LLM, top_p: float, strategy: str) -> None:
    """vLLM's usual number for it. Drafters read it as well, so drafts are the same, too."""
    wanted = SamplingParams(top_p=top_p, seed=3, max_tokens=12)
    given = [SamplingParams(top_k=-1, top_p=top_p, seed=3, max_tokens=12), copy.copy(wanted)]
    given[1].top_k = -1  # set later, and read when the request is made
    (expected, *found) = llm.generate(["Once upon a time"] * 3, [wanted, *given], strategy=strategy)
    for output in found:
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].metrics.draft_tokens == expected.outputs[0].metrics.draft_tokens


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"prompt": "x", "multi_modal_data": {}}, "multi_modal_data"),
        ({"text": "x"}, "text"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a text that is not empty"),
        ({"prompt_token_ids": [5], "cache_salt": 3}, "cache_salt must be a text.*3"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": "abc"}, "token ids.*'abc'"),
        ([["a"]], "token ids"),
        ([1.5], "token ids.*1.5"),
        ([None], "token ids.*None"),
        (5, "token ids.*5"),
    ],
)
def test_prompts_that_cannot_be_honoured_are_refused(llm: LLM, prompt: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"jsn": {}}, "jsn: choose one of choice"),
        ({}, "none"),
        ({"choice": ["a"], "regex": "b"}, "regex and choice"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "disable_any_whitespace"),
    ],
)
def test_forms_as_dicts_are_checked_like_their_class(wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(structured_outputs=wanted)


def test_a_form_as_a_dict_is_the_form(llm: LLM) -> None:
    ways = ({"choice": ["yes", "no"]}, StructuredOutputsParams(choice=["yes", "no"]))
    texts = {
        llm.generate("Well?", SamplingParams(temperature=0, structured_outputs=way))[0].outputs[0].text for way in ways
    }
    assert len(texts) == 1
    assert texts < {"yes", "no"}


def test_a_picture_in_a_message_is_refused_by_its_place(llm: LLM) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    with pytest.raises(ValueError, match=r"content\[1\]"):
        llm.chat([{"role": "user", "content": parts}], GREEDY)


def test_a_template_that_knows_no_tools_gets_them_in_its_system_message(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    (output,) = llm.chat(asked, GREEDY, tools=tools)
    text = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert text.count("Be brief.") == 1
    assert '"name": "weather"' in text


def test_a_conversation_that_is_cut_may_be_longer_than_the_context(llm: LLM) -> None:
    asked = [{"role": "user", "content": "the sun and the moon " * 12_000}]
    params = SamplingParams(temperature=0, max_tokens=4, truncate_prompt_tokens=20)
    streamed = [event.output for event in llm.stream(asked, params)][-1]
    (output,) = llm.chat(asked, params)
    assert streamed is not None
    assert len(output.prompt_token_ids) == 20
    assert output.prompt_token_ids == streamed.prompt_token_ids
    with pytest.raises(ValueError, match="shorten it"):
        llm.chat(asked, GREEDY)


def test_an_answer_is_begun_or_a_message_continued_but_not_both(llm: LLM) -> None:
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, continue_final_message=True)


# ----------------------------------------------------------------------------------------------------------- progress


def test_a_bar_counts_prompts_and_is_made_as_asked(llm: LLM) -> None:
    made: list[tqdm[Any]] = []

    def make(**options: Any) -> tqdm[Any]:
        made.append(tqdm(**options, disable=False, file=open("/dev/null", "w")))  # noqa: SIM115 (tqdm writes to it)
        return made[-1]

    llm.generate(["a", "b", "c"], SamplingParams(n=2, max_tokens=3), use_tqdm=make)
    assert (made[0].total, made[0].n) == (3, 3)


def test_nobody_who_does_not_look_gets_a_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    assert "Prompts" in capsys.readouterr().err


def test_a_call_that_was_interrupted_at_its_bar_leaves_the_llm_free(llm: LLM) -> None:
    """The error is held, as notebooks hold the last one's traceback."""

    class Bar(tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as held:
        llm.generate(["Hello", "Bye"], SamplingParams(max_tokens=4), lambda **options: Bar(**options, disable=True))
    assert llm.engine.idle
    assert len(llm.generate(["Hello", "Bye"], SamplingParams(max_tokens=4))) == 2
    assert held.value is not None


def test_results_can_be_copied_and_pickled(llm: LLM) -> None:
    outputs = llm.generate("Hello", SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, seed=1))
    for again in (pickle.loads(pickle.dumps(outputs)), copy.deepcopy(outputs)):
        assert list(again[0].outputs[0].logprobs) == list(outputs[0].outputs[0].logprobs or ())
        assert list(again[0].prompt_logprobs) == list(outputs[0].prompt_logprobs or ())
        assert again[0].outputs[0].text == outputs[0].outputs[0].text
    assert asdict(outputs[0])["outputs"][0]["token_ids"] == outputs[0].outputs[0].token_ids


# -------------------------------------------------------------------------------------------------------- beam search


def all_texts(model: Any, prompt: list[int], length: int) -> dict[tuple[int, ...], float]:
    """The log-probability of every continuation of this length, one forward for each prefix."""

    def logprobs(ids: list[int]) -> Any:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), -1)

    known = {(): 0.0}
    for _ in range(length):
        known = {
            (*text, token): total + float(row[token])
            for text, total in known.items()
            for row in [logprobs(prompt + list(text))]
            for token in range(VOCAB_SIZE)
        }
    return known


def test_a_beam_as_wide_as_the_vocabulary_finds_the_likeliest_texts_of_all() -> None:
    model = random_model("llama")
    tokenizer = LLM("parlay-mini").get_tokenizer()
    prompt = [5, 9, 13]
    best = sorted(all_texts(model, prompt, 2).items(), key=lambda item: -item[1])[:10]
    params = BeamSearchParams(beam_width=VOCAB_SIZE, max_tokens=2, ignore_eos=True)
    with LLM(model, tokenizer=tokenizer) as llm:
        (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    for found, (text, total) in zip(output.sequences, best, strict=False):
        assert found.tokens == (*prompt, *text)
        assert math.isclose(found.cum_logprob, total, abs_tol=1e-4)
        assert found.finish_reason == "length"


def test_a_beam_of_one_is_greedy_and_ends_where_the_model_does(llm: LLM) -> None:
    for prompt in ("Once upon a time", "Name three rivers."):
        (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=20))
        assert llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=20)) == [output]
        (greedy,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20), strategy="none")
        (found,) = output.sequences
        ids = greedy.outputs[0].token_ids
        assert found.tokens[len(greedy.prompt_token_ids) :] == ids[: len(ids) - (found.finish_reason == "stop")]
        assert found.finish_reason == greedy.outputs[0].finish_reason


def test_beams_of_a_salted_prompt_share_its_prefix_with_no_other(llm: LLM) -> None:
    params, prompt = BeamSearchParams(beam_width=2, max_tokens=3), "Beams of a salted prompt begin here:"
    llm.reset_prefix_cache()
    found = llm.beam_search([{"prompt": prompt, "cache_salt": "beams"}], params)
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), strategy="none")
    assert output.outputs[0].metrics.cached_tokens == 0
    assert found == llm.beam_search([prompt], params)


def test_longer_texts_are_preferred_as_the_length_penalty_says(llm: LLM) -> None:
    def score(beam: Any, penalty: float) -> float:
        return float(beam.cum_logprob) / len(beam.tokens) ** penalty

    for penalty in (0.0, 1.0, 3.0):
        params = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=penalty)
        (output,) = llm.beam_search(["Hello"], params)
        scores = [score(beam, penalty) for beam in output.sequences]
        assert all(one >= other for one, other in itertools.pairwise(scores))


def test_beams_end_where_the_context_does(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5] * (llm.engine.longest - 3)}
    params = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)
    outputs = llm.beam_search([prompt, "Hello"], params)
    assert [len(beam.tokens) for beam in outputs[0].sequences] == [llm.engine.longest] * 2
    assert {len(beam.logprobs) for beam in outputs[1].sequences} == {8}
    assert {beam.finish_reason for output in outputs for beam in output.sequences} == {"length"}
    with pytest.raises(ValueError, match="context"):
        llm.beam_search([{"prompt_token_ids": [5] * llm.engine.longest}], params)


def test_what_a_beam_search_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match="temperature"):
        BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5)
    with pytest.raises(ValueError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=4)
    with pytest.raises(ValueError, match="length_penalty must be a finite number, got nan"):
        BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=math.nan)
    with LLM(random_model("llama")) as llm, pytest.raises(ParlayError, match="tokenizer"):
        llm.beam_search([[5, 9]], BeamSearchParams(beam_width=2, max_tokens=4))
