"""`parlay train defer`: trains Co-LLM's deferral head by marginal likelihood (Shen et al. 2024, arXiv:2403.03870).

The head reads the base model's final hidden state h and gives s = sigmoid(w . h + b), the probability that the
assistant writes the next token x. It minimises -log[(1 - s) p_base(x) + s p_assistant(x)] over texts, so no labels are
needed of which model should write what. Neither model is trained; in the paper the base model is trained too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from parlay import models
from parlay.heads.artefact import Origin
from parlay.heads.deferral import save_deferral, witnesses
from parlay.llm.ensemble import check_vocabulary
from parlay.models.ensembles.combining import Deferral
from parlay.models.fetch.origin import licence, public_name, weights_sha256
from parlay.models.fetch.resolving import resolve, resolve_tokenizer
from parlay.models.loading import load_tokenizer, read_config
from parlay.options import LoadOptions, Options, option
from parlay.system import threads
from parlay.train.data.user_texts import Cut, TrainingText, encode_answers, read_user_texts
from parlay.train.saving import make_folder
from parlay.train.watching import counted
from parlay.types import ParlayError, Runner, Segment, Tokenizer

_CHUNK, _LOGIT_ROWS = 512, 128
"""Rows of one forward without logits, and of one with logits, which take much memory if the vocabulary is large."""
_PARTS = 10
"""Texts are divided into this many parts: one chooses the threshold, one measures it, the others train the head."""
_LEAST_TEXTS = 6
_ROUNDS, _DECAY = 40, 1e-3
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferTrainOptions(Options):
    """Options of `parlay train defer`: the two models, and the texts that the head is trained on."""

    model: str = option(
        "smollm2-135m", "the base model, by name, folder or GGUF file; the head reads its hidden states"
    )
    assistant: str = option(help="the model to which it defers, with the same tokenizer")
    texts: Path = option(
        help='texts to learn from: a folder of text files (.txt, .md, ...), or JSON lines {"prompt": TEXT, "answer": '
        "TEXT} in a file or folder, whose answers are learned"
    )
    out: Path = option(Path("deferral"), "folder of the finished head")
    share: float | None = option(
        None,
        "share of tokens that the assistant should write; sets the threshold (default: the threshold at which held-out "
        "texts are likeliest)",
        low=0,
        high=1,
    )
    document_tokens: int = option(20_000, "how many tokens of text files to read at most, spread over all files", low=8)
    most: int = option(500, "how many texts to read at most; each takes a forward of both models", low=_LEAST_TEXTS)
    longest: int = option(640, "longest text in tokens; of longer ones only the end is used", low=8)
    skip_broken: bool = option(False, "skip broken lines of these files")
    threads: int | None = option(None, "number of threads (default: one per usable core)", low=1)
    device: str = option("auto", "where both models run: auto, cpu, cuda or mps")
    domain: str = option("general", "kind of texts it is trained on")
    licence: str = option("", "SPDX name of the head's licence; empty: the base model's licence")


@dataclass(frozen=True, slots=True)
class Rows:
    """Results of both models on N tokens of texts.

    ``states_NH``, float32, are the base model's final hidden states that predict each token. Columns 0 and 1 of
    ``logprobs_N2`` and ``right_N2`` are the base model and the assistant: the token's log-probability, and whether the
    token is the model's likeliest.
    """

    states_NH: Tensor
    logprobs_N2: Tensor
    right_N2: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Join the rows of several texts."""
        return cls(
            torch.cat([part.states_NH for part in parts]),
            torch.cat([part.logprobs_N2 for part in parts]),
            torch.cat([part.right_N2 for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Quality:
    """How well base model and assistant predict a text together, if the assistant writes a ``share`` of its tokens.

    ``nats`` is the mean negative log-probability per token, and ``right`` the share of tokens that are the writing
    model's likeliest.
    """

    share: float
    nats: float
    right: float

    @classmethod
    def of(cls, rows: Rows, deferred_N: Tensor) -> Quality:
        """Measure rows if the assistant writes the tokens for which ``deferred_N``, bool, is true."""
        choice_N1 = deferred_N.long()[:, None]
        nats, right = -rows.logprobs_N2.gather(1, choice_N1).mean(), rows.right_N2.gather(1, choice_N1).double().mean()
        return cls(float(deferred_N.double().mean()), float(nats), float(right))

    def __str__(self) -> str:
        return f"{self.nats:.3f} nats, {100 * self.right:.1f} % right"


def train(options: DeferTrainOptions) -> str:
    """Read the texts with both models, train the head, choose its threshold, and save it; return the result in one
    line."""
    threads.settle(options.threads)
    make_folder(options.out)
    check_vocabulary(options.model, options.assistant)
    config = read_config(resolve(options.model))
    texts = _texts(options, load_tokenizer(resolve_tokenizer(options.model)))
    base, assistant = (
        models.load(each, LoadOptions(device=options.device)) for each in (options.model, options.assistant)
    )
    texts = known_to_both(texts, min(base.spec.vocab_size, assistant.spec.vocab_size))
    read = []
    with counted("texts", len(texts)) as done:
        for number, text in enumerate(texts):
            read.append(rows_of((base, assistant), text))
            done(number)
    parts = parts_of(texts)
    chosen, measured, learned = (
        Rows.joined([rows for rows, part in zip(read, parts, strict=True) if part in which])
        for which in ((0,), (_PARTS // 2,), {*range(_PARTS)} - {0, _PARTS // 2})
    )
    weight_H, bias = fit(learned, chosen)
    head = Deferral(weight_H, bias, threshold_of(deferring(chosen, weight_H, bias), chosen.logprobs_N2, options.share))
    name, licence_name = public_name(options.model), options.licence or licence(options.model)
    origin = Origin(name, weights_sha256(options.model), options.domain, licence_name)
    deferring_N = deferring(measured, weight_H, bias)
    thresholds = [threshold_of(deferring_N, measured.logprobs_N2, share) for share in _SHARES]
    own, *table = [Quality.of(measured, deferring_N > each) for each in (head.threshold, *thresholds)]
    save_deferral(
        options.out,
        head,
        (config, origin, witnesses(options.model, base.spec.vocab_size)),
        (public_name(options.assistant), witnesses(options.assistant, assistant.spec.vocab_size)),
        _card(options, origin, head, learned, table),
    )
    return (
        f"{options.out}: threshold {head.threshold:.4f}, at which the assistant writes {100 * own.share:.0f} % of "
        f"{len(deferring_N):,} tokens set aside: {own}; base alone {table[0]}; half of them deferred {table[2]}; "
        f"assistant alone {table[-1]}"
    )


def known_to_both(texts: Sequence[TrainingText], tokens: int) -> list[TrainingText]:
    """Return the texts all of whose ids are below ``tokens``, the size of the smaller vocabulary.

    Raises ParlayError if fewer than `_LEAST_TEXTS` remain.
    """
    known = [text for text in texts if max(text.ids) < tokens]
    if len(known) < _LEAST_TEXTS:
        raise ParlayError(
            f"{len(texts) - len(known)} of {len(texts)} texts have tokens that one of the models lacks: give others"
        )
    return known


def parts_of(texts: Sequence[TrainingText]) -> list[int]:
    """Return the part of each text, from 0 to `_PARTS` - 1.

    All texts of a document are in one part, so that no document is both trained on and measured. If there are too few
    documents, each part is a run of neighbouring texts, so that at most the texts at its ends share a document with
    another part.
    """
    documents = {number: place for place, number in enumerate(dict.fromkeys(text.document for text in texts))}
    if len(documents) >= _LEAST_TEXTS:
        return [documents[text.document] % _PARTS for text in texts]
    return [place * _PARTS // len(texts) for place in range(len(texts))]


def rows_of(pair: tuple[Runner, Runner], text: TrainingText) -> Rows:
    """Run base model and assistant on one text, and return the rows of its answer."""
    size = min(runner.spec.vocab_size for runner in pair)
    targets_N1 = torch.tensor(text.ids[text.answer :])[:, None]
    states: list[Tensor] = []
    logprobs: list[list[Tensor]] = [[], []]
    right: list[list[Tensor]] = [[], []]
    for place, runner in enumerate(pair):
        row = 0
        layers = (runner.spec.num_layers,) if place == 0 else ()
        for logits_RV, states_RH in _read(runner, text, layers):
            wanted_R1 = targets_N1[row : row + len(logits_RV)]
            logits_RV = logits_RV[:, :size].float().cpu()
            logprobs[place].append(logits_RV.log_softmax(-1).gather(1, wanted_R1)[:, 0].double())
            right[place].append(logits_RV.argmax(-1) == wanted_R1[:, 0])
            states += [] if states_RH is None else [states_RH.float().cpu()]
            row += len(logits_RV)
    return Rows(
        torch.cat(states),
        torch.stack([torch.cat(each) for each in logprobs], 1),
        torch.stack([torch.cat(each) for each in right], 1),
    )


def fit(rows: Rows, chosen: Rows) -> tuple[Tensor, float]:
    """Train the head on ``rows``; return the weight ``[H]``, float64, and the bias that are best on ``chosen``.

    As in the paper, the head is first trained as a classifier of tokens that the assistant predicts and the base model
    does not; this initializes training by `marginal`. Weight and bias are rounded to bfloat16, as they will be saved.
    """
    mean_H, scale_H = rows.states_NH.mean(0), rows.states_NH.std(0).clamp(min=1e-6)
    normed_NH = (rows.states_NH - mean_H) / scale_H
    weight_H, bias = torch.zeros(normed_NH.shape[1], requires_grad=True), torch.zeros(1, requires_grad=True)
    wanted_N = (rows.right_N2[:, 1] & ~rows.right_N2[:, 0]).float()
    rarity = (len(wanted_N) - wanted_N.sum()) / wanted_N.sum().clamp(min=1)
    losses: tuple[tuple[Callable[[Tensor], Tensor], int], ...] = (
        (lambda score_N: F.binary_cross_entropy_with_logits(score_N, wanted_N, pos_weight=rarity), 1),
        (lambda score_N: -marginal(score_N, rows.logprobs_N2.float()).mean(), _ROUNDS),
    )
    best, found = -math.inf, (torch.zeros(len(scale_H), dtype=torch.float64), 0.0)
    for loss, rounds in losses:
        optimizer = torch.optim.LBFGS([weight_H, bias], max_iter=5, line_search_fn="strong_wolfe")

        def closure(loss: Callable[[Tensor], Tensor] = loss, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = loss(normed_NH @ weight_H + bias) + _DECAY * weight_H.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        for _ in range(rounds):
            optimizer.step(closure)  # type: ignore[no-untyped-call]
            raw_H = (weight_H.detach() / scale_H).to(torch.bfloat16).double()
            shift = float((bias.detach() - (weight_H.detach() / scale_H) @ mean_H).to(torch.bfloat16))
            reached = float(marginal(chosen.states_NH.double() @ raw_H + shift, chosen.logprobs_N2).mean())
            if reached > best:
                best, found = reached, (raw_H, shift)
    return found


def marginal(score_N: Tensor, logprobs_N2: Tensor) -> Tensor:
    """Return log[(1 - s) p_base(x) + s p_assistant(x)], ``[N]``, for s = sigmoid(score)."""
    return torch.logaddexp(F.logsigmoid(-score_N) + logprobs_N2[:, 0], F.logsigmoid(score_N) + logprobs_N2[:, 1])


def deferring(rows: Rows, weight_H: Tensor, bias: float) -> Tensor:
    """Return the head's probabilities ``[N]`` that the assistant writes each token, float64."""
    return torch.sigmoid(rows.states_NH.double() @ weight_H + bias)


def threshold_of(deferring_N: Tensor, logprobs_N2: Tensor, share: float | None) -> float:
    """Choose the threshold above which the assistant writes a token.

    With ``share``, about this share of ``deferring_N`` lies above it: equal probabilities stay together, so the share
    may be met only roughly. With None, it is the threshold under which the tokens are likeliest.
    """
    order_N = deferring_N.argsort(descending=True)
    sorted_N = deferring_N[order_N]
    below_C = torch.cat([sorted_N, sorted_N.new_zeros(1)])  # the next probability, if so many are above
    counts_C = torch.cat([sorted_N.new_full((1,), math.inf), sorted_N]).gt(below_C).nonzero()[:, 0]
    if share is None:
        gains_N = (logprobs_N2[:, 1] - logprobs_N2[:, 0])[order_N].cumsum(0)
        best = int(torch.cat([torch.zeros(1, dtype=gains_N.dtype), gains_N])[counts_C].argmax())
    else:
        best = int((counts_C - share * len(sorted_N)).abs().argmin())
    return float(below_C[counts_C[best]]) if counts_C[best] else 1.0


def _texts(options: DeferTrainOptions, tokenizer: Tokenizer) -> list[TrainingText]:
    """Read and tokenise the texts, at most ``options.most``, evenly chosen. Raises ParlayError if there are too few."""
    cut = Cut(options.longest // 2, options.longest, options.longest, options.document_tokens)
    found = encode_answers(read_user_texts(options.texts, skip_broken=options.skip_broken), tokenizer, cut)
    end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    texts = [replace(text, ids=(*text.ids, *end)) if text.answer > 1 else text for text in found]
    texts = [text for text in texts if len(text.ids) > text.answer]
    if len(texts) < _LEAST_TEXTS:
        raise ParlayError(f"{len(texts)} texts in {options.texts} are too few: give {_LEAST_TEXTS} or more")
    return (
        [texts[place * len(texts) // options.most] for place in range(options.most)]
        if len(texts) > options.most
        else texts
    )


def _read(runner: Runner, text: TrainingText, layers: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield logits ``[R, V]`` and, for one tapped layer, states ``[R, H]`` of the rows that predict the answer.

    Rows come in batches of at most `_LOGIT_ROWS`.
    """
    first, ids = text.answer - 1, text.ids[:-1]
    runner.open(0, (), salt="defer")
    try:
        if not runner.reserve(0, len(ids)):
            raise ParlayError(f"the cache of {runner.spec.name} has no room for one text")
        starts = [*range(0, first, _CHUNK), *range(first, len(ids), _LOGIT_ROWS)]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            wanted = start >= first
            pending = ids[start:end]
            out = runner.forward([Segment(0, pending, logits_from=0 if wanted else len(pending))], layers)
            if wanted:
                yield out.logits_RV, out.taps[layers[0]] if layers else None
            runner.keep(0, ())
    finally:
        runner.truncate(0, 0)
        runner.release(0)


def _card(options: DeferTrainOptions, origin: Origin, head: Deferral, rows: Rows, table: Sequence[Quality]) -> str:
    """Return the text of the folder's README."""
    lines = "\n".join(f"| {100 * each.share:.0f} % | {each.nats:.3f} | {100 * each.right:.1f} % |" for each in table)
    assistant = public_name(options.assistant)
    return (
        f"# Deferral head for {origin.target} and {assistant}\n\n"
        f"- Base model: {origin.target}. Assistant: {assistant}. The text of both depends on this head.\n"
        f"- Licence: {origin.licence or 'not known: that of the base model holds for this too'}.\n"
        f"- Learned from {len(rows.right_N2):,} tokens of {options.texts.name} ({origin.domain}), by marginal "
        "likelihood; neither model learned.\n"
        f"- Threshold: {head.threshold:.4f}.\n\n"
        "On texts that this training set aside, where the assistant writes a share of the tokens:\n\n"
        "| share | nats per token | tokens that are the likeliest |\n|---|---|---|\n"
        f"{lines}\n"
    )
