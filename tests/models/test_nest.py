"""A model that writes with a datastore: the text is that of both laws, mixed by hand, and tokens carry their place."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from parlay import LLM, Nest, ParlayError, SamplingParams
from parlay.drafters.stores.datastore_file import Datastore
from parlay.drafters.stores.state_building import Built, write_states
from parlay.drafters.stores.state_store import MappedStates, folder_of, sha256_of, verify
from parlay.models.fetch.origin import weights_fingerprint
from parlay.models.loading import load_weights, read_config
from parlay.models.native import NativeRunner
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.reference import decode
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.types import NoiseKey, Request, Runner, Segment

faiss = pytest.importorskip("faiss")

STRATEGIES = ("none", "nest", "prompt-lookup", "draft-model", "jacobi", "token-recycling")
PROMPTS = [
    [1 + (7 * place + step * step) % (VOCAB_SIZE - 4) for step in range(5 + place % 4)] * 2 for place in range(20)
]
NEST = {"neighbours": 8, "alpha": 0.7, "tau": 0.15}
"""Under which the toys' datastore speaks often, and not always."""


@dataclass(frozen=True)
class Shelf:
    """A model's folder, and a datastore of its states."""

    model: str
    path: Path
    documents: list[list[int]]

    def nest(self, **others: float) -> Nest:
        return Nest(str(self.path), **{**NEST, **others})  # type: ignore[arg-type]


def runner_of(folder: str) -> NativeRunner:
    config, cpu = read_config(Path(folder)), torch.device("cpu")
    weights = load_weights(Path(folder), config)
    return NativeRunner(config, weights, dtype=torch.float32, device=cpu, max_tokens_cached=2048)


def read(runner: Runner, ids: Sequence[int], name: int = 0) -> tuple[Tensor, NDArray[np.float64]]:
    """The last logits and all states of a text that nothing else shares the forward with."""
    layer = runner.spec.num_layers - 1
    runner.open(name, (), salt=f"{ids}")
    runner.reserve(name, len(ids))
    out = runner.forward([Segment(name, tuple(ids), logits_from=len(ids) - 1)], (layer,))
    logits_V, states_TH = out.logits_RV[0].double(), out.taps[layer].double().numpy().copy()
    runner.release(name)
    return logits_V, states_TH / np.sqrt((states_TH**2).mean(1, keepdims=True))


def built(folder: str, path: Path, documents: Sequence[Sequence[int]]) -> Shelf:
    Datastore.build([np.array(ids) for ids in documents], VOCAB_SIZE).write(path)
    names = [f"text {number}" for number in range(len(documents))]
    write_states(path, names, Built(runner_of(folder), "toy", weights_fingerprint(folder)))
    return Shelf(folder, path, [list(ids) for ids in documents])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """A random model, and texts that it wrote itself or that have little to do with it."""
    folder = str(tmp_path_factory.mktemp("model"))
    save_random("llama", Path(folder), seed=1)
    toy_tokenizer(VOCAB_SIZE).save_pretrained(folder)
    with LLM(folder, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        written = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[::3]], params, strategy="none")
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in written]
    texts += [[(11 * place * place + place) % VOCAB_SIZE for place in range(40)], texts[0][:20], [5], [6, 7]]
    return built(folder, tmp_path_factory.mktemp("store") / "texts.store", texts)


class ByHand:
    """The paper's formulas once more, as plainly as can be: all neighbours by brute force, the laws in float64."""

    def __init__(self, shelf: Shelf, nest: Nest) -> None:
        self._runner, self._nest = runner_of(shelf.model), nest
        keys, self.tokens, self.places = [], [], []
        for number, ids in enumerate(shelf.documents):
            states_TH = read(self._runner, ids[:-1])[1].astype(np.float16).astype(np.float64) if ids[1:] else []
            keys += list(states_TH)
            self.tokens += ids[1:]
            self.places += [(f"text {number}", place) for place in range(1, len(ids))]
        self._keys_NH = np.array(keys)

    def neighbours(self, state_H: NDArray[np.float64]) -> tuple[list[int], NDArray[np.float64]]:
        distances = ((self._keys_NH - state_H) ** 2).sum(1)
        nearest = sorted(range(len(distances)), key=lambda number: distances[number])[: self._nest.neighbours]
        return nearest, distances[nearest]

    def law(self, ids: Sequence[int]) -> tuple[Tensor, Tensor, float, list[int]]:
        """The model's, the datastore's, the model's weight, and the neighbours."""
        logits_V, states_TH = read(self._runner, ids)
        nearest, distances = self.neighbours(states_TH[-1])
        shares = torch.softmax(torch.from_numpy(-distances / np.sqrt(states_TH.shape[1])), 0)
        retrieved_V = torch.zeros(len(logits_V), dtype=torch.float64)
        for number, share in zip(nearest, shares, strict=True):
            retrieved_V[self.tokens[number]] += share
        ratio = distances[0] / distances[-1]
        weight = float(torch.sigmoid(torch.tensor((ratio - self._nest.alpha) / self._nest.tau, dtype=torch.float64)))
        return torch.softmax(logits_V, 0), retrieved_V, weight, nearest

    def __call__(self, ids: Sequence[int]) -> Tensor:
        own_V, retrieved_V, weight, _ = self.law(ids)
        return (weight * own_V + (1 - weight) * retrieved_V).log()


def asks(*, sampled: bool) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.9 if sampled else 0, top_p=0.95, seed=place, max_tokens=8, ignore_eos=True)
        for place in range(len(PROMPTS))
    ]


def test_texts_are_those_of_the_two_laws_mixed_by_hand(shelf: Shelf) -> None:
    """20 prompts, greedy and sampled, in batches of 8, plainly and under five drafters; and each token's origin."""
    hand = ByHand(shelf, shelf.nest())
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(shelf.model, ensemble=shelf.nest(), dtype="float32", draft_model=shelf.model, max_num_seqs=8) as llm:
        for params in (asks(sampled=False), asks(sampled=True)):
            requests = [
                Request(id="", prompt=tuple(prompt), params=own, key=NoiseKey(own.seed or 0))
                for prompt, own in zip(PROMPTS, params, strict=True)
            ]
            wanted = [tuple(decode(hand, request).output) for request in requests]
            for strategy in STRATEGIES:
                outputs = llm.generate(prompts, params, strategy=strategy)
                assert [output.outputs[0].token_ids for output in outputs] == wanted, strategy
                assert all(output.outputs[0].exactness == "bits" for output in outputs)
        for output in outputs[:6]:
            check_origins(hand, shelf, output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].origins)
        llm.runner.check()


def check_origins(
    hand: ByHand, shelf: Shelf, prompt: Sequence[int], tokens: Sequence[int], origins: Sequence[object]
) -> None:
    """Each is a neighbour that the token follows, with the share of the token's probability that is from there."""
    assert len(origins) == len(tokens)
    for place, (token, origin) in enumerate(zip(tokens, origins, strict=True)):
        own_V, retrieved_V, weight, nearest = hand.law([*prompt, *tokens[:place]])
        among = [hand.places[number] for number in nearest if hand.tokens[number] == token]
        if not among:
            assert origin is None
            continue
        document, position, share = origin  # type: ignore[misc]
        assert (document, position) in among
        assert shelf.documents[int(document.split()[1])][position] == token
        retrieved = float((1 - weight) * retrieved_V[token])
        assert share == pytest.approx(retrieved / (retrieved + float(weight * own_V[token])), rel=1e-3)


def test_a_quoted_document_is_drafted_in_spans_and_attributed_to_one_place(shelf: Shelf) -> None:
    """Also for a target that mixes nothing in: it is drafted, its text is its own, and no token has an origin."""
    text = shelf.documents[1]
    prompt, params = {"prompt_token_ids": text[:16]}, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(shelf.model, ensemble=shelf.nest(neighbours=1, alpha=2), dtype="float32") as llm:
        (output,) = llm.generate(prompt, params, strategy="nest:k=8,policy=fixed")[0].outputs
    assert list(output.token_ids) == text[16:32]
    assert output.metrics.steps <= 4
    assert output.sources.count("nest") >= 12
    (span,) = output.attributions
    assert (span.document, span.position, span.tokens, span.text) == ("text 1", 16, 16, output.text)
    assert span.share > 0.9
    with LLM(shelf.model, dtype="float32") as llm:
        plain = llm.generate(prompt, params, strategy="none")[0].outputs[0]
        (output,) = llm.generate(prompt, params, strategy=f"nest:file={shelf.path},k=8,policy=fixed")[0].outputs
    assert (output.token_ids, output.origins) == (plain.token_ids, ())
    assert output.metrics.accepted_tokens >= 8


def test_the_papers_rule_accepts_a_span_by_its_likelihood(shelf: Shelf) -> None:
    """p(x) > gamma / 2 max p is `threshold` without a limit of rank; gamma near 2 is exact match for greedy texts."""
    text, params = shelf.documents[3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(shelf.model, ensemble=shelf.nest(), dtype="float32") as llm:
        made = {
            tau: llm.generate(
                {"prompt_token_ids": text[:9]},
                params,
                strategy=f"nest:k=8,policy=fixed,rule=threshold,threshold.beta={VOCAB_SIZE},threshold.tau={tau}",
            )[0].outputs[0]
            for tau in (0, 30)
        }
        plain = llm.generate({"prompt_token_ids": text[:9]}, params, strategy="none")[0].outputs[0]
    assert made[0].token_ids == plain.token_ids
    assert [made[tau].exactness for tau in made] == ["lossy", "lossy"]
    assert made[30].metrics.steps <= made[0].metrics.steps


def test_a_model_alone_is_what_a_datastore_without_weight_leaves(shelf: Shelf) -> None:
    """Bit for bit, log-probabilities included."""
    params = [SamplingParams(temperature=1, seed=place, max_tokens=8, logprobs=3) for place in range(4)]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]
    with (
        LLM(shelf.model, dtype="float32") as one,
        LLM(shelf.model, dtype="float32", ensemble=shelf.nest(alpha=-90)) as both,
    ):
        plain, mixed = ([each.outputs[0] for each in llm.generate(prompts, params)] for llm in (one, both))
    assert [each.token_ids for each in mixed] == [each.token_ids for each in plain]
    assert [each.logprobs for each in mixed] == [each.logprobs for each in plain]


# --------------------------------------------------------------------------------------------------------- the states


def test_states_of_long_documents_are_read_in_windows_and_short_ones_together(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state of the first window is that of the whole text; those after it see a quarter of a window before."""
    monkeypatch.setattr("parlay.drafters.stores.state_building.WINDOW", 16)
    monkeypatch.setattr("parlay.drafters.stores.state_building._ROWS", 8)
    long = [(place * place + 3 * place) % VOCAB_SIZE for place in range(50)]
    made = built(shelf.model, tmp_path / "long.store", [[9, 8], long, [4, 4, 4]])
    runner = runner_of(shelf.model)
    states = MappedStates.open(made.path, made.model, runner.spec)
    assert states.header.states == 1 + 49 + 2
    assert [states.locate(int(place)) for place in states._places_N[[0, 1, 49, 50]]] == [
        ("text 0", 1), ("text 1", 1), ("text 1", 49), ("text 2", 1),
    ]  # fmt: skip
    wanted = [*read(runner, long[:16])[1], *read(runner, long[12:32])[1][4:], *read(runner, long[28:48])[1][4:]]
    assert np.allclose(states._states_NH[1:49], wanted, atol=2e-3)
    verify(folder_of(made.path), states.header)


@pytest.mark.parametrize("added", [1000, 1 << 16])
def test_many_states_are_found_through_lists(
    shelf: Shelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    added: int,
) -> None:
    """Also where the lists of parts are merged on disk; neither merging nor opening them prints anything.

    Where a state is one of the datastore's own, the index finds it, and the distance is measured exactly.
    """
    monkeypatch.setattr("parlay.drafters.stores.state_building._ADDED", added)
    monkeypatch.setattr("parlay.drafters.stores.state_building._FLAT", 200)
    monkeypatch.setattr("parlay.drafters.stores.state_building._LEARNED", added * 200)
    documents = [[(seed * place * place + place) % VOCAB_SIZE for place in range(40)] for seed in range(1, 60)]
    learned, train = list[int](), faiss.IndexIVF.train
    monkeypatch.setattr(faiss.IndexIVF, "train", lambda index, rows: learned.append(rows.nbytes) or train(index, rows))
    made = built(shelf.model, tmp_path / "many.store", documents)
    assert 0 < learned[0] <= added * 200
    runner = runner_of(shelf.model)
    states = MappedStates.open(made.path, made.model, runner.spec)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == ""
    for seed in (3, 30, 58):
        found = states.nearest(read(runner, documents[seed][:30])[1][-1], 4)
        assert found.tokens_K[0] == documents[seed][30]
        assert found.distances_K[0] < 1e-3 < found.distances_K[-1]


def damaged(shelf: Shelf, folder: Path, change: Callable[[Path], object]) -> Nest:
    path = folder / "copy.store"
    shutil.copy(shelf.path, path)
    shutil.copytree(folder_of(shelf.path), folder_of(path))
    change(folder_of(path))
    return Nest(str(path))


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-7])


def place(number: int) -> Callable[[Path], object]:
    """Write a number that is no place, or for the size of the vocabulary the place of a border."""

    def change(folder: Path) -> None:
        tokens = Datastore.open(folder.with_name("copy.store")).tokens
        places = np.fromfile(folder / "places", np.uint64)
        places[3] = number if number > VOCAB_SIZE else (tokens == VOCAB_SIZE).nonzero()[0][0]
        places.tofile(folder / "places")

    return change


def header(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        told = json.loads((folder / "header.json").read_text())
        (folder / "header.json").write_text(json.dumps({**told, **values}))

    return change


def sized(name: str, size: object) -> Callable[[Path], object]:
    """Say another size of a file, perhaps of one elsewhere."""

    def change(folder: Path) -> None:
        told = json.loads((folder / "header.json").read_text())
        told["sizes"][name], told["checksums"][name] = size, "0" * 64
        (folder / "header.json").write_text(json.dumps(told))

    return change


def documents(text: str) -> Callable[[Path], object]:
    """Write other names of documents, under a right checksum."""

    def change(folder: Path) -> None:
        (folder / "documents.json").write_text(text)
        told = json.loads((folder / "header.json").read_text())
        told["sizes"]["documents.json"] = len(text)
        told["checksums"]["documents.json"] = sha256_of(folder / "documents.json")
        (folder / "header.json").write_text(json.dumps(told))

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (cut("states"), "states is cut short"),
        (cut("places"), "places is cut short"),
        (place(1 << 40), "places is damaged .it names places outside the texts"),
        (place(VOCAB_SIZE), "places is damaged .it names places outside the texts"),
        (cut("index"), "index is cut short"),
        (lambda folder: (folder / "index").write_bytes(bytes((folder / "index").stat().st_size)), "index is .*damaged"),
        (cut("documents.json"), "documents.json is cut short"),
        (cut("header.json"), "can't read the states"),
        (lambda folder: shutil.rmtree(folder), "datastore build CORPUS --states"),
        (header(version=9), "states of version 9"),
        (header(layer=-1), "an invalid header"),
        (header(datastore=1), "are not those of .*copy.store, which was built anew"),
        (header(weights="0" * 64, model="other"), "those of other, whose weights are not those of"),
        (header(num_layers=9, model="other"), "those of other, 32 numbers in 9 layers; .* has 32 in 3"),
        (header(hidden_size=64), "an invalid header"),
        (header(sizes={"states": "7"}), "an invalid header"),
        (lambda folder: (folder / "header.json").write_text("[" * 100_000), "can't read the states"),
        (sized("../copy.store", 7), "an invalid header"),
        (sized("states", "7"), "an invalid header"),
        (documents("7"), "documents.json is not a list of names"),
        (documents("[1, 2]"), "documents.json is not a list of names"),
    ],
)  # fmt: skip
def test_states_that_can_not_be_used_are_one_clear_line(
    shelf: Shelf, tmp_path: Path, change: Callable[[Path], object], line: str
) -> None:
    nest = damaged(shelf, tmp_path, change)
    with pytest.raises(ParlayError, match=line) as refused:
        LLM(shelf.model, ensemble=nest)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Nest("x", neighbours=0), "nest neighbours must be between 1"),
        (lambda: Nest("x", alpha=float("nan")), "nest alpha must be a finite number, got nan"),
        (lambda: Nest("x", tau=0), "nest tau must be above 0, got 0"),
        (lambda: LLM("parlay-mini", ensemble=Nest("x"), certificates=["x"]), "nest: certificates is for one model"),
        (lambda: LLM("parlay-mini", ensemble=Nest("/no/such.store")), "no states of a datastore in /no/such.store"),
        (lambda: LLM("parlay-mini", strategy="nest"), "no datastore is named: name one with file=PATH"),
    ],
)
def test_what_can_not_be_a_nest_is_one_clear_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(ParlayError, match=line) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_without_the_library_one_line_names_it(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parlay.drafters.stores.state_store.find_spec", lambda name: None)
    with pytest.raises(ParlayError, match=r"need the package faiss-cpu: pip install 'parlay\[nest\]'"):
        LLM(shelf.model, ensemble=shelf.nest())


def test_a_corpus_of_single_tokens_has_no_states(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(ParlayError, match="no text of two tokens"):
        built(shelf.model, tmp_path / "one.store", [[3], [4]])
    assert [each.name for each in tmp_path.iterdir()] == ["one.store"]


def test_one_short_document_is_enough(shelf: Shelf, tmp_path: Path) -> None:
    """One neighbour says nothing of how sure it is: the farthest is the nearest, and the model writes."""
    made = built(shelf.model, tmp_path / "short.store", [[3, 4]])
    params, prompt = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), {"prompt_token_ids": [3]}
    with (
        LLM(made.model, ensemble=Nest(str(made.path)), dtype="float32") as llm,
        LLM(made.model, dtype="float32") as one,
    ):
        (output,), (plain,) = (each.generate(prompt, params)[0].outputs for each in (llm, one))
    assert output.token_ids == plain.token_ids
    assert all(origin is None or origin.share < 0.1 for origin in output.origins)
