"""Parlay inside transformers: ``model.generate(**inputs, custom_generate=parlay.transformers.generate, ...)``.

Or call `accelerate(model)` once: then every call of ``model.generate`` decodes with Parlay. transformers prepares
lengths, logits processors and stopping criteria; Parlay decodes, and returns padded ids as transformers does. Greedy
text equals that of plain `generate`, up to numerical noise. Sampled text follows the same distribution; one number
drawn from torch's generator seeds it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.streamers import BaseStreamer

from parlay import models
from parlay.cost.measured import MeasuredCost
from parlay.drafters.resources import Resources
from parlay.engine import Engine
from parlay.models.choosing import CompileRefused
from parlay.models.transformers_adapter.call import CACHE_ARGUMENTS, holds_tokens
from parlay.options import LoadOptions
from parlay.strategies.built import RunnerCache, StrategyCache
from parlay.strategies.entry import DEFAULT_STRATEGY
from parlay.types import LogitsProcessor, NoiseKey, ParlayError, Request, Runner, SamplingParams

_PREPARED = {"attention_mask", "position_ids", *CACHE_ARGUMENTS, "use_cache", "logits_to_keep"}
"""Arguments that transformers passes to every decoding function. Any other is a model input that Parlay can't feed."""

_REFUSED: dict[str, Callable[[GenerationConfig], bool]] = {
    "num_beams above 1": lambda config: (config.num_beams or 1) > 1,
    "return_dict_in_generate": lambda config: bool(config.return_dict_in_generate),
    "penalty_alpha (contrastive search)": lambda config: bool(config.penalty_alpha),
    "dola_layers": lambda config: config.dola_layers is not None,
    "prompt_lookup_num_tokens (name a parlay_strategy instead)": lambda config: bool(config.prompt_lookup_num_tokens),
    "assistant_early_exit": lambda config: config.assistant_early_exit is not None,
    "cache_implementation": lambda config: config.cache_implementation not in (None, "dynamic"),
    "use_cache=False": lambda config: config.use_cache is False,
    "use_mtp (name parlay_strategy='mtp' instead)": lambda config: bool(config.use_mtp),
    "constraints": lambda config: bool(config.constraints),
    "force_words_ids": lambda config: bool(config.force_words_ids),
}
_PREPARED_FIELDS = frozenset(
    {
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
        *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "remove_invalid_values"),
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "renormalize_logits"),
        *("guidance_scale", "watermarking_config", "token_healing", "num_return_sequences"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    }
)
"""Fields that transformers turns into lengths, processors, stopping criteria or prompts before it calls `generate`
here."""

_IDLE_FIELDS = frozenset(
    {
        *("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),  # beams
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),  # want a dict
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "max_matching_ngram_size"),
        *("speculation_type", "compile_config", "disable_compile", "continuous_batching_config"),
        *("prefill_chunk_size", "max_cache_len", "cache_config", "transformers_version"),
    }
)
"""Fields without effect on the text: they belong to modes that are refused, or say how transformers would run the
model."""

_KNOWN_FIELDS = _PREPARED_FIELDS | _IDLE_FIELDS | {re.split("[ =]", option)[0] for option in _REFUSED}
"""Any other field, such as one that a later version of transformers adds, is refused if it is set."""

_STATEFUL = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)
"""Processors that keep state between calls. Verification calls processors out of order, and not at every node."""

_ROWWISE = (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that treat a row alike at any place in the batch, so they may get one row alone."""


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    stop_strings: str | list[str] | None = None,
    parlay_strategy: str = DEFAULT_STRATEGY,
    parlay_tokenizer: PreTrainedTokenizerBase | None = None,
    parlay_draft: str | PreTrainedModel | None = None,
    parlay_compile: bool = False,
    **model_kwargs: Any,
) -> Tensor:
    """Decode a batch of prompts, ``input_ids`` ``[B, L]``, and return prompts with their outputs, padded on the right.

    Call it through ``model.generate(..., custom_generate=generate)``. Prompts of different lengths must be padded on
    the left, as for `generate`. ``parlay_strategy`` is written as on the command line. ``parlay_draft`` is a draft
    model, or its name. ``parlay_compile`` compiles both models (`LoadOptions`). ``parlay_tokenizer`` is for
    ``stop_strings`` and for strategies that read text; transformers does not pass ``tokenizer`` on. ``streamer`` is
    honoured. Stopping criteria see one row at a time, after each token, without scores.

    Raises ValueError naming any option that can't be honoured, ParlayError for a model that can't be run.
    """
    rows = _prompts(input_ids, model_kwargs)
    withheld = _not_passed_on()
    _refuse(generation_config, logits_processor, model_kwargs)
    if withheld.streamer is not None and len(rows) > 1:
        raise ValueError(f"streamer takes one row, got {len(rows)}: stream prompts one by one")
    if withheld.assistant:
        raise ValueError("assistant_model is not passed on by transformers: give parlay_draft, and parlay_strategy")
    if stop_strings is not None:
        stopping_criteria = StoppingCriteriaList([*stopping_criteria, _stop_at(stop_strings, parlay_tokenizer)])
    trained = model.training
    try:
        runner = models.load(model, load := LoadOptions(compile=parlay_compile))
        requests = _requests(
            rows, input_ids, generation_config, runner, processors=logits_processor, criteria=stopping_criteria
        )
        strategies = StrategyCache(_resources(runner, parlay_draft, parlay_tokenizer, load), cost := MeasuredCost())
        engine = Engine(runner, cost)
        for request in requests:
            engine.add(request, strategies.get(parlay_strategy))
        outputs = _decode(engine, len(rows), withheld.streamer)
    finally:
        model.train(trained)
    return _padded(input_ids, outputs, generation_config)


def accelerate(
    model: PreTrainedModel,
    *,
    strategy: str = DEFAULT_STRATEGY,
    draft: str | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    compile: bool = False,
) -> PreTrainedModel:
    """Make ``model.generate`` decode with Parlay, in pipelines too, until `slow_down` is called. Returns the model.

    Pass ``streamer``, and ``stop_strings`` with ``tokenizer``, as without Parlay. A call may name another
    ``parlay_strategy`` or ``parlay_draft``. Calls without a ``tokenizer`` use the one given here.
    """
    plain = type(model).generate

    def generate_here(
        *inputs: Any,
        tokenizer: PreTrainedTokenizerBase | None = tokenizer,
        **options: Any,
    ) -> Any:
        if "custom_generate" in options:
            return plain(model, *inputs, tokenizer=tokenizer, **options)
        usual = {"parlay_strategy": strategy, "parlay_draft": draft, "parlay_tokenizer": tokenizer}
        usual |= {"parlay_compile": compile}
        return plain(model, *inputs, custom_generate=generate, **{**usual, **options})

    model.generate = generate_here
    return model


def slow_down(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `accelerate`: ``model.generate`` decodes with transformers again. Returns the model."""
    vars(model).pop("generate", None)
    return model


def _decode(engine: Engine, rows: int, streamer: BaseStreamer | None) -> list[list[int]]:
    """Step the engine until every row has ended. The streamer, which has the prompt already, gets each token."""
    outputs: list[list[int]] = [[] for _ in range(rows)]
    while not engine.idle:
        for event in engine.step():
            if event.error is not None:
                raise ParlayError(f"row {event.request}: {event.error}")
            for committed in event.committed:
                outputs[int(event.request)].append(committed.token)
                if streamer is not None:
                    streamer.put(torch.tensor([committed.token]))
    if streamer is not None:
        streamer.end()
    return outputs


# ---------------------------------------------------------------------------------------------------------- requests


def _prompts(ids_BL: Tensor, model_kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the rows without their left padding."""
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        return [tuple(row) for row in ids_BL.tolist()]
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ValueError(
            "attention_mask hides tokens after visible ones: pad prompts on the left (padding_side='left')"
        )
    return [tuple(row[seen.bool()].tolist()) for row, seen in zip(ids_BL, mask, strict=True)]


def _requests(
    rows: Sequence[tuple[int, ...]],
    ids_BL: Tensor,
    config: GenerationConfig,
    runner: Runner,
    *,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
) -> list[Request]:
    """Make one engine request per row. The processors that transformers prepared apply temperature and truncation."""
    width, context = ids_BL.shape[1], runner.spec.max_context
    max_tokens = config.max_length - width
    longest = max(len(row) for row in rows) + max_tokens
    if longest > context:
        raise ValueError(
            f"max_length allows {longest} tokens, but the context of {runner.spec.name} is {context}: ask for fewer"
        )
    params = SamplingParams(temperature=1.0 if config.do_sample else 0.0, max_tokens=max_tokens)
    seed = int(torch.randint(2**62, ())) if config.do_sample else 0
    own = [criterion for criterion in criteria if not isinstance(criterion, MaxLengthCriteria | EosTokenCriteria)]
    place = {row: str(index) for index, row in enumerate(rows)}
    return [
        Request(
            id=str(index),
            prompt=row,
            params=replace(
                params, logits_processors=_prepared(processors, padded[: width - len(row)], index, len(rows))
            ),
            key=NoiseKey(seed, index),
            stop_ids=frozenset(_eos_ids(config)),
            stop_checker=_Criteria(StoppingCriteriaList(own), padded, ids_BL.device) if own else None,
            group=place[row] if rows.count(row) > 1 else "",
        )
        for index, (row, padded) in enumerate(zip(rows, ids_BL.tolist(), strict=True))
    ]


def _prepared(
    processors: LogitsProcessorList, padding: Sequence[int], row: int, rows: int
) -> tuple[LogitsProcessor, ...]:
    """Return the processors as one pure function of a row's ids. They see the row's left padding, as in `generate`."""
    if not processors:
        return ()
    rowwise = all(type(processor) in _ROWWISE for processor in processors)
    copies, place = (1, 0) if rowwise else (rows, row)

    def process(ids: list[int], logits_V: Tensor) -> Tensor:
        ids_BL = torch.tensor([[*padding, *ids]], device=logits_V.device).expand(copies, -1)
        processed_BV: Tensor = processors(ids_BL, logits_V.float().expand(copies, -1))
        return processed_BV[place]

    return (process,)


class _Criteria:
    """A row's stopping criteria as a stop checker."""

    def __init__(self, criteria: StoppingCriteriaList, prompt: Sequence[int], device: torch.device) -> None:
        self._criteria = criteria
        self._ids = list(prompt)
        self._device = device

    def push(self, token: int) -> bool:
        self._ids.append(token)
        ids_BL = torch.tensor([self._ids], device=self._device)
        scores: Any = None
        return bool(self._criteria(ids_BL, scores).all())


def _resources(
    runner: Runner, draft: str | PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None, load: LoadOptions
) -> Resources:
    name = draft if draft is None or isinstance(draft, str) else draft.config.name_or_path or "the draft model"

    def open_runner(wanted: str) -> Runner:
        try:
            return models.load(draft if draft is not None and wanted == name else wanted, load)
        except CompileRefused:  # Parlay's own decoder runs this draft model, and has nothing to compile
            return models.load(wanted)

    return Resources(
        vocab_size=runner.spec.vocab_size,
        open_runner=RunnerCache(open_runner),
        default_draft=name,
        tokenizer=tokenizer,
        target=runner.spec,
    )


def _eos_ids(config: GenerationConfig) -> list[int]:
    eos_ids = config.eos_token_id
    return [] if eos_ids is None else [eos_ids] if isinstance(eos_ids, int) else [int(token) for token in eos_ids]


def _padded(ids_BL: Tensor, outputs: Sequence[Sequence[int]], config: GenerationConfig) -> Tensor:
    filler = config.pad_token_id if config.pad_token_id is not None else next(iter(_eos_ids(config)), 0)
    longest = max(len(output) for output in outputs)
    rows = [[*output, *[filler] * (longest - len(output))] for output in outputs]
    return torch.cat([ids_BL, torch.tensor(rows, dtype=ids_BL.dtype, device=ids_BL.device)], dim=1)


def _stop_at(texts: str | list[str], tokenizer: PreTrainedTokenizerBase | None) -> StopStringCriteria:
    if tokenizer is None:
        raise ValueError(
            "stop_strings need parlay_tokenizer here, because transformers does not pass tokenizer on; "
            "after parlay.transformers.accelerate(model) it can be called tokenizer"
        )
    return StopStringCriteria(tokenizer, texts)


# ------------------------------------------------------------------------------- what transformers does not pass on


@dataclass(frozen=True, slots=True)
class _NotPassedOn:
    streamer: BaseStreamer | None = None
    assistant: bool = False


def _not_passed_on() -> _NotPassedOn:
    """Find the arguments that the calling `generate` of transformers received and did not pass on.

    transformers passes neither ``streamer`` nor ``assistant_model`` to ``custom_generate``. Ignoring them would be a
    silent failure, so both are read from the calling frame's local variables.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _GENERATE:
            return _NotPassedOn(frame.f_locals.get("streamer"), frame.f_locals.get("assistant_model") is not None)
        frame = frame.f_back
    return _NotPassedOn()


_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


# ---------------------------------------------------------------------------------------------------------- refusals


def _refuse(
    config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """Raises ValueError for the first option that can't be honoured."""
    for option, present in _REFUSED.items():
        if present(config):
            raise ValueError(f"{option} is not supported by parlay.transformers.generate: remove it")
    usual = vars(GenerationConfig())
    for option in usual.keys() - _KNOWN_FIELDS:
        if vars(config)[option] != usual[option] and not option.startswith("_"):
            raise ValueError(f"{option} is not known to parlay.transformers.generate: remove it")
    for processor in processors:
        if isinstance(processor, _STATEFUL):
            raise ValueError(f"{type(processor).__name__} depends on its earlier calls, which drafts would disturb")
    _refuse_inputs(model_kwargs)


def _refuse_inputs(model_kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError for a model input that `generate` does not feed, and for a cache that holds tokens."""
    for name, value in model_kwargs.items():
        if name not in _PREPARED and value is not None:
            raise ValueError(f"model input {name!r} is not supported by parlay.transformers.generate: remove it")
        if name in CACHE_ARGUMENTS and value is not None and (not isinstance(value, Cache) or holds_tokens(value)):
            raise ValueError(f"{name} that holds tokens already is not supported: give the whole prompt instead")
