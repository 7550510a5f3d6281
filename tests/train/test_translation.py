"""Translators: losses against enumeration, and texts of the engine against the forward that they were trained with."""

from __future__ import annotations

import cmath
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from parlay import LLM, RequestFailed, SamplingParams, StructuredOutputsParams
from parlay.cli import main
from parlay.cli.train import RECIPES
from parlay.engine.answers import copied, fertilities
from parlay.models.opening import load
from parlay.options import LoadOptions, UsageError
from parlay.sampling.answer_selectors import GreedyPath, Lookahead, Viterbi, jumps, links, ways_on
from parlay.system.progress import Ticker
from parlay.train import heads
from parlay.train.data.user_texts import load_shard, shards
from parlay.train.options import BlockTrainOptions
from parlay.train.translation import distilling, training
from parlay.train.translation.align import Cells, aligned, learned, posteriors
from parlay.train.translation.losses import ctc_loss, dag_alignment, dag_loss
from parlay.train.translation.objectives import Ahead, annealed, glance, spread
from parlay.train.translation.options import FramesTrainOptions
from parlay.train.translation.pairs import Pair, divided, read_pairs, words_of
from parlay.train.translation.rows import Laid, Network, Packing, Rows
from parlay.types import ParlayError, Segment, trees
from parlay.types.model_forms import link_size

GREEDY = SamplingParams(temperature=0, max_tokens=200)
TOY = {"shape": "tiny", "vocab_size": 512, "batch_tokens": 192, "updates": 2, "threads": 1, "compile": False}
TEXTS = ["ab cd", "cd ab ef gh", "x"]

# ------------------------------------------------------------------------------------------------- losses and paths


def collapse(frames: Sequence[int], blank: int) -> tuple[int, ...]:
    return tuple(token for token, _ in itertools.groupby(frames) if token != blank)


@pytest.mark.parametrize("target", [(1,), (1, 2), (1, 1), (2, 1, 2)])
def test_the_ctc_loss_is_that_of_all_alignments(target: tuple[int, ...]) -> None:
    logits = torch.randn(1, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    scores = logits[0].log_softmax(-1)
    every = [frames for frames in itertools.product(range(3), repeat=4) if collapse(frames, 0) == target]
    paths = torch.stack([torch.stack([scores[at, token] for at, token in enumerate(frames)]).sum() for frames in every])

    def loss(logits_BCV: Tensor) -> Tensor:
        lengths = torch.tensor([len(target)])
        return ctc_loss(logits_BCV, torch.tensor([4]), torch.tensor([target]), lengths, 0)

    assert loss(logits).item() == pytest.approx(-paths.logsumexp(0).item())
    assert torch.autograd.gradcheck(loss, (logits,))


def graph(vertices: int, tokens: int, distances: int = 9) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens ``[1, C, T]``, and scores of distances ``[1, C, J]``."""
    draw = torch.Generator().manual_seed(vertices * 10 + tokens)
    emitted = torch.randn(1, vertices, tokens, dtype=torch.float64, generator=draw)
    return emitted, torch.randn(1, vertices, distances, dtype=torch.float64, generator=draw)


def every_path(vertices: int, tokens: int) -> list[tuple[int, ...]]:
    if tokens == 1:
        return [(0,)] if vertices == 1 else []
    return [(0, *between, vertices - 1) for between in itertools.combinations(range(1, vertices - 1), tokens - 2)]


def score(path: Sequence[int], emitted: Tensor, going: Tensor) -> Tensor:
    each = [emitted[0, vertex, at] for at, vertex in enumerate(path)]
    return torch.stack(each + [going[0, one, other] for one, other in itertools.pairwise(path)]).sum()


@pytest.mark.parametrize(("vertices", "tokens"), [(1, 1), (3, 2), (5, 3), (7, 4), (4, 4)])
def test_the_graph_s_loss_and_alignment_are_those_of_all_paths(vertices: int, tokens: int) -> None:
    emitted, scores = graph(vertices, tokens)
    scores.requires_grad_()
    emitted.requires_grad_()
    count, length = torch.tensor([vertices]), torch.tensor([tokens])
    going = jumps(scores, count)
    paths = every_path(vertices, tokens)
    likelihoods = torch.stack([score(path, emitted, going) for path in paths])
    assert dag_loss(emitted, going, count, length).item() == pytest.approx(-likelihoods.logsumexp(0).item())
    assert dag_loss(emitted, going, count, length, best=True).item() == pytest.approx(-likelihoods.max().item())
    assert tuple(dag_alignment(emitted, going, count, length)[0].tolist()) == paths[int(likelihoods.argmax())]
    assert torch.autograd.gradcheck(lambda e, s: dag_loss(e, jumps(s, count), count, length), (emitted, scores))


def test_ways_on_add_up_to_one_and_padding_changes_no_loss() -> None:
    emitted, scores = graph(5, 3)
    count, length = torch.tensor([5]), torch.tensor([3])
    going = jumps(scores, count)
    assert torch.allclose(going[0, :4].exp().sum(-1), torch.ones(4, dtype=torch.float64))
    assert going[0, 4].max() == -torch.inf
    wider = torch.cat((scores, torch.ones(1, 2, scores.shape[2])), 1)
    longer = torch.cat((emitted, torch.zeros(1, 5, 1)), 2)
    padded = torch.cat((longer, torch.zeros(1, 2, 4)), 1)
    loss = dag_loss(padded, jumps(wider, count), count, length)
    assert loss.item() == pytest.approx(dag_loss(emitted, going, count, length).item())


def test_an_answer_of_more_tokens_than_vertices_has_no_path() -> None:
    emitted, scores = graph(2, 3)
    count = torch.tensor([2])
    assert dag_loss(emitted, jumps(scores, count), count, torch.tensor([3])).item() == torch.inf


@pytest.mark.parametrize("heads", [1, 3])
def test_links_are_the_mixture_of_each_head_s_attention(heads: int) -> None:
    draw, numbers = torch.Generator().manual_seed(heads), 18
    numbers_BCJ = torch.randn(2, 6, numbers, dtype=torch.float64, generator=draw)
    counts, size = torch.tensor([6, 4]), link_size(numbers, heads)
    found = links(numbers_BCJ, counts, heads).exp()

    def turned(vector: Tensor, place: int) -> list[complex]:
        half = size // 2
        return [
            complex(float(vector[at]), float(vector[half + at])) * cmath.exp(1j * place * 100.0 ** -(at / half))
            for at in range(half)
        ]

    for row, count in enumerate(counts.tolist()):
        for vertex in range(6):
            later, expected = range(vertex + 1, count), [0.0] * 6
            gates = numbers_BCJ[row, vertex, :heads].softmax(0)
            for head in range(heads):
                first = heads + head * size
                query = turned(numbers_BCJ[row, vertex, first : first + size], vertex)
                first += heads * size
                keys = [turned(numbers_BCJ[row, to, first : first + size], to) for to in later]
                products = [sum((q * k.conjugate()).real for q, k in zip(query, key, strict=True)) for key in keys]
                for to, chance in zip(later, (torch.tensor(products) / size**0.5).softmax(0).tolist(), strict=True):
                    expected[to] += float(gates[head]) * chance
            assert found[row, vertex].tolist() == pytest.approx(expected, abs=1e-5)
    emitted, lengths = torch.randn(2, 6, 3, dtype=torch.float64, generator=draw), torch.tensor([3, 3])
    asked = numbers_BCJ.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda each: dag_loss(emitted, ways_on(each, counts, heads), counts, lengths), asked
    )


def test_fertilities_are_the_likeliest_and_those_with_one_change() -> None:
    scores = torch.tensor([[0.0, 3.0, 2.5], [4.0, 1.0, 0.0]])
    assert fertilities(scores, 4) == [[1, 0], [2, 0], [1, 1], [0, 0]]
    assert copied((7, 8), (2, 1), 9) == (7, 7, 8)
    assert (copied((7, 8), (2, 1), 2), copied((7, 8), (0, 0), 9)) == ((7, 7), (7,))


def test_alignments_are_weighed_as_enumeration_weighs_them() -> None:
    pairs = [Pair((5, 6), (1, 2, 2)), Pair((6,), (2,)), Pair((5, 7, 5), (1, 3))]
    cells = Cells.of(pairs)
    chances = torch.rand(len(cells.ids_W), generator=torch.Generator().manual_seed(0))
    found = posteriors(cells, chances).tolist()
    expected, counts, first = list[float](), [0.0] * len(chances), 0
    for pair in pairs:
        sources, targets = len(pair.source), len(pair.target)
        weight = (chances[cells.word_K] * cells.near_K)[first : first + sources * targets].view(targets, sources)
        every = list(itertools.product(range(sources), repeat=targets))
        likelihoods = torch.stack([torch.stack([weight[to, at] for to, at in enumerate(one)]).prod() for one in every])
        shares = (likelihoods / likelihoods.sum()).tolist()
        for to in range(targets):
            expected += [
                sum(share for share, one in zip(shares, every, strict=True) if one[to] == at) for at in range(sources)
            ]
        first += sources * targets
    assert found == pytest.approx(expected, rel=1e-4)
    for word, share in zip(cells.word_K.tolist(), expected, strict=True):
        counts[word] += share
    sums = [sum(c for c, other in zip(counts, cells.ids_W, strict=True) if other == own) for own in cells.ids_W]
    assert learned(cells, chances).tolist() == pytest.approx(
        [c / s for c, s in zip(counts, sums, strict=True)], rel=1e-4
    )


def test_each_token_of_a_translation_counts_for_the_source_token_it_stands_for() -> None:
    pairs = [Pair((at, at + 1, at + 2), (20 + at, 20 + at, 21 + at, 22 + at)) for at in range(8)]
    assert {pair.fertilities for pair in aligned(pairs)} == {(2, 1, 1)}
    assert aligned([]) == []


def test_path_selectors_find_what_enumeration_finds() -> None:
    _, scores = graph(6, 1)
    going = jumps(scores, torch.tensor([6]))[0]
    tokens = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    paths = [path for length in range(2, 7) for path in every_path(6, length)]

    def mean(path: Sequence[int], penalty: float) -> float:
        total = tokens[list(path)].sum() + sum(going[one, other] for one, other in itertools.pairwise(path))
        return float(total) / len(path) ** penalty

    for penalty in (0.0, 0.5, 1.0):
        assert tuple(Viterbi(penalty).path(going, tokens)) == max(paths, key=lambda path: mean(path, penalty))
    for selector, weight in ((GreedyPath(), 0.0), (Lookahead(), 1.0), (Lookahead(0.5), 0.5)):
        path = selector.path(going, tokens)
        for one, other in itertools.pairwise(path):
            assert other == max(range(one + 1, 6), key=lambda at: float(going[one, at] + weight * tokens[at]))
        assert (path[0], path[-1]) == (0, 5)


def test_glancing_shows_as_many_tokens_as_are_wrong_times_the_ratio() -> None:
    wrong = torch.tensor([[True] * 6 + [False] * 2, [True] * 2 + [False] * 6])
    inside = torch.tensor([[True] * 8, [True] * 4 + [False] * 4])
    shown = glance(wrong, inside, 0.5, torch.Generator().manual_seed(0))
    assert shown.sum(1).tolist() == [3, 1]
    assert not (shown & ~inside).any()
    assert (annealed(0.5, 0.0), annealed(0.5, 1.0), annealed(0.05, 1.0)) == (0.5, pytest.approx(0.1), 0.05)


def test_a_source_is_spread_evenly() -> None:
    assert spread((7, 8, 9), 6) == (7, 7, 8, 8, 9, 9)
    assert spread((7, 8, 9), 2) == (7, 8)


# --------------------------------------------------------------------------------------- texts of trained checkpoints


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    words = ["ab", "cd", "ef", "gh", "x"]
    chosen = [" ".join(words[number // 5**digit % 5] for digit in range(1 + number % 4)) for number in range(400)]
    file.write_text("".join(f"{text} {at}\t{text.upper()} {at}\tnote\n" for at, text in enumerate(chosen)))
    return file


@pytest.fixture(scope="module")
def teacher(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("translator", data, tmp_path_factory.mktemp("translator"), updates=40)


def trained(kind: str, data: Path, folder: Path, **fields: object) -> Path:
    more = {"nat-spread": {"fertilities": False}, "da-distances": {"heads": 0}}.get(kind, {})
    recipe = kind.partition("-")[0]
    options = RECIPES[recipe].options_class()(data=data, out=folder / kind, **{**TOY, **more, **fields})
    return training.train(recipe, options)


@pytest.fixture(scope="module", params=["cmlm", "nat", "nat-spread", "glat", "ctc", "da", "da-distances"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, data: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(kind, data, tmp_path_factory.mktemp(kind), init=teacher)


class Reference:
    """The forward of training, row by row of a padded mask, without cache."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.canvas = json.loads((folder / "config.json").read_text())["canvas"]
        self.mask, self.first, self.end = self.canvas["mask_token_id"], self.canvas["first_number_id"], 0

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], canvas: Sequence[int]) -> Tensor:
        rows = Rows.of([Laid(prompt, canvas, (), len(prompt))])
        logits: Tensor = self.model.lm_head(Network(self.model).hidden(rows)[rows.canvas_BC])[0].double()
        return logits

    def inputs(self, prompt: Sequence[int], count: int) -> list[tuple[int, ...]]:
        """What the places of the likeliest answers read."""
        source = tuple(prompt[:-1])
        if self.canvas["ends"] == "fertilities":
            scores = self.logits(prompt, source)[:, self.first : self.first + 128]
            return [copied(source, each, 127) for each in fertilities(scores, count)]
        sizes = self.lengths(prompt, count)
        return [spread(source, size) if self.canvas.get("copies") else (self.mask,) * size for size in sizes]

    @torch.no_grad()
    def lengths(self, prompt: Sequence[int], count: int) -> list[int]:
        logits = self.model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0, -1]
        best = logits[self.first + 1 : self.first + 128].topk(count).indices + 1
        return [int(each) for each in best]

    def tokens(self, logits: Tensor) -> Tensor:
        """Log-probabilities of tokens that can be written."""
        logits = logits.clone()
        logits[:, self.mask] = -torch.inf
        logits[:, self.first : self.first + 128] = -torch.inf
        return logits.log_softmax(-1)

    def read(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return (*itertools.takewhile(lambda token: token != self.end, tokens), self.end)

    def filled(self, prompt: Sequence[int], inputs: Sequence[int], steps: int) -> tuple[tuple[int, ...], float]:
        """Mask-Predict (arXiv:1904.09324), section 3: its text, and the mean log-probability."""
        size, steps = len(inputs), min(steps, len(inputs))
        tokens, scores = list(inputs), [0.0] * size
        masked = set(range(size))
        for step in range(1, steps + 1):
            best = self.tokens(self.logits(prompt, tokens)).max(-1)
            for at in masked:
                tokens[at], scores[at] = int(best.indices[at]), float(best.values[at])
            again = sorted(range(size), key=lambda at: (scores[at], -at))[: size * (steps - step) // steps]
            masked = set(again)
            for at in masked:
                tokens[at] = inputs[at]
        return self.read(tokens), sum(scores) / size

    def likeliest(self, prompt: Sequence[int], steps: int, lengths: int) -> set[tuple[int, ...]]:
        """The text of the length with the highest mean log-probability, and those that rounding may put before it."""
        found = [self.filled(prompt, inputs, steps) for inputs in self.inputs(prompt, lengths)]
        best = max(mean for _, mean in found)
        return {text for text, mean in found if mean >= best - 1e-5}

    def write(self, prompt: Sequence[int], steps: int) -> tuple[int, ...]:
        ends, source = self.canvas["ends"], tuple(prompt[:-1])
        if ends in ("length", "fertilities"):
            return self.filled(prompt, self.inputs(prompt, 1)[0], steps)[0]
        places = self.canvas["scale"] * len(source)
        inputs = spread(source, places) if self.canvas.get("copies") else (self.mask,) * places
        logits = self.logits(prompt, inputs)
        best = self.tokens(logits).max(-1)
        if ends == "frames":
            return self.read(collapse(best.indices.tolist(), self.canvas["blank_token_id"]))
        numbers = logits[None, :, self.first : self.first + 128]
        going = ways_on(numbers, torch.tensor([places]), self.canvas["heads"])[0]
        return self.read([int(best.indices[at]) for at in Lookahead().path(going, best.values)])


AUTO = {"cmlm": 4, "glat": 4}
"""Steps of mask-predict that `auto` takes; of others 1."""


def test_the_engine_writes_what_the_forward_of_training_says(kind: str, folder: Path) -> None:
    llm, slow = LLM(str(folder), dtype="float32"), Reference(folder)
    outputs = llm.generate(TEXTS, GREEDY)
    alone = [llm.generate([text], GREEDY)[0].outputs[0].token_ids for text in TEXTS]
    for output, single in zip(outputs, alone, strict=True):
        assert output.outputs[0].token_ids == slow.write(output.prompt_token_ids, AUTO.get(kind, 1)) == single
        assert output.outputs[0].finish_reason == "stop"
    if kind.startswith(("ctc", "da")):
        assert {output.outputs[0].metrics.steps for output in outputs} == {1}
        return
    for steps, lengths in ((1, 1), (3, 1), (2, 3)):
        strategy = f"denoise:selector=mask-predict,steps={steps},lengths={lengths}"
        for output in llm.generate(TEXTS, GREEDY, strategy=strategy):
            assert output.outputs[0].token_ids in slow.likeliest(output.prompt_token_ids, steps, lengths)
            sizes = [len(inputs) for inputs in slow.inputs(output.prompt_token_ids, lengths)]
            assert output.outputs[0].metrics.steps == 1 + sum(min(steps, size) for size in sizes)


def test_neighbours_in_a_row_change_no_other(folder: Path) -> None:
    network, laid = (
        Network(Reference(folder).model),
        [Laid((5, 6, 7), (1, 2), (), 3), Laid((8, 9), (3, 4, 5), (), 2, (6, 7))],
    )
    with torch.no_grad():
        both = network.hidden(Rows.of(laid, length=16, count=2))
        apart = Laid((8, 9), (6, 7), (), 2)
        for each, first in ((laid[0], 0), (laid[1], 5)):
            alone = network.hidden(Rows.of([each]))
            assert torch.allclose(both[first : first + each.size], alone, atol=1e-5)
        assert torch.allclose(both[7:9], network.hidden(Rows.of([apart]))[2:], atol=1e-5)
    with pytest.raises(ValueError, match="2 texts don't fit into 1 rows of 6 places"):
        Rows.of(laid, length=6, count=1)


def test_texts_fill_rows_one_after_another() -> None:
    packing = Packing(10, 2)
    assert [packing.place(size) for size in (6, 6, 3, 5, 4, 1, 11)] == [0, 10, 6, None, 16, 9, None]


def test_an_answer_streams_at_its_end_samples_and_is_cut(kind: str, folder: Path) -> None:
    llm = LLM(str(folder))
    whole = llm.generate([TEXTS[1]], GREEDY)[0].outputs[0]
    pieces = [event.token_ids for event in llm.stream(TEXTS[1], GREEDY) if event.token_ids]
    assert pieces == [whole.token_ids]
    drawn = SamplingParams(temperature=1, seed=2, n=2, logprobs=1, max_tokens=200)
    first, again = (llm.generate([TEXTS[1]], drawn)[0].outputs for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in again]
    assert all(len(each.logprobs or ()) == len(each.token_ids) for each in first)
    cut = llm.generate([TEXTS[1]], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0].outputs[0]
    assert cut.token_ids == whole.token_ids[:1]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [("none", "choose denoise"), ("denoise:block=2", "remove block|its selector reads places")],
)
def test_what_a_canvas_of_a_whole_answer_can_t_do_is_refused(folder: Path, strategy: str, words: str) -> None:
    with pytest.raises((ValueError, RequestFailed), match=words) as caught:
        LLM(str(folder)).generate([TEXTS[0]], GREEDY, strategy=strategy)
    assert "\n" not in str(caught.value)


def test_forms_and_sources_that_are_too_long_are_refused(folder: Path, kind: str) -> None:
    llm = LLM(str(folder))
    form = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
    with pytest.raises(ValueError, match="structured output is not supported"):
        llm.generate([TEXTS[0]], form)
    if kind.startswith(("ctc", "da")):
        with pytest.raises(ValueError, match=r"the source has 199 tokens, for which .* fills \d+ places, but .* leave"):
            llm.generate([[5] * 200], GREEDY)
        other, own = ("lookahead-path", "ctc") if kind == "ctc" else ("ctc", "lookahead-path")
        with pytest.raises(ValueError, match=f"is read as .*: choose selector={own}"):
            llm.generate([TEXTS[0]], GREEDY, strategy=f"denoise:selector={other}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask_token_id": None}, "has no mask_token_id"),
        ({"mask_token_id": 9999}, "mask_token_id 9999 is not in the vocabulary"),
        ({"numbers": 9999}, "numbers 9999 and scale 1 do not fit"),
        ({"ends": "tree"}, "no canvas that ends by length, fertilities, frames or graph"),
        ({"heads": 64}, "128 numbers are too few for 64 heads"),
    ],
    ids=["no mask", "mask outside", "numbers outside", "unknown end", "many heads"],
)
def test_a_config_that_makes_no_sense_is_refused(
    data: Path, teacher: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    folder = trained("cmlm", data, tmp_path, init=teacher, updates=1)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "canvas": {**said["canvas"], **change}}))
    with pytest.raises(Exception, match=words):
        LLM(str(folder))


# -------------------------------------------------------------------------------------- generalised aggressive decoding


@pytest.fixture(scope="module")
def drafter(data: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("cmlm", data, tmp_path_factory.mktemp("drafter"), init=teacher, updates=40, drafts=1.0, block=6)


def test_a_translator_that_fills_masks_drafts_and_the_other_verifies(teacher: Path, drafter: Path) -> None:
    llm, strategy = LLM(str(teacher)), f"canvas-draft:model={drafter},width=1,min_p=0,policy=fixed,k=6"
    for params in (
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.8, seed=4, max_tokens=24),
    ):
        plain = llm.generate(TEXTS, params, strategy="none")
        drafted = llm.generate(TEXTS, params, strategy=strategy)
        assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
        if params.greedy:
            assert sum(each.outputs[0].metrics.accepted_tokens for each in drafted) > 0
    lossy = llm.generate(TEXTS, GREEDY, strategy=f"{strategy},rule=threshold")[0].outputs[0]
    assert lossy.metrics.exactness.name == "LOSSY"


def test_a_translator_that_writes_token_by_token_drafts_for_another_and_for_itself(
    data: Path, teacher: Path, tmp_path: Path
) -> None:
    drafter = trained("gad", data, tmp_path, init=teacher, updates=30, block=6)
    own = "set-block:width=1,policy=fixed,k=6"
    for folder, strategy in (
        (teacher, f"canvas-draft:model={drafter},width=1,min_p=0,policy=fixed,k=6"),
        (drafter, own),
    ):
        llm, params = LLM(str(folder)), SamplingParams(temperature=0, max_tokens=24)
        plain, drafted = (llm.generate(TEXTS, params, strategy=each) for each in ("none", strategy))
        assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
        assert sum(each.outputs[0].metrics.accepted_tokens for each in drafted) > 0


def test_a_head_that_reads_the_verifier_s_states_learns_from_its_answers_to_prompts_as_they_are(
    teacher: Path, tmp_path: Path
) -> None:
    """A translator has no chat template: what its tokenizer puts after a source goes between prompt and answer."""
    (tmp_path / "sources.txt").write_text("\n".join(TEXTS))
    texts_of: dict[str, Any] = {"prompts": tmp_path / "sources.txt", "work": tmp_path / "work", "shards": 1}
    options = BlockTrainOptions(
        **texts_of,
        model=str(teacher),
        out=tmp_path / "head",
        updates=8,
        whole=False,
        length=4,
        answer_tokens=12,
        threads=1,
    )
    heads.train("block-drafter", options)
    llm, params = LLM(str(teacher)), SamplingParams(temperature=0, max_tokens=24)
    plain = llm.generate(TEXTS, params, strategy="none")
    (shard,) = shards(tmp_path / "work")
    texts = load_shard(shard)
    assert len(texts) == 128
    assert {text.ids[: text.answer] for text in texts} == {tuple(each.prompt_token_ids) for each in plain}
    strategy = f"block-drafter:head={tmp_path / 'head'},width=1,min_p=0,policy=fixed,k=4"
    drafted = llm.generate(TEXTS, params, strategy=strategy)
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert sum(each.outputs[0].metrics.accepted_tokens for each in drafted) > 0


def test_blocks_after_beginnings_of_an_answer_are_as_if_each_were_alone(teacher: Path) -> None:
    network = Network(Qwen3ForCausalLM.from_pretrained(teacher, dtype=torch.float32))
    pair, objective = Pair((5, 6), (7, 8, 9)), Ahead(words_of(PreTrainedTokenizerFast.from_pretrained(teacher)), 3)
    laid = objective.lay(pair, torch.Generator().manual_seed(0))
    assert sorted(laid.begins) == [3, 4, 5]
    with torch.no_grad():
        together = network.hidden(Rows.of([laid]))
        for number, begin in enumerate(laid.begins):
            alone = network.hidden(Rows.of([Laid(laid.text[:begin], laid.canvas[:3], (), begin)]))
            first, end = len(laid.text) + 3 * number, 0
            assert torch.allclose(together[:begin], alone[:begin], atol=1e-5)
            assert torch.allclose(together[first : first + 3], alone[begin:], atol=1e-5)
            ahead = laid.labels[4 + 3 * number : 7 + 3 * number]
            assert [label for label in ahead if label >= 0] == [*pair.target[begin - 2 :], end]
    assert tuple(laid.labels[:4]) == (*pair.target, end)


def test_a_translator_whose_places_are_no_tokens_can_t_draft(teacher: Path, folder: Path, kind: str) -> None:
    if kind == "cmlm":
        return
    with pytest.raises(ValueError, match="fills whole answers; choose a model that fills blocks, as one of parlay"):
        LLM(str(teacher)).generate(TEXTS, GREEDY, strategy=f"canvas-draft:model={folder}")


# ------------------------------------------------------------------------------------- deep encoders, shallow decoders


@pytest.fixture(scope="module")
def shallow(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained("translator", data, tmp_path_factory.mktemp("shallow"), shape="tiny-shallow", updates=30)


def test_an_answer_runs_through_the_last_layers_alone(shallow: Path) -> None:
    llm, model = LLM(str(shallow), dtype="float32"), Qwen3ForCausalLM.from_pretrained(shallow, dtype=torch.float32)
    network = Network(model, 1)
    for output in llm.generate(TEXTS, SamplingParams(temperature=0, max_tokens=8)):
        prompt, text = output.prompt_token_ids, list[int]()
        while len(text) < len(output.outputs[0].token_ids):
            rows = Rows.of([Laid((*prompt, *text), (), (), len(prompt))])
            with torch.no_grad():
                text.append(int(network.logits(network.hidden(rows)[-1]).argmax()))
        assert text == list(output.outputs[0].token_ids)


@pytest.mark.parametrize("strategy", ["prompt-lookup:k=3,policy=fixed", "token-recycling:policy=fixed", "none"])
def test_drafts_and_batches_change_no_answer_of_few_layers(shallow: Path, strategy: str) -> None:
    llm = LLM(str(shallow))
    for params in (SamplingParams(temperature=0, max_tokens=16), SamplingParams(temperature=1, seed=3, max_tokens=16)):
        alone = [llm.generate([text], params, strategy="none")[0].outputs[0].token_ids for text in TEXTS * 2]
        assert [each.outputs[0].token_ids for each in llm.generate(TEXTS * 2, params, strategy=strategy)] == alone


def test_rows_of_both_depths_run_in_one_forward_as_they_do_alone(shallow: Path) -> None:
    runner = load(str(shallow), LoadOptions(dtype="float32"))
    separator = json.loads((shallow / "config.json").read_text())["answer_after"]
    text, tree = (5, 6, separator, 7, 8), trees.chain_tree((9, 10))
    for sequence in (1, 2):
        runner.open(sequence, ())
        runner.reserve(sequence, 16)
    both = runner.forward([Segment(1, text, tree), Segment(2, text[:2])], taps=(1,))
    rows = [runner.forward([Segment(2, text[:2])], taps=(1,))]
    runner.keep(2, ())
    for token in (*text[2:], *tree.tokens):
        rows.append(runner.forward([Segment(2, (token,))], taps=(1,)))
        runner.keep(2, ())
    assert torch.equal(both.logits_RV[:7], torch.cat([out.logits_RV for out in rows]))
    with pytest.raises(ValueError, match="the source has no end, so a draft can't go on behind one"):
        runner.forward([Segment(1, (5,), trees.chain_tree((separator, 9)))])


def test_canvases_of_few_layers_are_refused(data: Path, shallow: Path, tmp_path: Path) -> None:
    for fields in ({"init": shallow}, {"shape": "tiny-shallow"}):
        with pytest.raises(ValueError, match="is for translators that write token by token: choose another"):
            trained("glat", data, tmp_path, **fields)


def test_new_layers_add_nothing_at_first(teacher: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    deep, ids = training.deepened(model, 2), torch.tensor([[5, 9, 11, 4]])
    assert deep.config.num_hidden_layers == 3 * model.config.num_hidden_layers
    assert torch.equal(deep(input_ids=ids).logits, model(input_ids=ids).logits)
    assert training.deepened(model, 0) is model


# ------------------------------------------------------------------------------------------------------------- recipes


def test_a_translator_s_prompt_is_the_source_alone(teacher: Path) -> None:
    output = LLM(str(teacher)).generate([TEXTS[0]], SamplingParams(temperature=0, max_tokens=5))[0]
    tokens = LLM(str(teacher)).get_tokenizer()
    assert tokens.convert_ids_to_tokens(output.prompt_token_ids[-1]) == "<|translate|>"


def test_a_teacher_s_translations_are_learned_from_and_kept(
    data: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"teacher": teacher, "work": tmp_path / "work", "distilled": 12}
    monkeypatch.setattr(distilling, "_AT_ONCE", 5)
    monkeypatch.setattr(Ticker.__init__, "__defaults__", (0.0,))  # a line for each step
    trained("glat", data, tmp_path, **asked)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "sources" in line] == [f"Translating: {at} of 12 sources" for at in (5, 10, 12)]
    kept = json.loads((tmp_path / "work" / "distilled.json").read_text())
    held_out = {source for source, _ in divided(read_pairs(data))[1]}
    assert 0 < len(kept["pairs"]) <= 12
    assert not held_out & {source for source, _ in kept["pairs"]}
    source, text = kept["pairs"][0]
    params = SamplingParams(temperature=0, max_tokens=60)
    assert LLM(str(teacher)).generate([source], params, strategy="none")[0].outputs[0].text == text
    before = (tmp_path / "work" / "distilled.json").stat().st_mtime_ns
    os.utime(data, (0, 0))  # the same pairs, fetched anew
    trained("nat", data, tmp_path, **asked)
    assert "Aligning: 6 of 6 rounds" in capsys.readouterr().err
    assert (tmp_path / "work" / "distilled.json").stat().st_mtime_ns == before
    half = {**kept, "done": 5, "pairs": kept["pairs"][:2]}  # as a run leaves it that was stopped meanwhile
    (tmp_path / "work" / "distilled.json").write_text(json.dumps(half))
    trained("glat", data, tmp_path, **asked)
    assert "Translating: 7 of 7 sources" in capsys.readouterr().err
    assert json.loads((tmp_path / "work" / "distilled.json").read_text())["done"] == 12


def test_held_out_pairs_that_do_not_fit_cost_no_model(tmp_path: Path) -> None:
    """They are found after hours of training, when the model is not written yet."""
    pairs = [(f"ab {at}", f"cd {at}") for at in range(300)]
    held = {source for source, _ in divided(pairs)[1]}
    assert held
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"{source}\t{'x ' * 100 if source in held else target}\n" for source, target in pairs))
    out = trained("translator", file, tmp_path)
    assert json.loads((out / "provenance.json").read_text())["heldout_loss"] is None
    assert LLM(str(out)).generate(["ab"], GREEDY)[0].outputs[0].token_ids


def test_a_run_that_is_stopped_writes_the_model_as_it_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = training.Run._update

    def stopped(run: training.Run, *rest: Any) -> None:
        if run.updates == 1:
            raise KeyboardInterrupt
        update(run, *rest)

    monkeypatch.setattr(training.Run, "_update", stopped)
    with pytest.raises(KeyboardInterrupt):
        trained("ctc", data, tmp_path)
    assert "stopped after 1 updates; --init" in capsys.readouterr().err
    assert json.loads((tmp_path / "ctc" / "provenance.json").read_text())["updates"] == 1
    assert LLM(str(tmp_path / "ctc")).generate(["ab cd"], GREEDY)[0].outputs[0].finish_reason


def test_losses_that_are_no_numbers_end_a_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Run, "_loss", lambda run, *rest: run.network.model.model.norm.weight.sum() * torch.nan)
    with pytest.raises(ValueError, match="no finite number in 20 updates in a row: train again with a lower --rate"):
        trained("translator", data, tmp_path, updates=40)


def test_options_of_a_model_or_teacher_that_is_not_there_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name it by init"):
        trained("translator", data, tmp_path, deepen=1)
    with pytest.raises(UsageError, match="name it by teacher"):
        trained("translator", data, tmp_path, distilled=5)
    (tmp_path / "taken").write_text("")
    with pytest.raises(ParlayError, match="can't write to the folder"):
        training.train("ctc", FramesTrainOptions(data=data, out=tmp_path / "taken"))


def test_pairs_of_other_systems_are_read(tmp_path: Path) -> None:
    """With a byte order mark, ends of lines of Windows, an empty line, and a text with a line end of another kind."""
    (tmp_path / "pairs.tsv").write_bytes("\ufeffa\tb\r\n\r\none\u2028two\tc\x85d\r\n".encode())
    assert read_pairs(tmp_path / "pairs.tsv") == [("a", "b"), ("one\u2028two", "c\x85d")]


def test_a_teacher_that_ends_nothing_is_refused(data: Path, tmp_path: Path) -> None:
    unlearned = trained("translator", data, tmp_path, updates=1)
    with pytest.raises(ValueError, match=r"ends no translation of 5 within 60 tokens: train it longer"):
        trained("nat", data, tmp_path, teacher=unlearned, work=tmp_path / "work", distilled=5)


def test_the_command_line_trains(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**TOY, "updates": 1, "compile": None}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None]
    assert main(("train", "ctc", "--data", str(data), "--out", str(tmp_path / "out"), "--no-compile", *words)) == 0
    assert capsys.readouterr().out.strip().endswith("out")
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert (record["recipe"], record["updates"]) == ("ctc", 1)
    assert str(tmp_path) not in json.dumps(record)


def test_data_that_is_cut_or_no_text_is_refused(tmp_path: Path) -> None:
    lines = "\n".join(f"a {number}\tb {number}" for number in range(4_000)).encode()
    packed = zstandard.ZstdCompressor().compress(lines)
    file = tmp_path / "pairs.tsv.zst"
    file.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"pairs\.tsv\.zst is cut short: fetch it again"):
        read_pairs(file)
    file.write_bytes(b"no frame")
    with pytest.raises(ValueError, match=r"pairs\.tsv\.zst can't be unpacked"):
        read_pairs(file)
    file.write_bytes(packed + zstandard.ZstdCompressor().compress(b"\nc\td"))
    assert len(read_pairs(file)) == 4_001
    (tmp_path / "pairs.tsv").write_bytes(b"a\tb\na\t\xff\n")
    with pytest.raises(ValueError, match=r"pairs\.tsv, line 2: this is no text in UTF-8"):
        read_pairs(tmp_path / "pairs.tsv")


@pytest.mark.parametrize(
    ("text", "words"),
    [("a b\n", "line 1: expected a source, a tab and its translation"), ("a\tb\n", "too few to hold some out")],
)
def test_data_that_can_t_be_learned_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "pairs.tsv").write_text(text)
    with pytest.raises(ValueError, match=words):
        trained("translator", tmp_path / "pairs.tsv", tmp_path)
    with pytest.raises(ValueError, match="no file"):
        trained("translator", tmp_path / "none.tsv", tmp_path)
