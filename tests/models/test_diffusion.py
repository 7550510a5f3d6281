"""Diffusion checkpoints of the field's layouts: logits and texts of a slow reference, and caches that change no bit."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parlay import LLM, SamplingParams, StructuredOutputsParams
from parlay.compiled.build import NAMES
from parlay.compiled.library import SWITCH, NotLoaded
from parlay.compiled.library import load as load_library
from parlay.models.families.reading import read_config
from parlay.models.fetch.resolving import resolve_tokenizer
from parlay.models.loading import load_tokenizer, load_weights
from parlay.models.loading import read_config as reading
from parlay.models.native import NativeRunner
from parlay.testing.diffusion import LAYOUTS, MASK, VOCAB, SlowDiffusion, save_diffusion
from parlay.types import CanvasSpec, ParlayError, Segment, Tree, trees
from tests.models import gguf_files

TEXT = tuple(torch.randint(3, MASK, (90,), generator=torch.Generator().manual_seed(0)).tolist())
PROMPTS = ([5], [9, 11, 4], list(TEXT[1:22]), list(TEXT[:32]))


def _is_here(kernels: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, kernels)
        try:
            return kernels == "0" or load_library().name.decode() == kernels
        except NotLoaded:
            return False


@pytest.fixture(scope="module", params=[each for each in ("0", NAMES[0], NAMES[-1]) if _is_here(each)])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, request.param)
        yield request.param


@pytest.fixture(scope="module", params=LAYOUTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SlowDiffusion]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_diffusion(request.param, directory)


@pytest.fixture(scope="module")
def runner(saved: tuple[Path, SlowDiffusion], kernels: str) -> NativeRunner:
    config, weights = read_config(saved[0]), load_weights(saved[0], read_config(saved[0]))
    return NativeRunner(config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=4096)


names = itertools.count()


def laid(runner: NativeRunner, canvas: Sequence[int]) -> dict[str, Any]:
    """How a segment has these places: in order, seeing each other, or decided ones first, at their own positions."""
    assert runner.spec.canvas is not None
    if not runner.spec.canvas.ordered:
        return {"tree": trees.chain_tree(canvas), "together": len(canvas)}
    order = sorted(range(len(canvas)), key=lambda place: canvas[place] == MASK)
    return {"tree": trees.chain_tree([canvas[at] for at in order]), "places": tuple(at + 1 for at in order)}


def fed(runner: NativeRunner, text: Sequence[int], canvas: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
    """The logits of root and canvas, when chunks of the text were cached before; the sequence is then released."""
    name = next(names)
    cached = runner.open(name, text, "" if chunks else f"alone {name}")
    assert runner.reserve(name, len(text) + len(canvas))
    for size in chunks:
        part = tuple(text[cached : min(cached + size, len(text) - 1)])
        if part:
            runner.forward([Segment(name, part, logits_from=len(part))])
            cached = runner.keep(name, ())
    pending = tuple(text[cached:])
    segment = Segment(name, pending, logits_from=len(pending) - 1, **laid(runner, canvas))
    out = runner.forward([segment])
    runner.check()
    runner.release(name)
    rows = [0, *(segment.places or range(1, len(canvas) + 1))]
    return out.logits_RV[torch.tensor(rows).argsort()]


def test_logits_are_those_of_the_slow_reference(saved: tuple[Path, SlowDiffusion], runner: NativeRunner) -> None:
    layout = saved[1].layout
    size, whole = layout.block or layout.canvas, layout.text == "causal" and not layout.ordered
    assert runner.spec.canvas == CanvasSpec(MASK, size, layout.shift, layout.text, whole, ordered=layout.ordered)
    for length in (1, 7, 21, 32):
        places = layout.block - length % layout.block if layout.block else 9
        ids = [*TEXT[:length], *[MASK] * places]
        if places > 4:
            ids[-3:-1] = 7, 8  # decided before those to their left
        expected = saved[1].logits(ids, places)
        torch.testing.assert_close(
            fed(runner, ids[:length], ids[length:]), expected[length - 1 :], atol=1e-4, rtol=1e-4
        )


def test_what_is_cached_changes_no_bit(saved: tuple[Path, SlowDiffusion], runner: NativeRunner) -> None:
    """Whatever was cached before a block was whole, it runs again; whole blocks never do."""
    block = saved[1].layout.block
    for length, chunks in ((21, [3, 9]), (21, [20]), (64, [31, 1, 30]), (45, [1] * 44), (80, [17, 40, 22])):
        text = [*TEXT[:length]]
        canvas = [MASK] * (block - length % block if block else 7)
        alone = fed(runner, text, canvas)
        assert torch.equal(fed(runner, text, canvas, chunks), alone), (length, chunks)


def test_forks_and_neighbours_change_no_bit(saved: tuple[Path, SlowDiffusion], runner: NativeRunner) -> None:
    block, text = saved[1].layout.block, TEXT[:21]
    canvas = [7, MASK] + [MASK] * ((block - 21 % block if block else 7) - 2)
    expected = fed(runner, text, canvas)
    first, second = next(names), next(names)
    runner.open(first, text)
    assert runner.reserve(first, 80)
    runner.forward([Segment(first, text[:20])])
    runner.keep(first, ())
    runner.fork(first, second)
    cached = runner.truncate(second, 20)
    assert runner.reserve(second, 80)
    segments = [
        Segment(first, text[20:], **laid(runner, [1, 2, *canvas[2:]])),
        Segment(second, text[cached:], logits_from=20 - cached, **laid(runner, canvas)),
    ]
    out = runner.forward(segments)
    assert torch.equal(out.logits_RV[out.starts[1] :], expected)
    runner.check()
    for name in (first, second):
        runner.release(name)


def test_drafts_and_taps_are_refused(runner: NativeRunner) -> None:
    if not runner.spec.fills_only:
        pytest.skip("a causal text takes them")
    name = next(names)
    runner.open(name, TEXT[:5])
    assert runner.reserve(name, 20)
    with pytest.raises(ValueError, match="rows see those after them"):
        runner.forward([Segment(name, TEXT[:5], Tree((1, 2), (-1, -1)))])
    with pytest.raises(ValueError, match="rows see those after them"):
        runner.forward([Segment(name, TEXT[:5])], taps=(1,))
    runner.release(name)


def test_stale_rows_are_exact_until_the_canvas_changes(saved: tuple[Path, SlowDiffusion], runner: NativeRunner) -> None:
    """How far they drift then is bounded here by numbers: it is what an approximate cache costs."""
    if saved[1].layout.text != "full":
        pytest.skip("texts of other models are cached exactly")
    name, text, canvas = next(names), TEXT[:21], [MASK] * 8
    runner.open(name, text)
    assert runner.reserve(name, 60)
    runner.forward([Segment(name, text, trees.chain_tree(canvas), 20, together=8)])
    runner.keep(name, ())
    runner.truncate(name, 20)

    def logits(places: Sequence[int], *, stale: bool) -> Tensor:
        return runner.forward([Segment(name, text[20:], trees.chain_tree(places), together=8, stale=stale)]).logits_RV

    unchanged, changed = logits(canvas, stale=True), logits([5, 9, *canvas[2:]], stale=True)
    drift = (changed - logits([5, 9, *canvas[2:]], stale=False)).abs().max()
    assert torch.equal(unchanged, logits(canvas, stale=False))
    assert 0 < drift < (changed - unchanged).abs().max()
    runner.release(name)


def test_a_stale_cache_runs_fewer_rows_and_is_refused_where_blocks_are_exact(
    saved: tuple[Path, SlowDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole text runs when a group of places begins, and else what joined it, its last token, and the canvas."""
    llm = LLM(str(saved[0]), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    strategy = "denoise:selector=confidence,k=2,canvas=12,block=6,cache=stale"
    if saved[1].layout.text != "full":
        with pytest.raises(ValueError, match="cache=stale is for models whose rows all see each other"):
            llm.generate([PROMPTS[2]], params, strategy="denoise:cache=stale")
        return
    segments: list[Segment] = []
    forward = llm.runner.forward
    monkeypatch.setattr(llm.runner, "forward", lambda found, *rest: (segments.extend(found), forward(found, *rest))[1])
    tokens = llm.generate([PROMPTS[2]], params, strategy=strategy)[0].outputs[0].token_ids
    assert [segment.stale for segment in segments] == [False, True, True, False, True, True]
    assert len(tokens) == 12
    assert tokens == llm.generate([PROMPTS[2]], params, strategy=strategy)[0].outputs[0].token_ids


def test_the_cost_of_steps_counts_the_rows_that_run_again(
    saved: tuple[Path, SlowDiffusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached rows of a block that goes on, or of a text whose rows all see each other, are rows of each forward."""
    llm = LLM(str(saved[0]), dtype="float32")
    ran: list[int] = []
    counted: list[int] = []
    cost, inner = llm.engine.cost, llm.runner._forward  # type: ignore[attr-defined]
    run = inner.run
    monkeypatch.setattr(inner, "run", lambda work: (ran.append(len(work.ids)), run(work))[1])
    monkeypatch.setattr(cost, "record", lambda rows, context, seconds: counted.append(rows))
    caches = ("exact", "stale") if saved[1].layout.text == "full" else ("exact",)
    for cache in caches:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        llm.generate([PROMPTS[2]], params, strategy=f"denoise:selector=confidence,k=2,canvas=12,cache={cache}")
    assert counted == ran


def test_texts_are_those_of_the_slow_reference(saved: tuple[Path, SlowDiffusion]) -> None:
    """All prompts in one batch whose rows are few, so that prompts are computed in parts and texts wait for others."""
    llm = LLM(str(saved[0]), dtype="float32", max_num_seqs=4, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0, max_tokens=19, ignore_eos=True)
    for (k, group), prompts in (((3, 0), PROMPTS), ((1, 0), PROMPTS[2:3]), ((2, 4), PROMPTS[1:2])):
        strategy = f"denoise:selector=confidence,k={k},canvas=10,block={group}"
        for prompt, output in zip(prompts, llm.generate(prompts, params, strategy=strategy), strict=True):
            expected = saved[1].write(prompt, 19, canvas=10, k=k, group=group)
            assert list(output.outputs[0].token_ids) == expected, (k, group)
            assert output.metrics is None or str(output.outputs[0].metrics.exactness) == "lossy"


SELECTORS = (
    "threshold,threshold=0.2",
    "margin,k=2",
    "entropy,k=2",
    "random",
    "left-to-right",
    "factor,factor=1.9",
    "entropy-bound,bound=2",
    "kl-stability,threshold=0.2,kl=0.5,history=1",
    "credit,threshold=0.3",
    "mask-predict,steps=4",
    "entropy-distance,bound=3,distance=0.1",
    "joint-threshold,threshold=0.2,edit_threshold=0.3,edit_steps=3",
)


def some(layout: str) -> list[str]:
    """Four selectors for a layout, each of which three or four layouts have: what they choose hangs on no layout."""
    first = list(LAYOUTS).index(layout)
    return [SELECTORS[(first + step) % len(SELECTORS)] for step in (0, 3, 6, 9)]


def test_every_selector_writes_the_same_text_for_the_same_seed(
    saved: tuple[Path, SlowDiffusion], request: pytest.FixtureRequest
) -> None:
    """Every layout with some selectors, and every selector with some layouts."""
    llm = LLM(str(saved[0]), dtype="float32")
    params = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=11, ignore_eos=True, n=2)
    strategies = [f"denoise:canvas=11,selector={selector}" for selector in some(request.node.callspec.params["saved"])]
    together = llm.generate([PROMPTS[1]] * len(strategies), params, strategy=strategies)
    alone = [llm.generate([PROMPTS[1]], params, strategy=each)[0] for each in strategies]
    texts = [[list(sample.token_ids) for sample in output.outputs] for output in together]
    assert texts == [[list(sample.token_ids) for sample in output.outputs] for output in alone]
    assert all(len(sample) == 11 and MASK not in sample for each in texts for sample in each)


def test_forwards_that_are_counted_are_the_forwards_that_run(
    saved: tuple[Path, SlowDiffusion], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the selector: so tokens per forward are not flattered. The prompt runs with the first canvas."""
    llm = LLM(str(saved[0]), dtype="float32")
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=11, ignore_eos=True)
    calls: list[int] = []
    forward = llm.runner.forward
    monkeypatch.setattr(llm.runner, "forward", lambda found, *rest: (calls.append(1), forward(found, *rest))[1])
    for selector in some(request.node.callspec.params["saved"]):
        before = len(calls)
        llm.reset_prefix_cache()
        (output,) = llm.generate([PROMPTS[1]], params, strategy=f"denoise:canvas=6,selector={selector}")[0].outputs
        assert output.metrics.steps == len(calls) - before, selector
        assert output.metrics.tokens_per_step == pytest.approx(11 / (len(calls) - before))


def test_the_usual_strategy_of_a_diffusion_model_is_denoise(saved: tuple[Path, SlowDiffusion]) -> None:
    if saved[1].layout.canvas:
        pytest.skip("a causal text is written token by token, too")
    llm = LLM(str(saved[0]), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8)
    usual, named = (llm.generate([PROMPTS[1]], params, strategy=each)[0].outputs[0] for each in (None, "denoise"))
    assert usual.token_ids == named.token_ids
    with pytest.raises(ValueError, match="strategy none writes token by token"):
        llm.generate([PROMPTS[1]], params, strategy="none")
    with pytest.raises(ValueError, match="exactness seed"):
        llm.generate([PROMPTS[1]], params, strategy="denoise", exactness="seed")
    with pytest.raises(ValueError, match="has no prompt_logprobs"):
        llm.generate([PROMPTS[1]], SamplingParams(prompt_logprobs=1))
    with pytest.raises(ParlayError, match="can't draft token by token"):
        LLM("parlay-mini", draft_model=str(saved[0]), strategy="draft-model")


def test_one_checkpoint_writes_token_by_token_and_on_canvases(tmp_path: Path) -> None:
    """All in one batch; drafts change no token of the text that is written in order."""
    slow = save_diffusion("nemotron", tmp_path)
    assert read_config(tmp_path).max_context == 128  # no query is scaled there
    llm = LLM(str(tmp_path), dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)
    strategies = ["none", "prompt-lookup", "auto", "denoise:selector=confidence,k=3"]
    outputs = llm.generate([PROMPTS[2]] * 4, params, strategy=strategies)
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    plain = list(PROMPTS[2])
    for _ in range(21):
        plain.append(int(slow.logits(plain)[-1].argmax()))
    assert texts[:3] == [plain[len(PROMPTS[2]) :]] * 3
    assert texts[3] == slow.write(PROMPTS[2], 21, canvas=0, k=3)


@pytest.mark.parametrize(("threshold", "edit_threshold", "steps"), [(0.5, 0.0, 16), (0.2, 0.15, 2), (0.9, 0.9, 16)])
def test_decided_tokens_are_edited_as_by_the_slow_reference(
    threshold: float, edit_threshold: float, steps: int, tmp_path: Path
) -> None:
    """LLaDA 2.1's way; at 0.9 nothing is ever edited in these texts, and each block takes one forward more."""
    slow = save_diffusion("llada2", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", max_num_seqs=4, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0, max_tokens=19, ignore_eos=True)
    asked = f"threshold={threshold},edit_threshold={edit_threshold},edit_steps={steps}"
    outputs = llm.generate(PROMPTS[:3], params, strategy=f"denoise:selector=joint-threshold,{asked}")
    expected = [
        slow.edit(prompt, 19, threshold=threshold, edit_threshold=edit_threshold, steps=steps) for prompt in PROMPTS[:3]
    ]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    unedited = llm.generate(PROMPTS[:3], params, strategy=f"denoise:selector=threshold,threshold={threshold}")
    same = [list(output.outputs[0].token_ids) for output in unedited] == expected
    assert same == (edit_threshold == 0.9)


def test_the_order_of_rows_is_refused_where_it_makes_no_sense(tmp_path: Path) -> None:
    save_diffusion("wedlm", tmp_path)
    one = NativeRunner(
        read_config(tmp_path), load_weights(tmp_path, read_config(tmp_path)), dtype=torch.float32,
        device=torch.device("cpu"), max_tokens_cached=512,
    )  # fmt: skip
    one.open(0, TEXT[:5])
    assert one.reserve(0, 20)
    chain = trees.chain_tree([7, MASK, MASK])
    with pytest.raises(ValueError, match="lies beyond the context of 256"):
        one.forward([Segment(0, TEXT[:5], chain, places=(1, 2, 252))])
    with pytest.raises(ValueError, match="4 rows can't see each other or move: they must be the last nodes"):
        one.forward([Segment(0, TEXT[:5], chain, places=(1, 2, 3, 4))])
    with pytest.raises(ValueError, match="can't move before their root: -300"):
        one.forward([Segment(0, TEXT[:5], chain, places=(1, 2, -300))])


def test_rows_that_move_beyond_all_others_turn_by_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Angles are there for the last position that a row has, not only for as many rows as there are."""
    save_diffusion("wedlm", tmp_path)
    config, found = replace(read_config(tmp_path), max_context=4096), []
    for kernels in ("0", NAMES[-1]):
        monkeypatch.setenv(SWITCH, kernels)
        one = NativeRunner(
            config,
            load_weights(tmp_path, config),
            dtype=torch.float32,
            device=torch.device("cpu"),
            max_tokens_cached=512,
        )
        one.open(0, TEXT[:5])
        assert one.reserve(0, 20)
        chain = trees.chain_tree([7, MASK, MASK])
        found.append(one.forward([Segment(0, TEXT[:5], chain, places=(1, 2, 4000))]).logits_RV)
    torch.testing.assert_close(*found, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_gguf_files_compute_the_same(name: str, tmp_path: Path) -> None:
    slow = save_diffusion(name, tmp_path)
    keys = {
        "tokenizer.ggml.mask_token_id": MASK,
        "diffusion.shift_logits": slow.layout.shift,
        f"{name}.attention.causal": False,
    }
    file = gguf_files.write(tmp_path / "model.gguf", tmp_path, keys=keys)
    config = reading(file)
    assert config.canvas == read_config(tmp_path).canvas
    one = NativeRunner(
        config, load_weights(file, config), dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=512
    )
    ids = [*TEXT[:9], *[MASK] * 7]
    torch.testing.assert_close(fed(one, ids[:9], ids[9:]), slow.logits(ids)[8:], atol=1e-4, rtol=1e-4)
    with pytest.raises(ParlayError, match=r"attention\.causal"):
        reading(gguf_files.write(tmp_path / "causal.gguf", tmp_path, keys={f"{name}.attention.causal": True}))
    with pytest.raises(ParlayError, match="mask 64 in a vocabulary of 64"):
        reading(gguf_files.write(tmp_path / "mask.gguf", tmp_path, keys={"tokenizer.ggml.mask_token_id": VOCAB}))


@pytest.mark.parametrize("selector", ["confidence,k=3", "threshold,threshold=0", "mask-predict,steps=3"])
@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_texts_have_the_form_that_is_asked_for(name: str, selector: str, tmp_path: Path) -> None:
    """Tokens without an alternative are decided before the forward, so there are more tokens than forwards."""
    save_diffusion(name, tmp_path, vocab=4096)
    words = load_tokenizer(resolve_tokenizer("parlay-mini"))
    llm = LLM(str(tmp_path), dtype="float32", tokenizer=words)
    form = StructuredOutputsParams(regex=r"The answer to the question is [0-9]{4}\.")
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=40, structured_outputs=form)
    sample = llm.generate(["Say it:"], params, strategy=f"denoise:canvas=16,selector={selector}")[0].outputs[0]
    assert re.fullmatch(form.regex or "", sample.text), sample.text
    assert sample.finish_reason == "stop"
    if "mask-predict" not in selector:
        assert sample.metrics.steps < len(sample.token_ids)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("sdar", {"mask_token_id": VOCAB}, "mask_token_id 64 is not in the vocabulary of 64"),
        ("sdar", {"block_size": -4}, "block_size -4"),
        ("llada", {"alibi": True}, "LLaDAModelLM: alibi True is not supported"),
        ("dream", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding windows"),
        ("wedlm", {"mask_token_id": None}, "it has no mask_token_id: add the id"),
        ("wedlm", {"wedlm_window_size": 0}, "block_size 0"),
        ("llada-moe", {"moe_router_score_function": "sigmoid"}, "experts are chosen by softmax alone"),
        (
            "llada2",
            {"topk_group": 4},
            "n_group must be a divisor of 6 and at least topk_group, which must be at least 1, got 3",
        ),
        (
            "llada2",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok must be at most 4, the experts of its topk_group groups, got 5",
        ),
        ("nemotron", {"model_type": "nemotron_labs_diffusion_vlm"}, "images are not supported"),
    ],
)
def test_what_cannot_run_is_refused_by_name(name: str, change: dict[str, object], reason: str, tmp_path: Path) -> None:
    save_diffusion(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ParlayError, match=reason):
        read_config(tmp_path)
