"""`custom_generate`: what transformers' own generate says, in fewer forwards, or a clear refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import parlay.transformers
from parlay.models.fetch.resolving import resolve
from parlay.testing.checkpoints import VOCAB_SIZE, random_model
from parlay.transformers import accelerate, slow_down

PROMPT = [5, 9, 13, 5, 9, 13, 5, 9]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = random_model("gpt2")
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return model


def ours(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, custom_generate=parlay.transformers.generate, **options)


def padded(*rows: list[int]) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2, "min_new_tokens": 12},
        {"bad_words_ids": [[7], [5, 9]], "suppress_tokens": [11, 12]},
        {"eos_token_id": [2, 40, 41, 42, 43, 44, 45]},
        {"parlay_strategy": "none"},
    ],
)
def test_greedy_batches_with_padding_say_what_generate_says(model: PreTrainedModel, options: dict[str, Any]) -> None:
    ids, mask = padded(PROMPT, [3, 4, 3], [*range(10, 22)])
    plain = {key: value for key, value in options.items() if not key.startswith("parlay")}
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=24, **plain)
    assert ours(model, ids, attention_mask=mask, max_new_tokens=24, **options).equal(expected)


@pytest.mark.parametrize("name", ["lfm2", "mamba", "gemma2", "llama"])
def test_greedy_single_rows_say_what_generate_says(name: str) -> None:
    model = random_model(name)
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, max_new_tokens=24)
    assert ours(model, ids, max_new_tokens=24).equal(expected)


def test_drafts_save_forwards(model: PreTrainedModel) -> None:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handle = model.register_forward_hook(count)
    looping = LogitsProcessorList([_Copy()])
    out = ours(model, torch.tensor([PROMPT]), logits_processor=looping, max_new_tokens=60)
    handle.remove()
    assert out.shape[1] == len(PROMPT) + 60
    assert calls < 40


class _Copy(LogitsProcessor):
    """Makes the text repeat with period 3, so that prompt lookup guesses right."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, input_ids[:, -3:-2], 0.0)


def test_sampling_is_reproducible_and_independent_of_the_strategy(model: PreTrainedModel) -> None:
    ids, mask = padded(PROMPT, [3, 4, 3])
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "max_new_tokens": 20}
    texts = []
    for strategy in ("prompt-lookup", "none", "prompt-lookup"):
        torch.manual_seed(7)
        texts.append(ours(model, ids, attention_mask=mask, parlay_strategy=strategy, **options))
    assert texts[0].equal(texts[1])
    assert texts[0].equal(texts[2])
    torch.manual_seed(8)
    assert not ours(model, ids, attention_mask=mask, **options).equal(texts[0])


def test_sampled_first_tokens_follow_the_distribution_that_generate_samples_from(model: PreTrainedModel) -> None:
    """Chi-square over a truncated distribution's tokens; 16.27 is the 0.999 quantile for 3 degrees of freedom."""
    torch.manual_seed(3)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        top = torch.topk(model(ids).logits[0, -1] / 0.7, 4)
    draws = ours(model, ids, do_sample=True, temperature=0.7, top_k=4, max_new_tokens=1, num_return_sequences=200)
    counts = torch.stack([(draws[:, -1] == token).sum() for token in top.indices]).double()
    assert int(counts.sum()) == 200
    expected = torch.softmax(top.values.double(), 0) * 200
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.27


def test_stopping_criteria_end_a_row_at_the_very_token(model: PreTrainedModel) -> None:
    class Sum(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
            return input_ids.sum(dim=1) % 5 == 0

    ids, mask = padded(PROMPT, [3, 4, 3])
    criteria = StoppingCriteriaList([Sum()])
    expected = model.generate(ids, attention_mask=mask, stopping_criteria=criteria, max_new_tokens=30)
    assert ours(model, ids, attention_mask=mask, stopping_criteria=criteria, max_new_tokens=30).equal(expected)


def test_prefix_functions_are_told_the_row(model: PreTrainedModel) -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [10 + row, 20 + row] if len(ids) % 2 else [30 + row]

    ids = torch.tensor([PROMPT, PROMPT[::-1], PROMPT])
    expected = model.generate(ids, prefix_allowed_tokens_fn=allowed, max_new_tokens=10)
    assert ours(model, ids, prefix_allowed_tokens_fn=allowed, max_new_tokens=10).equal(expected)


def test_a_streamer_gets_the_prompt_then_every_token_then_the_end(model: PreTrainedModel) -> None:
    class Record(BaseStreamer):
        def __init__(self) -> None:
            self.ids: list[int] = []
            self.ended = False

        def put(self, value: Tensor) -> None:
            self.ids += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer = Record()
    out = ours(model, torch.tensor([PROMPT]), streamer=streamer, max_new_tokens=12)
    assert streamer.ids == out[0].tolist()
    assert streamer.ended


def test_a_loaded_model_can_draft_for_another(model: PreTrainedModel) -> None:
    ids = torch.tensor([PROMPT])
    out = ours(model, ids, parlay_strategy="draft-model", parlay_draft=random_model("gpt2", seed=1), max_new_tokens=12)
    assert out.equal(model.generate(ids, max_new_tokens=12))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"use_cache": False}, "use_cache"),
        ({"cache_implementation": "static"}, "cache_implementation"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"guidance_scale": 1.5}, "ClassifierFreeGuidance"),
        ({"token_type_ids": torch.zeros(1, 8, dtype=torch.long)}, "token_type_ids"),
        ({"max_new_tokens": 1000}, "context"),
        ({"parlay_strategy": "no-such"}, "no-such"),
        ({"force_words_ids": [[[7]]]}, "force_words_ids"),
        ({"stop_strings": "x"}, "parlay_tokenizer"),
        ({"assistant_model": random_model("gpt2", seed=1)}, "parlay_draft"),
    ],
)
def test_what_cannot_be_honoured_is_named(model: PreTrainedModel, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ours(model, torch.tensor([PROMPT]), **{"max_new_tokens": 4, **options})


def test_right_padding_and_streams_of_batches_are_refused(model: PreTrainedModel) -> None:
    ids = torch.tensor([[5, 6, 0], [5, 6, 7]])
    with pytest.raises(ValueError, match="pad prompts on the left"):
        ours(model, ids, attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]]), max_new_tokens=4)
    with pytest.raises(ValueError, match="streamer takes one row"):
        ours(model, ids, attention_mask=torch.ones_like(ids), streamer=_Quiet(), max_new_tokens=4)


class _Quiet(BaseStreamer):
    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def test_every_field_of_a_generation_config_is_known_or_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a later transformers adds is an error where it is set, until somebody has judged it."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields <= parlay.transformers._KNOWN_FIELDS
    known = parlay.transformers._KNOWN_FIELDS - {"top_h"}
    monkeypatch.setattr(parlay.transformers, "_KNOWN_FIELDS", known)
    with pytest.raises(ValueError, match="top_h is not known"):
        ours(model, torch.tensor([PROMPT]), do_sample=True, top_h=0.4, max_new_tokens=2)


# ----------------------------------------------------------------------------------------------------- with a tokenizer


@pytest.fixture(scope="module")
def mini() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    place = resolve("parlay-mini")
    return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32), AutoTokenizer.from_pretrained(place)


TEXT = "Once upon a time there was a king who"


def test_stop_strings_end_a_row_where_generate_does(mini: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = mini
    inputs = tokenizer(TEXT, return_tensors="pt")
    whole = tokenizer.decode(model.generate(**inputs, max_new_tokens=30)[0, inputs.input_ids.shape[1] :])
    stop = whole[len(whole) // 2 :][:3]
    options: dict[str, Any] = {"stop_strings": [stop], "max_new_tokens": 30}
    expected = model.generate(**inputs, tokenizer=tokenizer, **options)
    got = model.generate(**inputs, custom_generate=parlay.transformers.generate, parlay_tokenizer=tokenizer, **options)
    assert got.equal(expected)
    try:
        assert accelerate(model).generate(**inputs, tokenizer=tokenizer, **options).equal(expected)
    finally:
        slow_down(model)


def test_an_accelerated_model_streams_and_serves_pipelines(
    mini: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = mini
    inputs = tokenizer(TEXT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=20)
    try:
        accelerate(model, strategy="jacobi")
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        assert model.generate(**inputs, streamer=streamer, max_new_tokens=20).equal(expected)
        assert "".join(streamer) == tokenizer.decode(expected[0, inputs.input_ids.shape[1] :])
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        (said,) = pipe(TEXT, max_new_tokens=20, do_sample=False)
        assert said["generated_text"] == tokenizer.decode(expected[0], skip_special_tokens=True)
        with pytest.raises(ValueError, match="assistant_model"):
            model.generate(**inputs, assistant_model=model, max_new_tokens=20)
    finally:
        slow_down(model)
    assert model.generate(**inputs, max_new_tokens=20).equal(expected)


def test_training_mode_is_left_as_it_was(model: PreTrainedModel) -> None:
    model.train()
    ours(model, torch.tensor([[1 % VOCAB_SIZE, 2, 3]]), max_new_tokens=2, eos_token_id=None)
    assert model.training
    model.eval()
