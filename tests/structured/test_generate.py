"""Structured texts through the engine: masked plain decoding's tokens under every strategy, and nothing that breaks."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from parlay import LLM, ParlayError, RequestFailed, SamplingParams, StructuredOutputsParams
from parlay.llm.outputs import CompletionOutput

PROMPT = 'Examples:\n{"name": "Ada", "age": 36, "tags": ["one", "two"]}\nAnother one:\n'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["one", "two", "three"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex="[A-Z][a-z]{2,7} (was|is) [0-9]{1,3}"),
    "choice": StructuredOutputsParams(choice=["the quick brown fox", "the quick red fox", "the slow one"]),
    "counting": StructuredOutputsParams(grammar="start: gen\ngen[max_tokens=12]: /.*/"),
    "grammar": StructuredOutputsParams(grammar='root ::= "[" item ("," item)* "]"\nitem ::= "x" | "y" [0-9]'),
}
EXACT = [
    "prompt-lookup:policy=fixed,k=5",
    "draft-model:policy=fixed,k=4",
    "draft-model:policy=fixed,k=6,shape=tree",
    "lookahead:policy=fixed",
    "jacobi:policy=fixed",
    "union:policy=fixed",
    "token-recycling",
    "layer-skip",
    "prompt-lookup:policy=heuristic",
]
DRAWN = [
    "draft-model:rule=rejection,policy=fixed,k=4",
    "draft-model:rule=block,policy=fixed,k=4",
    "draft-model:rule=without-replacement,policy=fixed,k=6",
    "prompt-lookup:rule=typical,policy=fixed,k=4",
]


def decode(llm: LLM, params: SamplingParams, strategy: str | list[str] = "none") -> list[CompletionOutput]:
    names = [strategy] if isinstance(strategy, str) else strategy
    return [out.outputs[0] for out in llm.generate([PROMPT] * len(names), params, strategy=names)]


def keeps(kind: str, sample: CompletionOutput) -> bool:
    """Whether the text is what was asked for; one that ran out of tokens is let off."""
    if sample.finish_reason == "length":
        return True
    if kind == "json":
        value = json.loads(sample.text)
        return [*value] == ["name", "age", "tags"] and 0 <= value["age"] <= 150 and {*value["tags"]} <= {*SAID}
    if kind == "counting":
        return len(sample.token_ids) <= 13
    if kind == "choice":
        return sample.text in (KINDS["choice"].choice or ())
    pattern = KINDS["regex"].regex if kind == "regex" else r"\[(x|y[0-9])(,(x|y[0-9]))*\]"
    return re.fullmatch(pattern or "", sample.text) is not None


SAID = ("one", "two", "three")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_every_exact_strategy_gives_masked_plain_decodings_tokens(llm: LLM, kind: str, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, max_tokens=48, seed=3, structured_outputs=KINDS[kind], logprobs=2, top_p=0.95
    )
    plain, *others = decode(llm, params, ["none", *EXACT])
    assert keeps(kind, plain)
    for strategy, sample in zip(EXACT, others, strict=True):
        assert sample.metrics.drafter_faults == 0
        assert (sample.token_ids, sample.finish_reason) == (plain.token_ids, plain.finish_reason), strategy
        assert sample.logprobs == plain.logprobs


@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_promise_less_keep_to_it_too(llm: LLM, kind: str) -> None:
    for seed in range(3):
        params = SamplingParams(temperature=1.0, max_tokens=48, seed=seed, structured_outputs=KINDS[kind])
        for strategy, sample in zip(DRAWN, decode(llm, params, DRAWN), strict=True):
            assert sample.metrics.drafter_faults == 0
            assert keeps(kind, sample), (strategy, sample.text)


def test_samples_of_one_prompt_have_grammars_of_their_own(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.2, max_tokens=24, seed=5, structured_outputs=KINDS["regex"])
    (plain,) = llm.generate(PROMPT, params, strategy="none")
    (drafted,) = llm.generate(PROMPT, params)
    assert [one.token_ids for one in drafted.outputs] == [one.token_ids for one in plain.outputs]
    assert all(keeps("regex", one) for one in plain.outputs)
    assert len({one.text for one in plain.outputs}) > 1


@pytest.mark.parametrize("strategy", ["prompt-lookup", "draft-model:rule=block", "prompt-lookup:policy=fixed,k=0"])
def test_forced_tokens_come_in_one_step_whatever_the_budget(llm: LLM, strategy: str) -> None:
    text = "The quick brown fox jumps over the lazy dog and runs away."
    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(choice=[text]))
    plain, drafted = decode(llm, params, ["none", strategy])
    assert plain.text == drafted.text == text
    assert plain.metrics.steps == len(plain.token_ids)
    assert "grammar" not in plain.metrics.drafted_by_source
    assert drafted.metrics.steps <= 2
    assert drafted.metrics.accepted_by_source["grammar"] > 2
    assert drafted.metrics.draft_tokens == drafted.metrics.accepted_tokens


def test_forced_tokens_keep_to_the_length_asked_for(llm: LLM) -> None:
    wanted = StructuredOutputsParams(choice=["one two three four five six seven eight nine"])
    for length in (1, 2, 5):
        params = SamplingParams(temperature=0, max_tokens=length, structured_outputs=wanted)
        plain, drafted = decode(llm, params, ["none", "prompt-lookup"])
        assert drafted.token_ids == plain.token_ids
        assert len(drafted.token_ids) == length
        assert drafted.finish_reason == "length"


@pytest.mark.parametrize("strategy", ["none", "prompt-lookup"])
def test_a_whole_text_ends_the_sample_at_once(llm: LLM, strategy: str) -> None:
    """No token that says so is needed, so neither `ignore_eos` nor `min_tokens` can hold it up."""
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=KINDS["regex"])
    (usual,) = decode(llm, params, strategy)
    assert usual.finish_reason == "stop"
    assert usual.stop_reason is None
    assert usual.token_ids[-1] not in llm.runner.spec.eos_ids or usual.text.endswith(tuple("0123456789"))
    fixed = replace(params, structured_outputs=StructuredOutputsParams(regex="[a-z]{3}-[0-9]{2}"))
    (short,) = decode(llm, fixed, strategy)
    for changed in (replace(fixed, ignore_eos=True), replace(fixed, min_tokens=30)):
        (sample,) = decode(llm, changed, strategy)
        assert (sample.token_ids, sample.finish_reason) == (short.token_ids, "stop")


def test_a_text_that_may_go_on_does_so_until_min_tokens_and_under_ignore_eos(llm: LLM) -> None:
    wanted = StructuredOutputsParams(regex="(yes|no)( (yes|no))*")
    params = SamplingParams(temperature=1, seed=1, max_tokens=12, structured_outputs=wanted)
    for changed in (replace(params, min_tokens=12), replace(params, ignore_eos=True)):
        plain, drafted = decode(llm, changed, ["none", "draft-model"])
        assert plain.token_ids == drafted.token_ids
        assert len(plain.token_ids) == 12
        assert not set(plain.token_ids) & set(llm.runner.spec.eos_ids)


def test_stops_still_stop(llm: LLM) -> None:
    wanted = StructuredOutputsParams(choice=["the quick brown fox"])
    params = SamplingParams(temperature=0, max_tokens=40, stop=" brown", structured_outputs=wanted)
    for sample in decode(llm, params, ["none", "prompt-lookup"]):
        assert (sample.text, sample.finish_reason, sample.stop_reason) == ("the quick", "stop", " brown")


def test_what_can_not_be_kept_is_an_error_of_that_request_alone(llm: LLM) -> None:
    """Custom processors come before the grammar: they can forbid what it asks for, not bring back what it forbids."""
    bound = SamplingParams(temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["zebra"]))
    against = replace(bound, logits_processors=[lambda ids, logits_V: logits_V.index_fill(0, ids_of(llm, "z"), -1e9)])
    assert decode(llm, against)[0].text == "zebra"
    never = replace(bound, logit_bias=dict.fromkeys(range(4096), -float("inf")))
    with pytest.raises(RequestFailed, match="structured_outputs leave none") as caught:
        llm.generate([PROMPT, PROMPT], [never, bound])
    assert caught.value.outputs[1].outputs[0].text == "zebra"


def ids_of(llm: LLM, letter: str) -> object:
    import torch

    assert llm.tokenizer is not None
    known = [token for word, token in llm.tokenizer.get_vocab().items() if word.startswith(letter)]
    return torch.tensor(known)


def test_what_is_wrong_is_said_before_anything_runs(llm: LLM) -> None:
    for wanted, message in (
        (StructuredOutputsParams(json='{"type": "thing"}'), "Invalid type"),
        (StructuredOutputsParams(regex="(("), "unclosed group"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.job(PROMPT, SamplingParams(structured_outputs=wanted))
    assert llm.engine.idle
    with pytest.raises((ValueError, ParlayError), match="must have exactly one of"):
        SamplingParams(structured_outputs=StructuredOutputsParams())


@pytest.mark.parametrize("seed", range(3))
def test_json_without_free_white_space_has_one_space_after_each_comma_and_colon(llm: LLM, seed: int) -> None:
    """At this temperature the model writes much of it where it may."""
    wanted = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(temperature=1.5, seed=seed, max_tokens=120, structured_outputs=wanted)
    (sample,) = decode(llm, params)
    spaced = r'\{"name": "([^"\\]|\\.)*", "age": \d+, "tags": \[("\w+"(, "\w+")*)?\]\}'
    assert sample.finish_reason == "stop"
    assert re.fullmatch(spaced, sample.text), sample.text
