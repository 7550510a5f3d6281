"""Log-probabilities of tokens: the natural logarithm of the softmax of raw (or processed) logits, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parlay.sampling import select
from parlay.sampling.processors import process
from parlay.types import SequenceView, TokenLogprobs


def token_logprobs(logits_V: Tensor, token: int, top: int) -> TokenLogprobs:
    """Log-probability and rank of ``token``, and the ``top`` most likely tokens. Ties rank by id, lowest first."""
    logprobs_V = torch.log_softmax(logits_V, -1, dtype=torch.float32)
    logit = logits_V[token]
    better = (logits_V > logit).sum() + (logits_V[:token] == logit).sum()
    best = select.leading(logits_V, top)
    alternatives = tuple(zip(best.tolist(), logprobs_V[best].tolist(), strict=True))
    return TokenLogprobs(token, logprobs_V[token].item(), int(better) + 1, alternatives)


def prompt_token_logprobs(logits_RV: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """`token_logprobs` of prompt tokens: row r, at the token before, predicts ``tokens[r]``."""
    return [token_logprobs(row_V, token, top) for row_V, token in zip(logits_RV, tokens, strict=True)]


def row_logprobs(
    logits_RV: Tensor, view: SequenceView, paths: Sequence[Sequence[int]], tokens: Sequence[int], top: int
) -> list[TokenLogprobs]:
    """`token_logprobs` of tokens that were chosen: row r follows ``view.tokens`` and then ``paths[r]``.

    They are those of the raw logits or, if the request says so, of the processed ones.
    """
    if view.request.params.logprobs_mode == "processed":
        rows = [process(row_V, view, path) for row_V, path in zip(logits_RV, paths, strict=True)]
        logits_RV = torch.stack(rows) if rows else logits_RV
    return [token_logprobs(row_V, token, top) for row_V, token in zip(logits_RV, tokens, strict=True)]
