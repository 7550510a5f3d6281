"""Losses of models that write an answer in one pass, in log space: CTC, and paths through a directed acyclic graph.

Suffixes: B answers, C places of a canvas, T tokens of an answer, V tokens of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def ctc_loss(logits_BCV: Tensor, frames_B: Tensor, targets_BT: Tensor, lengths_B: Tensor, blank: int) -> Tensor:
    """Return each answer's negative log-likelihood ``[B]``, summed over all ways to write it with repeats and blanks.

    It is infinite if there are fewer frames than tokens plus pairs of equal neighbours (Graves et al. 2006).
    """
    scores_CBV = logits_BCV.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores_CBV, targets_BT, frames_B, lengths_B, blank=blank, reduction="none")


def dag_loss(
    tokens_BCT: Tensor, jumps_BCC: Tensor, vertices_B: Tensor, lengths_B: Tensor, *, best: bool = False
) -> Tensor:
    """Return each answer's negative log-likelihood ``[B]``, summed over all paths from first to last vertex that write
    it.

    ``tokens_BCT`` is the log-probability of token t at a vertex, ``jumps_BCC`` that of going from one vertex to
    another. With ``best``, only the likeliest path counts. The recursion is f[0, 0] = tokens of vertex 0; f[t, v] =
    token t at v + logsumexp over u of (f[t - 1, u] + jump from u to v) (DA-Transformer, Huang et al. 2022,
    arXiv:2205.07459). The loss is infinite if there are fewer vertices than tokens.
    """
    batch, count, length = tokens_BCT.shape
    started = torch.full((batch, count), -torch.inf, dtype=tokens_BCT.dtype, device=tokens_BCT.device)
    reached_BC = torch.cat((tokens_BCT[:, :1, 0], started[:, 1:]), 1)
    all_BC = [reached_BC]
    for at in range(1, length):
        along_BCC = reached_BC[:, :, None] + jumps_BCC
        into_BC = along_BCC.amax(1) if best else _logsumexp(along_BCC)
        reached_BC = into_BC + tokens_BCT[:, :, at]
        all_BC.append(reached_BC)
    every_BTC, rows = torch.stack(all_BC, 1), torch.arange(batch, device=tokens_BCT.device)
    return -every_BTC[rows, lengths_B - 1, vertices_B - 1]


def _logsumexp(scores_BCC: Tensor) -> Tensor:
    """Return logsumexp over dimension 1, with gradient 0 instead of NaN where all scores are -inf."""
    none_BC = (scores_BCC == -torch.inf).all(1)
    found_BC = scores_BCC.masked_fill(none_BC[:, None], 0.0).logsumexp(1)
    return found_BC.masked_fill(none_BC, -torch.inf)


@torch.no_grad()
def dag_alignment(tokens_BCT: Tensor, jumps_BCC: Tensor, vertices_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Return the vertex ``[B, T]`` of each token on the likeliest path that writes the answer; -1 after the answer's
    end."""
    batch, count, length = tokens_BCT.shape
    reached_BC = torch.full((batch, count), -torch.inf, dtype=tokens_BCT.dtype, device=tokens_BCT.device)
    reached_BC[:, 0] = tokens_BCT[:, 0, 0]
    origins = []
    for at in range(1, length):
        into = (reached_BC[:, :, None] + jumps_BCC).max(1)
        reached_BC = into.values + tokens_BCT[:, :, at]
        origins.append(into.indices)
    aligned_BT = torch.full((batch, length), -1, device=tokens_BCT.device)
    rows, here_B = torch.arange(batch, device=tokens_BCT.device), vertices_B - 1
    for at in reversed(range(length)):
        ends_B = lengths_B - 1 == at
        here_B = torch.where(ends_B, vertices_B - 1, here_B)
        inside_B = at < lengths_B
        aligned_BT[:, at] = torch.where(inside_B, here_B, -1)
        if at:
            here_B = torch.where(inside_B, origins[at - 1][rows, here_B], here_B)
    return aligned_BT
