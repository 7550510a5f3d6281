"""The one sampler: a token is a pure function of a row of logits, the row's own path, and the request's key."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from parlay.compiled import structs
from parlay.sampling import noise, select, truncation
from parlay.sampling.processors import divide, edit, edits, on_float64_device, temper, unusable
from parlay.system import threads
from parlay.types import Fault, ParlayError, SamplingParams, SequenceView

_TRIES = 8  # among so many best tokens, top-p mostly keeps one


def sample(
    logits_RV: Tensor,
    views: Sequence[SequenceView],
    paths: Sequence[Sequence[int]],
    positions: Sequence[int] | None = None,
) -> list[int | Fault]:
    """One token per row: row r comes after the tokens of ``views[r]`` and then the token ids ``paths[r]``.

    ``positions``: the absolute positions of the tokens, which key their noise; None: right after the paths. Ties go to
    the lowest id. A row that no token can be drawn from (NaN, completely masked, a processor that raises) gets a Fault,
    and the other rows get their tokens.
    """
    plain: list[int] = []
    tempered: dict[int, int] = {}  # rows and their streams
    chosen: list[int | Fault] = [0] * len(views)
    for row, (view, path) in enumerate(zip(views, paths, strict=True)):
        if is_plain_greedy(view, path):
            plain.append(row)
            continue
        state = _stream(view, path) if positions is None else noise.stream(view.request.key, positions[row])
        if edits(view, path):
            chosen[row] = _processed(on_float64_device(logits_RV[row]), view, path, state)
        elif (token := draw_in_one_pass(logits_RV[row], view.request.params, state)) is not None:
            chosen[row] = token
        elif is_batchable(view, path) or not truncation.truncates(view.request.params):
            tempered[row] = state
        else:
            chosen[row] = _processed(on_float64_device(logits_RV[row]), view, path, state)
    if plain:
        _put(chosen, plain, greedy(take_rows(logits_RV, plain)))
    if tempered:
        logits = on_float64_device(take_rows(logits_RV, list(tempered)))
        params = [views[row].request.params for row in tempered]
        _put(chosen, tempered, _tempered(logits, params, list(tempered.values())))
    return chosen


def ranked(
    logits_RV: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], count: int
) -> list[tuple[int, ...]]:
    """For each row, up to ``count`` tokens in the order in which `sample` prefers them, noise included.

    The first is the one that `sample` returns. There are fewer if fewer can be drawn, and none for a row that would be
    a Fault.
    """
    if count == 1:
        return [() if isinstance(token, Fault) else (token,) for token in sample(logits_RV, views, paths)]
    best: list[list[int]] = [[] for _ in views]
    plain = [row for row, (view, path) in enumerate(zip(views, paths, strict=True)) if is_plain_greedy(view, path)]
    if plain:
        for row, tokens in zip(plain, _leading(take_rows(logits_RV, plain), count), strict=True):
            best[row] = tokens
    noisy = sorted(set(range(len(views))).difference(plain))
    at_once = [row for row in noisy if _in_one_order(views[row].request.params)]
    for wanted, rank in ((at_once, _by_score), (sorted(set(noisy).difference(at_once)), _one_by_one)):
        if wanted:
            found = rank(logits_RV[wanted], [views[row] for row in wanted], [paths[row] for row in wanted], count)
            for row, tokens in zip(wanted, found, strict=True):
                best[row] = tokens
    return [tuple(tokens) for tokens in best]


def _in_one_order(params: SamplingParams) -> bool:
    """Whether a token's score stays the same when better tokens are masked."""
    return not params.logits_processors and (params.greedy or not truncation.truncates(params))


def _by_score(
    logits_RV: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """`ranked` for rows whose scores do not depend on each other."""
    best: list[list[int]] = [[] for _ in views]
    sampled: list[tuple[int, Tensor]] = []
    for row, (view, path) in enumerate(zip(views, paths, strict=True)):
        try:
            scores_V = temper(edit(on_float64_device(logits_RV[row]), view, path), view.request.params)
        except ParlayError:
            continue  # the row would be a Fault
        if view.request.params.greedy:
            best[row] = select.leading_finite(scores_V, count)
        else:
            sampled.append((row, scores_V))
    if sampled:
        streams = [_stream(views[row], paths[row]) for row, _ in sampled]
        found = noise.best(torch.stack([scores_V for _, scores_V in sampled]), streams, count)
        for (row, _), tokens in zip(sampled, found, strict=True):
            best[row] = tokens
    return best


def _one_by_one(
    logits_RV: Tensor, views: Sequence[SequenceView], paths: Sequence[Sequence[int]], count: int
) -> list[list[int]]:
    """`ranked` by drawing ``count`` times.

    Each drawn token is masked in ``logits_RV``, so that the next one moves up.
    """
    best: list[list[int]] = [[] for _ in views]
    for _ in range(count):
        for row, token in enumerate(sample(logits_RV, views, paths)):
            if not isinstance(token, Fault):
                best[row].append(token)
                logits_RV[row, token] = -torch.inf
    return best


def _leading(logits_RV: Tensor, count: int) -> list[list[int]]:
    """Ids of each row's ``count`` largest logits, largest first, ties by rising id; empty for an unusable row."""
    ids_RC, sure_R = select.leading_rows(logits_RV, min(count, logits_RV.shape[-1]))
    best_RC, order_RC = logits_RV.gather(1, ids_RC).sort(dim=1, descending=True, stable=True)
    leading = ids_RC.gather(1, order_RC).tolist()
    for row, (top, sure) in enumerate(zip(best_RC[:, 0].tolist(), sure_R.tolist(), strict=True)):
        if not (sure and math.isfinite(top)):  # equal logits compete for the last place, or the row is unusable
            usable = unusable(float(select.argmax(logits_RV[row, None])[0])) is None
            leading[row] = select.leading(logits_RV[row], count).tolist() if usable else []
    return leading


def is_plain_greedy(view: SequenceView, path: Sequence[int]) -> bool:
    """Whether the sampler returns the token with the largest raw logit."""
    return view.request.params.temperature == 0 and not edits(view, path)


def all_plain_greedy(views: Sequence[SequenceView], paths: Sequence[Sequence[int]]) -> bool:
    """Whether `is_plain_greedy` holds for all rows.

    Neighbouring rows of one text are checked once, unless ``min_tokens`` is set.
    """
    before: SequenceView | None = None
    for view, path in zip(views, paths, strict=True):
        if view is not before or view.request.params.min_tokens:
            if not is_plain_greedy(view, path):
                return False
            before = view
    return True


def is_batchable(view: SequenceView, path: Sequence[int]) -> bool:
    """Whether the row can be truncated together with other rows, which is cheaper than alone."""
    return (
        truncation.goes_together(view.request.params) and view.request.params.temperature > 0 and not edits(view, path)
    )


def greedy(logits_RV: Tensor) -> list[int | Fault]:
    """The most likely token of each row, or why it is unusable."""
    if (found := likeliest_in_one_pass(logits_RV)) is not None:
        return [*found]
    values_R, ids_R = select.argmax(logits_RV)
    values: list[float] = values_R.tolist()
    ids: list[int | Fault] = ids_R.tolist()
    if math.isfinite(sum(values)):  # then all are finite; if only the sum overflows, each is checked
        return ids
    return [_or_fault(top, token) for top, token in zip(values, ids, strict=True)]


def take_rows(logits_RV: Tensor, wanted: Sequence[int]) -> Tensor:
    """The wanted rows in their order. Consecutive rows are not copied."""
    first, count = wanted[0], len(wanted)
    if count == 1 or list(wanted) == list(range(first, first + count)):
        return logits_RV[first : first + count]
    return logits_RV[list(wanted)]


def _put(chosen: list[int | Fault], places: Iterable[int], tokens: Sequence[int | Fault]) -> None:
    for place, token in zip(places, tokens, strict=True):
        chosen[place] = token


def _or_fault(top: float, token: int | Fault) -> int | Fault:
    complaint = unusable(top)
    return token if complaint is None else Fault(complaint)


def _tempered(logits_RV: Tensor, params: Sequence[SamplingParams], streams: Sequence[int]) -> list[int | Fault]:
    """Tokens of rows that need only temperature, noise and perhaps truncation."""
    scores_RV = divide(logits_RV.float(), [own.temperature for own in params])
    tokens = [_or_fault(top, 0) for top in select.block_maxima(scores_RV).amax(-1).tolist()]
    good = [row for row, token in enumerate(tokens) if not isinstance(token, Fault)]
    groups: dict[tuple[int, float], list[int]] = {}
    for row in good:
        groups.setdefault((params[row].top_k, params[row].top_p), []).append(row)
    for group in groups.values():
        _put(tokens, group, _drawn(take_rows(scores_RV, group), params[group[0]], [streams[row] for row in group]))
    return tokens


def _drawn(scores_RV: Tensor, params: SamplingParams, streams: Sequence[int]) -> list[int]:
    """A token for each row. All rows have the same truncation."""
    if not truncation.truncates(params):
        return noise.draw(scores_RV, streams)
    if params.top_k == 0 and scores_RV.is_cpu:
        return [_by_top_p(scores_V, params, state) for scores_V, state in zip(scores_RV, streams, strict=True)]
    ids_RC, stay_RC, sure_R = truncation.eligible_rows(scores_RV, params)
    tokens = noise.draw_among_rows(scores_RV, ids_RC, stay_RC, streams)
    for row, sure in enumerate(sure_R.tolist()):
        if not sure:
            tokens[row] = noise.draw_among(scores_RV[row], truncation.eligible(scores_RV[row], params), streams[row])
    return tokens


def _by_top_p(scores_V: Tensor, params: SamplingParams, state: int) -> int:
    """The token of a row that only top-p truncates.

    It is the best token, noise included, that top-p keeps. This is usually the first, so neither the row's order nor
    other noise is needed.
    """
    (leading,) = noise.best(scores_V[None], [state], _TRIES)
    token = truncation.first_kept(scores_V, leading, params.top_p)
    return noise.draw_among(scores_V, truncation.eligible(scores_V, params), state) if token is None else token


def _processed(logits_V: Tensor, view: SequenceView, path: Sequence[int], state: int) -> int | Fault:
    """The token of a row that needs every step of `processors`, with the noise of a stream."""
    params = view.request.params
    try:
        edited_V = edit(logits_V, view, path)
        if not params.greedy and (token := draw_in_one_pass(edited_V, params, state)) is not None:
            return token
        scores_V = temper(edited_V, params)
    except ParlayError as error:
        return Fault(str(error))
    if params.greedy:
        return int(select.argmax(scores_V[None])[1])
    if not truncation.truncates(params) or (params.top_k == 0 and truncation.goes_together(params)):
        return _drawn(scores_V[None], params, [state])[0]
    return noise.draw_among(scores_V, truncation.eligible(scores_V, params), state)


def _stream(view: SequenceView, path: Sequence[int]) -> int:
    """The noise stream of the position right after a path."""
    return noise.stream(view.request.key, len(view.tokens) + len(path))


# ------------------------------------------------------------------------------------------------- the library's passes


def draw_in_one_pass(logits_V: Tensor, params: SamplingParams, state: int) -> int | None:
    """The token of a row of logits that needs only temperature (above 0), truncation and noise.

    None if the library can't tell, so that the single steps must decide: it is not available or can't read the row; the
    result depends on rounding; the request has typical-p; or no token can be drawn.
    """
    core = _reader(logits_V)
    if core is None or params.typical_p < 1:
        return None
    least = math.log(params.min_p) if params.min_p else -math.inf
    row = logits_V.data_ptr(), logits_V.numel()
    token = core.draw(*row, params.temperature, params.top_k, params.top_p, least, state)
    return token if token >= 0 else None


def leading_in_one_pass(
    logits_RV: Tensor, count: int, wanted: Sequence[int] | None = None, barred: Sequence[int] = ()
) -> list[list[tuple[int, float]]] | None:
    """Each row's tokens with the ``count`` largest logits, largest first, ties by rising id; empty for an unusable row.

    Each comes with its probability by the row's softmax. ``wanted``: consecutive rows; None: all. The logits of
    ``barred`` tokens are first set to -inf. None if the library is not available or can't read the rows.
    """
    core = _reader(logits_RV)
    if core is None:
        return None
    rows, size = logits_RV.shape
    at, rows = (0, rows) if wanted is None else (4 * size * wanted[0], len(wanted))
    ids, chances, counts = _int32s(rows * count), (ctypes.c_float * (rows * count))(), _int32s(rows)
    bars = (ctypes.c_int32 * len(barred))(*barred)
    core.leading(logits_RV.data_ptr() + at, rows, size, bars, len(barred), count, ids, chances, counts, threads.count())
    found = list(zip(ids, chances, strict=True))
    return [found[row * count : row * count + each] for row, each in enumerate(counts)]


def likeliest_in_one_pass(logits_RV: Tensor) -> list[int] | None:
    """The token of each row's largest logit; of equal ones the lowest id.

    None if a row is unusable, or the library is not available or can't read the rows.
    """
    core = _reader(logits_RV)
    if core is None:
        return None
    rows, size = logits_RV.shape
    ids, counts = _int32s(rows), _int32s(rows)
    core.leading(logits_RV.data_ptr(), rows, size, None, 0, 1, ids, None, counts, threads.count())
    return list(ids) if all(counts) else None


def _int32s(count: int) -> ctypes.Array[ctypes.c_int32]:
    """An array of ``count`` int32."""
    return (ctypes.c_int32 * count)()


def is_read_in_one_pass(logits: Tensor) -> bool:
    """Whether the library reads such ``logits`` ``[..., V]``, so that sampling rows together gains nothing."""
    return _reader(logits) is not None


def _reader(logits: Tensor) -> structs.Core | None:
    """The library, if it is available and reads such ``logits`` ``[..., V]``."""
    is_plain = logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()
    return noise.compiled() if is_plain else None
