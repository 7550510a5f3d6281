"""The target drafts for itself with weights of fewer bits and part of its cached keys; the text stays its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import parlay
from parlay import LLM, SamplingParams
from parlay.cache import BLOCK
from parlay.compiled.library import SWITCH
from parlay.drafters.resources import Resources
from parlay.drafters.self_speculation.self_draft import SelfDraft
from parlay.models.compiled.forward import CompiledForward
from parlay.models.config import DecoderConfig
from parlay.models.gguf.blocks import rounded
from parlay.models.loading import load_weights
from parlay.models.native import NativeRunner
from parlay.models.random_decoder import save_decoder
from parlay.models.weights.fused import Operand, in_eight_bits
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.adapters import save_adapter
from parlay.testing.checkpoints import VOCAB_SIZE, random_model
from parlay.testing.conformance.stages import tiny_llama
from parlay.types import HIDDEN_STEP, PAGE_TOKENS, ChosenPages, DraftForm, Segment, Tree
from tests.drafters.own_layers import TARGET, VOCAB
from tests.drafters.sight import no_runner

TEXT = tuple(11 * place % (VOCAB_SIZE - 1) for place in range(700))
GREEDY = SamplingParams(temperature=0, max_tokens=24)
MEMORY = "8800KiB"
"""Too little for all texts of a batch, and enough for the longest one."""


@pytest.fixture(params=["compiled", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "0")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("parlay-mini", strategy="none")


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: tensor.to(dtype).clone() for name, tensor in random_model("llama").state_dict().items()}


def opened(config: DecoderConfig, text: tuple[int, ...] = TEXT, **of_weights: Tensor) -> NativeRunner:
    """A runner in float32 that has a text in its cache, and room for some more."""
    return begun(make(of_weights, config, name="tiny"), text)


SIZES = DecoderConfig(
    architecture="LlamaForCausalLM", vocab_size=VOCAB_SIZE, num_layers=3, rms_norm_eps=1e-6, max_context=1024,
    hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32,
)  # fmt: skip
"""Of whose matrices all rows are whole blocks."""


def make(own: Mapping[str, Operand], config: DecoderConfig = SIZES, **options: object) -> NativeRunner:
    cpu = torch.device("cpu")
    return NativeRunner(config, own, dtype=torch.float32, device=cpu, max_tokens_cached=4096, **options)  # type: ignore[arg-type]


def begun(runner: NativeRunner, text: tuple[int, ...] = ()) -> NativeRunner:
    """With a sequence 0 that has a text in its cache, and room for some more."""
    runner.open(0, ())
    assert runner.reserve(0, len(TEXT) + 20)
    if text:
        runner.forward([Segment(0, text, logits_from=len(text))])
        runner.keep(0, ())
    return runner


def masked(hidden: tuple[int, int], more: tuple[int, ...], chosen: tuple[int, ...] = ()) -> Tensor:
    """What transformers says after each of ``more`` tokens, from which a span of the text before is hidden.

    Pages of the span that are ``chosen`` are seen.
    """
    model, ids = random_model("llama"), torch.tensor([[*TEXT, *more]])
    seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    seen[len(TEXT) :, slice(*hidden)] = False
    for page in chosen:
        seen[len(TEXT) :, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS] = True
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    with torch.inference_mode():
        logits: Tensor = model(ids, attention_mask=mask).logits[0, len(TEXT) :]
    return logits


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("hidden", [(0, 256), (256, 512), (0, 512)])
def test_hidden_tokens_are_as_masked_ones(hidden: tuple[int, int]) -> None:
    """Of a chain, of a branching tree, and of what goes on from a base; the text's own rows stay whole."""
    runner, known = opened(tiny_llama(1024), **weights()), masked(hidden, (3, 5, 8))
    chain = Segment(0, (3, 5, 8), hidden=hidden)
    torch.testing.assert_close(runner.forward([chain]).logits_RV, known, rtol=1e-4, atol=1e-4)
    runner.forward([chain._replace(pending=(3, 5), logits_from=2)])
    tree = Segment(0, (3,), Tree((5, 7, 8), (-1, -1, 0)), hidden=hidden)
    torch.testing.assert_close(runner.forward([tree]).logits_RV[[0, 1, 3]], known, rtol=1e-4, atol=1e-4)
    deeper = tree._replace(tree=Tree((5, 7, 8, 9), (-1, -1, 0, 1)), base=4, logits_from=4)
    other = masked(hidden, (3, 7, 9))
    torch.testing.assert_close(runner.forward([deeper]).logits_RV, other[2:], rtol=1e-4, atol=1e-4)
    plain = runner.forward([Segment(0, (3, 5, 8))]).logits_RV
    torch.testing.assert_close(plain, masked((0, 0), (3, 5, 8)), rtol=1e-4, atol=1e-4)


def chosen_of(pages: Tensor | tuple[int, ...], config: DecoderConfig, hidden: tuple[int, int]) -> ChosenPages:
    """These pages, the same in all layers and heads unless they say otherwise."""
    whole = torch.as_tensor(pages, dtype=torch.int32).expand(config.num_layers, config.num_kv_heads, -1)
    return ChosenPages(whole.contiguous(), hidden)


@pytest.mark.usefixtures("kernels")
def test_chosen_pages_of_hidden_tokens_are_seen() -> None:
    """By the rows of a chain and of a branching tree, as if they were not masked."""
    config, hidden, pages = tiny_llama(1024), (0, 512), (1, 7, 30)
    runner, known = opened(config, **weights()), masked(hidden, (3, 5, 8), pages)
    assert runner.spec.chooses
    chain = Segment(0, (3, 5, 8), hidden=hidden, chosen=chosen_of(pages, config, hidden))
    torch.testing.assert_close(runner.forward([chain]).logits_RV, known, rtol=1e-4, atol=1e-4)
    tree = chain._replace(pending=(3,), tree=Tree((5, 7, 8), (-1, -1, 0)))
    torch.testing.assert_close(runner.forward([tree]).logits_RV[[0, 1, 3]], known, rtol=1e-4, atol=1e-4)
    assert (known - masked(hidden, (3, 5, 8))).norm() > 0.01 * known.norm()


def test_votes_and_what_each_head_sees_are_those_of_torchs_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each head of a layer sees other pages; layers with a window take no part."""
    layers = tuple(replace(SIZES.forms[0], window=window) for window in (None, 300, None))
    config = replace(SIZES, layers=layers)
    save_decoder(SIZES, tmp_path)
    own, hidden = load_weights(tmp_path, SIZES), (0, 512)
    pages = torch.randint(0, 32, (3, 2, 1), generator=torch.Generator().manual_seed(1)) // 3 * 3
    chosen = chosen_of(torch.cat((pages, (pages + 1) % 32), -1).sort().values, config, hidden)
    voting = Segment(0, (3, 4), votes=True, base=-6)
    again = Segment(0, (3, 4), hidden=hidden, chosen=chosen)

    def found(**options: object) -> tuple[Tensor, Tensor]:
        runner = begun(make(own, config, **options), TEXT)
        (votes_LKTP,) = runner.forward([voting]).votes
        assert votes_LKTP is not None
        assert votes_LKTP.shape == (3, 2, 8, (len(TEXT) - 6) // PAGE_TOKENS)
        return votes_LKTP, runner.forward([again]).logits_RV

    votes, logits = found()
    coarse, coarse_logits = found(kv_cache_dtype="q8_0")
    monkeypatch.setenv(SWITCH, "0")
    reference, known = found()
    torch.testing.assert_close(votes, reference, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(logits, known, rtol=1e-4, atol=1e-4)
    assert (coarse - reference).norm() < 0.05 * reference.norm()
    assert (coarse_logits - known).norm() < 0.03 * known.norm()
    assert not reference[1].any()
    assert 0.9 < float(reference[0].sum(-1).mean()) / 2 <= 1.0


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_weights_are_a_model_of_these_weights(bits: int) -> None:
    """To the last bit; the model's own weights are as before."""
    config, own, text = tiny_llama(1024), weights(), TEXT[:40]
    runner, alone = opened(config, (), **own), opened(config, (), **rounded(own, bits))  # type: ignore[arg-type]
    runner.round_weights(bits, own)
    compiled = isinstance(runner._forward, CompiledForward)
    assert runner.spec.cheaper == compiled
    if compiled:  # one copy of the embeddings serves both
        forwards = [runner._forward, runner._rounded[bits], alone._forward]
        rows = [each._weights.model.embedding.panels for each in forwards if isinstance(each, CompiledForward)]
        assert rows[0] == rows[1] != rows[2]
    segment = Segment(0, text)
    drafted = runner.forward([segment._replace(bits=bits)]).logits_RV
    assert torch.equal(drafted, alone.forward([segment]).logits_RV)
    assert torch.equal(runner.forward([segment]).logits_RV, opened(config, (), **own).forward([segment]).logits_RV)


@pytest.mark.usefixtures("kernels")
def test_weights_of_eight_bits_are_rounded_to_four_alone(tmp_path: Path) -> None:
    """What counts is what the target runs with, not what its file holds."""
    save_decoder(SIZES, tmp_path)
    own = load_weights(tmp_path, SIZES)
    runner = make(own, quantize="int8")
    with pytest.raises(ValueError, match=r"weights of 8\.0 bits would have 8\.0"):
        runner.round_weights(8, own)
    with ThreadPoolExecutor(4) as pool:  # one of them packs
        list(pool.map(lambda _: runner.round_weights(4, own), range(4)))
    ids = Segment(0, TEXT[:20])
    alone = make(rounded(in_eight_bits(own), 4))
    assert torch.equal(begun(runner).forward([ids._replace(bits=4)]).logits_RV, begun(alone).forward([ids]).logits_RV)


@pytest.mark.usefixtures("kernels")
def test_an_adapter_goes_with_rounded_weights(tmp_path: Path) -> None:
    save_decoder(SIZES, tmp_path / "base")
    own = load_weights(tmp_path / "base", SIZES)
    save_adapter(tmp_path / "adapter", SIZES, rank=5)
    runner, alone = make(own), make(rounded(own, 4))
    runner.round_weights(4, own)
    found = []
    for each, bits in ((runner, 4), (alone, 0)):
        adapter = begun(each).read_adapter(tmp_path / "adapter", "it")
        segment = Segment(0, TEXT[:20], bits=bits)
        found += [each.forward([segment._replace(adapter=one)]).logits_RV for one in (adapter, None)]
    assert torch.equal(found[0], found[2])
    assert not torch.allclose(found[0], found[1], atol=1e-3)


def test_tokens_are_hidden_from_sliding_windows_and_from_keys_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's operators do it: two layers of three see the last 300 tokens, of which some are hidden."""
    layers = tuple(replace(SIZES.forms[0], window=window) for window in (300, None, 300))
    config = replace(SIZES, layers=layers)
    save_decoder(SIZES, tmp_path)
    own = load_weights(tmp_path, SIZES)
    tree = Segment(0, (3,), Tree((5, 7, 8), (-1, -1, 0)))
    wanted = [tree._replace(hidden=hidden) for hidden in ((0, 256), (256, 512), (0, 512), (0, 0))]

    def logits(**options: object) -> list[Tensor]:
        runner = begun(make(own, config, **options), TEXT)
        return [runner.forward([segment]).logits_RV for segment in wanted]

    exact, blocks = logits(), logits(kv_cache_dtype="q8_0")
    monkeypatch.setenv(SWITCH, "0")
    for one, coarse, reference in zip(exact, blocks, logits(), strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-4, atol=1e-4)
        assert (coarse - reference).norm() < 0.03 * reference.norm()
    assert min(float((one - exact[3]).norm() / exact[3].norm()) for one in exact[:3]) > 0.1


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        (Segment(0, (1,), hidden=(0, 768)), "only cached ones"),
        (Segment(0, (1,), hidden=(3, 256)), f"steps are {HIDDEN_STEP}"),
        (Segment(0, (1,), hidden=(512, 256)), "can't be hidden"),
        (Segment(0, (1,), hidden=(256, 512), base=-300), "only cached ones"),
        (Segment(0, (1,), bits=4), "no weights of 4 bits"),
        (Segment(0, (1,), hidden=(0, 256), chosen=ChosenPages(torch.zeros(9, 1, 1), (0, 256))), "9, 1. layers and"),
        (Segment(0, (1,), hidden=(0, 512), chosen=ChosenPages(torch.zeros(2, 2, 1), (0, 256))), "0, 512. are hidden"),
    ],
)
def test_what_can_not_be_hidden_is_said(segment: Segment, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        opened(tiny_llama(1024), **weights()).forward([segment])


def test_approximate_rows_serve_no_others() -> None:
    """They are neither kept nor the base of rows in another form."""
    runner = opened(tiny_llama(1024), **weights())
    runner.forward([Segment(0, (3,), hidden=(256, 512))])
    with pytest.raises(ValueError, match="run them again"):
        runner.forward([Segment(0, (3,), Tree((5,), (-1,)), logits_from=1, base=1)])
    runner.forward([Segment(0, (3,), hidden=(256, 512))])
    with pytest.raises(AssertionError, match="can't be kept"):
        runner.keep(0, ())


def test_a_window_ends_at_whole_steps() -> None:
    form = DraftForm(window=512, sinks=4)
    assert [form.hidden(cached) for cached in (100, 768, 1023, 1024, 5000)] == [
        (0, 0), (0, 0), (0, 0), (256, 512), (256, 4352),
    ]  # fmt: skip
    assert DraftForm(window=256, sinks=0).hidden(600) == (0, 256)
    assert DraftForm(bits=4).hidden(5000) == (0, 0)
    assert [DraftForm(window=256, keys=512).hidden(cached) for cached in (1023, 1024)] == [(0, 0), (0, 768)]
    with pytest.raises(ValueError, match="pages can be chosen of hidden"):
        ChosenPages(torch.tensor([[[15]]]), (256, 512))


def test_the_step_is_a_block_of_the_compiled_decoder() -> None:
    header = (Path(parlay.__file__).parent / "compiled" / "core" / "strips.h").read_text()
    assert re.search(rf"#define KEYS {HIDDEN_STEP}\b", header)
    assert BLOCK == PAGE_TOKENS


def least_drafted(llm: LLM, strategy: str) -> int:
    """Check two texts against plain decoding's, greedy and sampled; returns the fewest tokens that a form drafted."""
    words = " ".join(f"word{number} and {number * 7 % 13}" for number in range(120))
    prompts, sampled = [words, f"{words} then"], SamplingParams(temperature=0.8, max_tokens=24, seed=3)
    found = []
    for params in (GREEDY, sampled):
        plain = llm.generate(prompts, params)
        drafted = llm.generate(prompts, params, strategy=strategy)
        assert [one.chosen.token_ids for one in drafted] == [one.chosen.token_ids for one in plain]
        found.append(sum(one.chosen.sources.count("self-draft") for one in drafted))
    return min(found)


@pytest.mark.parametrize(
    "form", ["window=256,sinks=1", "bits=4,window=256", "bits=8", "window=256,sinks=0,keys=100,refresh=6"]
)
def test_the_text_is_that_of_plain_decoding(llm: LLM, form: str) -> None:
    """Behind a text that is longer than the window, greedy and sampled, several at once."""
    assert least_drafted(llm, f"self-draft:{form},k=4,policy=fixed,min_p=0") > 8


@pytest.mark.parametrize(
    "levels",
    ["prompt-lookup+self-draft(window=256,keys=100)", "self-draft(window=256,sinks=0)+self-draft(window=512,sinks=0)"],
)
def test_a_cascade_may_end_with_the_target_in_a_cheaper_form(llm: LLM, levels: str) -> None:
    """Its text is that of plain decoding, and its level drafts what the form drafts alone, in fewer forwards."""
    assert least_drafted(llm, f"cascade:levels={levels},k=4,policy=fixed") > 0


def test_a_window_passes_what_a_server_does_to_requests(llm: LLM) -> None:
    """Forks of a prompt, guidance, texts that leave the batch early, and preemption where memory is short."""
    words = " ".join(f"word{number} and {number * 7 % 13}" for number in range(110))
    params = [
        SamplingParams(temperature=0.9, max_tokens=18, seed=1, n=2),
        SamplingParams(temperature=0, max_tokens=9, guidance_scale=1.5, negative_prompt=words[9:]),
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
    ]
    prompts = [words, f"{words} then", words[4:]]
    strategy = "self-draft:window=256,sinks=0,k=4,policy=fixed,min_p=0"

    def texts(one: LLM, strategy: str) -> list[list[int]]:
        outputs = one.generate(prompts, params, strategy=strategy)
        for output in outputs if strategy != "none" else []:
            assert all("self-draft" in each.sources for each in output.outputs)
        return [each.token_ids for output in outputs for each in output.outputs]

    plain = texts(llm, "none")
    assert texts(llm, strategy) == plain
    with LLM("parlay-mini", strategy="none", memory=MEMORY) as small:
        assert texts(small, strategy) == plain
        assert small.engine.stats().preemptions > 0


def test_a_text_within_the_window_is_not_drafted_for(llm: LLM) -> None:
    (output,) = llm.generate(["Once upon a time"], GREEDY, strategy="self-draft")
    assert set(output.chosen.sources) == {"target"}


def test_what_can_not_draft_for_itself_says_so(llm: LLM) -> None:
    """Other decoders, forms that are no cheaper, and weights that have no more bits."""

    def made(settings: str, **changes: object) -> SelfDraft:
        resources = Resources(VOCAB, no_runner, target=replace(TARGET, hides=True, cheaper=True, name="it"))
        drafter = build(parse(f"self-draft:{settings}"), replace(resources, **changes))
        assert isinstance(drafter, SelfDraft)
        return drafter

    def no_more(bits: int) -> None:
        raise ValueError("that is hardly less")

    with pytest.raises(UsageError, match="in a cheaper form"):
        made("", target=replace(TARGET, hides=False))
    with pytest.raises(UsageError, match="it runs on torch's operators, which take as long"):
        made("bits=4", target=replace(TARGET, hides=True, name="it"))
    with pytest.raises(UsageError, match="set one of them"):
        made("window=0")
    with pytest.raises(UsageError, match="keys=9,window=0: without a window drafts see all keys"):
        made("bits=4,keys=9,window=0")
    with pytest.raises(UsageError, match="refresh=9 is how often keys are chosen: set keys, too"):
        made("bits=4,refresh=9")
    with pytest.raises(UsageError, match="choose 4 or 8"):
        made("bits=5")
    with pytest.raises(UsageError, match="from a file"):
        made("bits=4")
    with pytest.raises(UsageError, match="hardly less; set window"):
        made("bits=4", round_weights=no_more)
    four = rounded(weights(), 4)
    with pytest.raises(ValueError, match=r"weights of 4\.5 bits would have 4\.5, which is hardly less"):
        rounded(
            {name: weight for name, weight in four.items() if len(weight.shape) < 2 or weight.shape[-1] % 32 == 0}, 4
        )
