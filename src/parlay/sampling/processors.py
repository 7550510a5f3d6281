"""Edits a row of logits before a token is drawn.

In this order: repetition, presence and frequency penalties, logit bias, masks (allowed ids, stop ids before
``min_tokens``), custom processors, the request's constraint, temperature, truncation. The constraint comes after custom
processors, so none of them can allow again what it forbids.

A row follows a text: the view's tokens and then a path, the ids of drafted nodes. All edits are made on a float32 copy.
A row that nothing changes is returned as it is.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from numbers import Real

import torch
from torch import Tensor

from parlay.sampling import truncation
from parlay.types import Constraint, FieldError, LogitsProcessor, ParlayError, SamplingParams, SequenceView, Tokenizer

ALL_MASKED = "every token is masked"
"""The beginning of the error if a request's own parameters leave no token."""


class BadWords:
    """Masks the last token of each word where the output ends with the word's other tokens.

    A word stands for its tokens, with and without a space before it; as in vLLM, the same text in other tokens is not
    recognised. Whitespace alone, such as a line break, is barred as it is. The first ``prompt_length`` tokens are the
    prompt.
    """

    def __init__(self, words: Sequence[str], tokenizer: Tokenizer, prompt_length: int) -> None:
        spelled = [space + word.strip() for word in words if word.strip() for space in ("", " ")]
        spelled += [word for word in words if not word.strip()]
        encoded = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spelled]
        self._sequences = [ids for ids in dict.fromkeys(encoded) if ids]
        self._prompt_length = prompt_length

    def __call__(self, ids: list[int], logits_V: Tensor) -> Tensor:
        output = ids[self._prompt_length :]
        masked = [
            last
            for *before, last in self._sequences
            if not before or output[max(0, len(output) - len(before)) :] == before
        ]
        if masked:
            logits_V[torch.tensor(masked, device=logits_V.device)] = -torch.inf
        return logits_V


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if a parameter names a token outside the vocabulary, and for a bias that is not a number."""
    named = {
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in named.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            token = next(token for token in ids if not 0 <= token < vocab_size)
            raise FieldError(name, f"names token {token}, but this model's ids are 0 to {vocab_size - 1}")
    for token, bias in (params.logit_bias or {}).items():
        if not isinstance(bias, Real) or not bias < math.inf:  # -inf is allowed: it bars the token
            raise FieldError(
                "logit_bias", f"of token {token} is {bias!r:.40}: give a number, 100 to have it in any case"
            )


def packed(ids: Sequence[int] | None) -> Sequence[int] | None:
    """Ids as an array, from which the index for a row is made without reading them one by one.

    Ids that fit into no vocabulary stay as they are, for `validate`.
    """
    try:
        return None if ids is None else array("q", ids)
    except (TypeError, OverflowError):
        return ids


def edits(view: SequenceView, path: Sequence[int]) -> bool:
    """Whether anything besides temperature and truncation changes the row after ``path``."""
    params = view.request.params
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or bool(params.logits_processors)
        or view.request.constraint is not None
        or (params.min_tokens > 0 and _stops_masked(view, path))
    )


def _stops_masked(view: SequenceView, path: Sequence[int]) -> bool:
    """Whether ``min_tokens`` forbids that the sample ends after ``path``."""
    request = view.request
    return bool(request.stop_ids) and len(view.tokens) - view.prompt_length + len(path) < request.params.min_tokens


def process(logits_V: Tensor, view: SequenceView, path: Sequence[int]) -> Tensor:
    """The float32 logits ``[V]`` whose softmax the next token is drawn from. Tokens that can't be drawn have -inf.

    Greedy rows skip temperature and truncation, which do not move the maximum. Raises ParlayError if a custom processor
    raises or returns another shape, and for a row that is NaN, infinite or completely masked.
    """
    params = view.request.params
    scores_V = temper(edit(on_float64_device(logits_V), view, path), params)
    if params.greedy or not truncation.truncates(params):
        return scores_V
    ids = truncation.eligible(scores_V, params)
    return torch.full_like(scores_V, -torch.inf).index_copy_(0, ids, scores_V[ids])


def temper(scores_V: Tensor, params: SamplingParams) -> Tensor:
    """Logits divided by the temperature, in float32; greedy rows unchanged. Raises ParlayError for an unusable row."""
    if not params.greedy:
        scores_V = divide(scores_V[None].float(), [params.temperature])[0]
    complaint = unusable(scores_V.amax().item())
    if complaint:
        raise ParlayError(complaint)
    return scores_V


def divide(scores_RV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Rows divided by their temperatures, as a tensor: CUDA would turn division by a number into multiplication."""
    if all(temperature == 1 for temperature in temperatures):
        return scores_RV
    return scores_RV / scores_RV.new_tensor(temperatures)[:, None]


def on_float64_device(logits: Tensor) -> Tensor:
    """``logits`` of any shape, moved off MPS, which has no float64 for noise and running sums."""
    return logits.cpu() if logits.is_mps else logits


def unusable(top: float) -> str | None:
    """Why no token can be drawn from a row with this maximum; None if one can. (The maximum is NaN if any value is.)"""
    if math.isnan(top):
        return "logits are NaN: the model's weights or dtype are broken for this text"
    if top == torch.inf:
        return (
            "logits are infinite: the model overflowed its dtype, a logits processor set +inf, or temperature is too "
            "near 0: give 0 for the likeliest token"
        )
    if top == -torch.inf:
        masks = "allowed_token_ids, bad_words, logit_bias, min_tokens, logits_processors and structured_outputs"
        return f"{ALL_MASKED}: {masks} leave none"
    return None


def edit(logits_V: Tensor, view: SequenceView, path: Sequence[int]) -> Tensor:
    """Apply penalties, bias, masks, custom processors and the constraint to a float32 copy."""
    if not edits(view, path):
        return logits_V
    params = view.request.params
    scores_V = logits_V.to(torch.float32, copy=True)
    _penalise(scores_V, params, view, path)
    if params.logit_bias:
        scores_V[_ids(params.logit_bias, scores_V)] += scores_V.new_tensor(list(params.logit_bias.values()))
    if params.allowed_token_ids is not None:
        allowed = _ids(params.allowed_token_ids, scores_V)
        scores_V = torch.full_like(scores_V, -torch.inf).index_copy_(0, allowed, scores_V[allowed])
    if _stops_masked(view, path):
        scores_V[_ids(view.request.stop_ids, scores_V)] = -torch.inf
    for processor in params.logits_processors:
        scores_V = _run(processor, [*view.tokens, *path], scores_V)
    if view.request.constraint is not None:
        scores_V = _constrain(scores_V, view.request.constraint, view, path)
    return scores_V


def _constrain(scores_V: Tensor, constraint: Constraint, view: SequenceView, path: Sequence[int]) -> Tensor:
    """Mask tokens that the constraint forbids. A drafter's view may be shorter or longer than the committed text."""
    start = min(constraint.committed, len(view.tokens) - view.prompt_length)
    allowed_V = constraint.allowed(start, [*view.tokens[view.prompt_length + start :], *path])
    return scores_V if allowed_V is None else scores_V.masked_fill(~allowed_V.to(scores_V.device), -torch.inf)


def _penalise(scores_V: Tensor, params: SamplingParams, view: SequenceView, path: Sequence[int]) -> None:
    if params.repetition_penalty != 1:
        seen = _ids({*view.tokens[view.request.source :], *path}, scores_V)
        scores = scores_V[seen]
        penalty = float(params.repetition_penalty)  # torch takes no integer of more than 64 bits
        scores_V[seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter([*view.tokens[view.prompt_length :], *path])
        times = scores_V.new_tensor(list(counts.values()))
        scores_V[_ids(counts, scores_V)] -= params.frequency_penalty * times + params.presence_penalty


def _ids(tokens: Collection[int], scores_V: Tensor) -> Tensor:
    """The tokens as an index tensor ``[N]`` on the device of the scores."""
    if isinstance(tokens, array) and tokens:
        return torch.frombuffer(tokens, dtype=torch.int64).to(scores_V.device)
    return torch.tensor(list(tokens), dtype=torch.int64, device=scores_V.device)


def _run(processor: LogitsProcessor, ids: list[int], scores_V: Tensor) -> Tensor:
    try:
        result = processor(ids, scores_V)
    except Exception as error:
        reason = " ".join(str(error).split())  # on one line
        raise ParlayError(f"logits processor {processor!r} raised {type(error).__name__}: {reason}") from error
    if not isinstance(result, Tensor) or result.shape != scores_V.shape:
        got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ParlayError(f"logits processor {processor!r} must return shape {tuple(scores_V.shape)}, got {got}")
    return result.to(scores_V)
