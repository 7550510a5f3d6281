"""Initial weights of heads: the best linear guess of the target's next state.

From the target's features of token i and the embedding of token i + 1, ridge regression predicts the state that the LM
head reads at token i + 1. Heads start with this prediction; their layers and MLPs add nothing to it at first.

EAGLE-3's projection reads only the features. The embedding's part of the prediction goes through attention: initially,
the first query head of each group attends only to its own row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay.heads.eagle3 import Eagle3Config, Eagle3Head
from parlay.heads.layer import Attention
from parlay.train.data.features import Featured
from parlay.train.recipes.target import Target

_ROWS = 40_000
_SCALED = 64
"""The scale of features is measured on this many texts."""
_RIDGE = 1e-3
"""The ridge, relative to the mean square of each input."""
_OWN = 1.2
"""Size of the queries and keys by which a row attends to itself: its own score is about 11, and others are near 0."""
_SMALL = 0.02


def feature_scale(texts: Sequence[Featured], features: int) -> Tensor:
    """Return the root mean square ``[F]`` of each of the first ``features`` features."""
    states_NF = torch.cat([text.states_TF[text.answer - 1 :, :features].float() for text in texts[:_SCALED]])
    states_NF = states_NF.to(torch.get_default_device())
    return states_NF.square().mean(0).sqrt().clamp(min=1e-6)


def start_eagle3(target: Target, draft_ids_D: Tensor, taps: tuple[int, ...], texts: Sequence[Featured]) -> Eagle3Head:
    """Make a head for the features of ``taps``, with the module's initial weights; the features in ``texts`` begin with
    these."""
    config = target.config
    head = Eagle3Head(Eagle3Config(config, len(draft_ids_D), taps))
    head.set_draft_vocab(draft_ids_D)
    guess = linear_guess(target, texts, slice(0, head.fc.in_features), normed=True)
    with torch.no_grad():
        head.fc.weight.copy_(guess.from_features_HF)
        _attend_to_own_row(head.midlayer.self_attn, guess.from_embedding_HH, config.num_heads, config.num_kv_heads)
        head.midlayer.mlp.down_proj.weight.zero_()
        head.norm.weight.fill_(guess.size)
        head.lm_head.weight.copy_(target.head_VH[draft_ids_D].float())
    return head


@dataclass(frozen=True, slots=True)
class LinearGuess:
    """Matrices that predict the state that the LM head reads, from features and embedding.

    ``size`` is the root mean square of the state.
    """

    from_features_HF: Tensor
    from_embedding_HH: Tensor
    size: float


def states_ahead(size: int, texts: Sequence[Featured], count: int) -> list[Tensor]:
    """Return for 1 to ``count`` tokens ahead the matrix ``[H, H]`` that best predicts the state there from a token's
    state.

    The states are those that the LM head reads: the last ``size`` numbers of each stored row.
    """
    states: list[Tensor] = []
    for text in texts:
        states.append(text.states_TF[text.answer - 1 :, -size:].to(torch.get_default_device()).float())
        if sum(map(len, states)) >= _ROWS:
            break
    return [
        _ridge(*(torch.cat(part) for part in zip(*((of[:-ahead], of[ahead:]) for of in states), strict=True))).T
        for ahead in range(1, count + 1)
    ]


def linear_guess(target: Target, texts: Sequence[Featured], columns: slice, *, normed: bool) -> LinearGuess:
    """Fit the prediction from these columns of the stored states.

    ``normed``: embeddings are scaled to a root mean square of 1 first.
    """
    inputs_NF, embedded_NH, wanted_NH = _rows(target, texts, columns, normed)
    found_XH = _ridge(torch.cat((inputs_NF, embedded_NH), -1), wanted_NH)
    features = inputs_NF.shape[1]
    return LinearGuess(found_XH[:features].T, found_XH[features:].T, float(wanted_NH.square().mean().sqrt()))


def _ridge(x_NX: Tensor, wanted_NH: Tensor) -> Tensor:
    """Return the matrix ``[X, H]`` that best predicts ``wanted_NH`` from ``x_NX``, by ridge regression on scaled
    inputs.

    Without rows the matrix is zero: answers may all be shorter than the distance ahead.
    """
    if not len(x_NX):
        return torch.zeros(x_NX.shape[1], wanted_NH.shape[1])
    scale_X = x_NX.square().mean(0).sqrt().clamp(min=1e-6)
    x_NX = x_NX / scale_X
    gram_XX = (x_NX.T @ x_NX).double()
    gram_XX += _RIDGE * max(len(x_NX), 1) * torch.eye(len(gram_XX), dtype=torch.float64)
    found_XH: Tensor = torch.linalg.solve(gram_XX, (x_NX.T @ wanted_NH).double()).float() / scale_X[:, None]
    return found_XH


def _rows(target: Target, texts: Sequence[Featured], columns: slice, normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Collect rows of answers: features, the next token's embedding, and the state after that token."""
    size, count = target.config.hidden_size, 0
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for text in texts:
        states_TF = text.states_TF[text.answer - 1 :].to(target.device).float()
        embedded_TH = target.embedding_VH[text.ids_T[text.answer :].long().to(target.device)].float()
        if normed:
            embedded_TH = F.rms_norm(embedded_TH, (size,), eps=target.config.rms_norm_eps)
        found.append((states_TF[:-1, columns], embedded_TH, states_TF[1:, -size:]))
        count += len(embedded_TH)
        if count >= _ROWS:
            break
    inputs, embedded, wanted = (torch.cat(parts) for parts in zip(*found, strict=True))
    return inputs, embedded, wanted


def _attend_to_own_row(attention: Attention, wanted_HH: Tensor, heads: int, groups: int) -> None:
    """Set weights so that attention adds ``wanted_HH`` times the normed embedding of its own row.

    The product is approximated by SVD, since the values' rank may be lower than H.
    """
    size, dim = len(wanted_HH), attention.k_proj.out_features // groups
    left_HS, strength_S, right_SH = torch.linalg.svd(wanted_HH, full_matrices=False)
    rank = min(groups * dim, size)
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part.weight.normal_(0, _SMALL)
    attention.o_proj.weight.zero_()
    attention.v_proj.weight[:rank] = torch.cat((right_SH[:rank], torch.zeros(rank, size)), -1)
    for group in range(groups):
        first = group * (heads // groups) * dim
        own = _OWN * torch.linalg.qr(torch.randn(size, dim)).Q.T if dim <= size else torch.zeros(dim, size)
        for place, part in ((first, attention.q_proj), (group * dim, attention.k_proj)):
            part.weight[place : place + dim] = torch.cat((own, torch.zeros_like(own)), -1)
        ranks = range(group * dim, min((group + 1) * dim, rank))
        attention.o_proj.weight[:, first : first + len(ranks)] = left_HS[:, list(ranks)] * strength_S[list(ranks)]
