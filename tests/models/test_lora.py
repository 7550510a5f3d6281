"""Adapters of low rank: beside the base they compute what merged ones do, and each row by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from parlay import LLM, LoRARequest, SamplingParams
from parlay.compiled.build import SOURCES
from parlay.compiled.library import SWITCH
from parlay.llm.request_options import RequestOptions
from parlay.models.config import DecoderConfig
from parlay.models.loading import load_weights, read_config
from parlay.models.lora import MASKS, merged, read_adapter
from parlay.models.lora_layout import CONFIG, EXPERT_PRODUCTS, MOST_RANK, PRODUCTS, WEIGHTS, BadAdapter
from parlay.models.native import NativeRunner
from parlay.models.random_decoder import save_decoder
from parlay.options import LoadOptions
from parlay.testing.adapters import save_adapter
from parlay.testing.checkpoints import save_random
from parlay.types import Adapter, ParlayError, Runner, Segment, Tree
from tests.models import quantized_files

IDS = (5, 9, 3, 17, 5, 9, 3, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(params=["compiled", "torch"])
def forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which decoder runs."""
    if request.param == "torch":
        monkeypatch.setenv(SWITCH, "0")
    return str(request.param)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 with biases of queries, keys and values, and two adapters of other ranks."""
    folder = tmp_path_factory.mktemp("toy")
    save_random("qwen2", folder / "base")
    config = read_config(folder / "base")
    save_adapter(folder / "one", config, rank=5)
    save_adapter(folder / "two", config, rank=20, seed=1, products=("self_attn.q_proj", "mlp.down_proj"))
    return folder


def runner_of(folder: Path, adapter: Path | None = None) -> NativeRunner:
    config = read_config(folder)
    weights = load_weights(folder, config)
    if adapter is not None:
        weights = merged(weights, read_adapter(adapter, config, "merged"))
    return NativeRunner(
        config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=1024, name="toy"
    )


def logits_of(runner: Runner, *adapters: Adapter | None, ids: Sequence[int] = IDS) -> list[torch.Tensor]:
    """The logits of all rows of a text, once with each adapter, in one forward."""
    segments = []
    for name, adapter in enumerate(adapters):
        runner.open(name, (), salt=str(name))
        assert runner.reserve(name, len(ids))
        segments.append(Segment(name, tuple(ids), adapter=adapter))
    out = runner.forward(segments)
    for name in range(len(adapters)):
        runner.release(name)
    return [out.logits_RV[begin:end] for begin, end in zip(out.starts[:-1], out.starts[1:], strict=True)]


def test_adapters_beside_the_base_compute_what_merged_ones_do(toy: Path, forward: str) -> None:
    """In one forward with the base, whose logits keep their bits."""
    base = runner_of(toy / "base")
    one, two = (base.read_adapter(toy / name, name) for name in ("one", "two"))
    found = logits_of(base, None, one, two, one)
    assert found[0].equal(logits_of(base, None)[0])
    for place, name in ((1, "one"), (2, "two"), (3, "one")):
        expected = logits_of(runner_of(toy / "base", toy / name), None)[0]
        torch.testing.assert_close(found[place], expected, rtol=1e-4, atol=1e-4)
        assert (found[place] - found[0]).abs().max() > 0.1


def test_a_row_with_an_adapter_has_the_same_bits_in_any_company(toy: Path, forward: str) -> None:
    """Alone, beside other adapters, beside rows of its own, and row by row."""
    base = runner_of(toy / "base")
    one, two = (base.read_adapter(toy / name, name) for name in ("one", "two"))
    (alone,) = logits_of(base, one)
    for company in ((one, two), (two, one), (one, one, None, one, two)):
        place = company.index(one)
        assert logits_of(base, *company)[place].equal(alone)
    base.open(0, (), salt="single")
    base.reserve(0, len(IDS))
    for row, token in enumerate(IDS):
        assert base.forward([Segment(0, (token,), adapter=one)]).logits_RV[0].equal(alone[row])
        base.keep(0, ())


def test_mask_rows_alone_run_with_their_adapter(toy: Path, forward: str) -> None:
    """The rows of the text keep their bits, and those of masks get other logits than without it."""
    base = runner_of(toy / "base")
    one = base.read_adapter(toy / "one", "one")
    tree = Tree((7, 0, 0, 0), (-1, 0, 1, 2))
    found = []
    for name, adapter in enumerate((None, one)):
        base.open(name, (), salt=str(name))
        assert base.reserve(name, len(IDS) + 4)
        out = base.forward([Segment(name, IDS, tree, together=3, mask_adapter=adapter)])
        found.append(out.logits_RV)
        base.keep(name, (0,))
    text = len(IDS) + 1
    assert found[0][:text].equal(found[1][:text])
    assert ((found[0][text:] - found[1][text:]).abs().amax(1) > 0.05).all()
    after = [base.forward([Segment(name, (11,))]).logits_RV for name in (0, 1)]
    assert after[0].equal(after[1])


def test_a_folder_that_says_nothing_of_masks_drafts_nothing(toy: Path, llm: LLM) -> None:
    with pytest.raises(BadAdapter, match=r"no mask_rows.json in .*: name an adapter that parlay train set-block"):
        tokens(llm, f"set-block:adapter={toy / 'one'}")
    (toy / "two" / MASKS).write_text('{"mask_token_id": 99999, "set_block_size": 4}')
    with pytest.raises(BadAdapter, match="mask_token_id 99999 is not in the vocabulary"):
        tokens(llm, f"set-block:adapter={toy / 'two'}")
    (toy / "two" / MASKS).write_text('{"mask_token_id": 0, "set_block_size": 4}')
    assert tokens(llm, f"set-block:adapter={toy / 'two'},policy=fixed") == tokens(llm)
    with pytest.raises(BadAdapter, match="is for rows of masks: name it by --strategy set-block:adapter="):
        tokens(llm, lora_request=LoRARequest("masks", 7, str(toy / "two")))
    (toy / "two" / MASKS).unlink()


@pytest.fixture(scope="module")
def llm(toy: Path) -> Iterator[LLM]:
    with LLM(str(toy / "base"), dtype="float32") as found:
        yield found


def tokens(llm: LLM, strategy: str = "none", lora_request: LoRARequest | str | None = None) -> tuple[int, ...]:
    prompt = {"prompt_token_ids": list(IDS)}
    return llm.generate(prompt, GREEDY, strategy=strategy, lora_request=lora_request)[0].outputs[0].token_ids


def test_each_request_chooses_its_adapter_and_shares_no_prefix(llm: LLM, toy: Path) -> None:
    """A text that the base has cached is computed anew under an adapter; strategies give the adapter's own text."""
    request = LoRARequest("one", 1, toy / "one")
    plain = tokens(llm)
    with LLM(str(toy / "base"), dtype="float32", load=LoadOptions(lora=str(toy / "one"))) as other:
        expected = tokens(other)
    assert tokens(llm, lora_request=request) == expected != plain
    assert tokens(llm) == plain
    for strategy in ("prompt-lookup", "swift", "jacobi"):
        assert tokens(llm, strategy, "one") == expected, strategy
    prompts = [{"prompt_token_ids": list(IDS)}] * 3
    outputs = llm.generate(prompts, GREEDY, lora_request=["one", None, request])
    assert [output.outputs[0].token_ids for output in outputs] == [expected, plain, expected]


def test_an_adapter_unloaded_in_use_stays_with_its_requests(llm: LLM, toy: Path) -> None:
    """A request that decodes goes on with it to its end; the next one is told in one line."""
    expected = tokens(llm, lora_request=LoRARequest("gone", lora_path=toy / "one"))
    options = RequestOptions(strategy="none", adapter=llm.adapters.of("gone"))
    jobs = [llm.job({"prompt_token_ids": list(IDS)}, GREEDY, options)]
    events = llm._run(jobs)
    next(events)
    llm.adapters.unload("gone")
    for _ in events:
        pass
    assert jobs[0].output().outputs[0].token_ids == expected
    with pytest.raises(ValueError, match="there is no adapter 'gone'"):
        tokens(llm, lora_request="gone")
    with pytest.raises(ValueError, match="there is no adapter 'gone'"):
        llm.adapters.unload("gone")


def test_names_belong_to_folders(llm: LLM, toy: Path) -> None:
    """The same folder may be named again; another under the same name is refused."""
    llm.adapters.load("mine", toy / "one")
    llm.adapters.load("mine", toy / "one")
    with pytest.raises(ValueError, match="an adapter 'mine' is loaded from"):
        llm.adapters.load("mine", toy / "two")
    llm.adapters.unload("mine")


def test_adapters_run_on_weights_in_blocks_and_are_not_merged_into_them(tmp_path: Path) -> None:
    """Beside AWQ's matrices they compute in float32; merging is refused with the remedy."""
    quantized = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    quantized_files.save(tmp_path / "base", {"quantization_config": quantized}, quantized_files.awq)
    config = read_config(tmp_path / "base")
    save_adapter(tmp_path / "one", config)
    base = runner_of(tmp_path / "base")
    plain, changed = logits_of(base, None, base.read_adapter(tmp_path / "one", "one"))
    assert (plain - changed).abs().max() > 0.1
    with pytest.raises(BadAdapter, match=r"stored as Q4_Z.*--lora-modules"):
        runner_of(tmp_path / "base", tmp_path / "one")


def test_scales_are_those_of_peft(tmp_path: Path) -> None:
    """alpha / r, alpha / sqrt(r) with rslora, and patterns by the end of a module's name."""
    config = _config(tmp_path)
    up = load_file(save_adapter(tmp_path / "up", config) / WEIGHTS)[_UP]
    cases: Mapping[str, tuple[Mapping[str, object], float]] = {
        "plain": ({}, 2.0),
        "rslora": ({"use_rslora": True}, 4.0),
        "pattern": ({"alpha_pattern": {"q_proj": 2.0}}, 0.5),
        "layer": ({"alpha_pattern": {"layers.1.self_attn.q_proj": 2.0}}, 2.0),
        "whole": ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2.0}}, 0.5),
        "no whole name": ({"alpha_pattern": {"^q_proj": 2.0}}, 2.0),
        "excluded": ({"exclude_modules": ["lm_head"]}, 2.0),
    }
    for name, (changes, scale) in cases.items():
        folder = save_adapter(tmp_path / name, config, changes=changes)
        found = read_adapter(folder, config, name).matrices["model.layers.0.self_attn.q_proj.weight"]
        torch.testing.assert_close(found.up_OR, up * scale)


_UP = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
_DOWN = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def _config(folder: Path) -> DecoderConfig:
    save_decoder(quantized_files.TOY, folder / "base")
    return read_config(folder / "base")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
        ({"bias": "all"}, "bias is not supported"),
        ({"init_lora_weights": "pissa"}, "'pissa' changed the base"),
        ({"r": 8}, "says rank 8, and the matrices"),
        ({"r": 4096}, "rank 4096 .* at most 512"),
        ({"r": "many"}, "is not a description of an adapter"),
        ({"alpha_pattern": {"(a+)+": 1}}, "expression"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is not supported"),
        ({"use_qalora": True}, "use_qalora is not supported"),
        ({"a_later_form": {"of": "arithmetic"}}, "a_later_form is not supported"),
        ({"init_lora_weights": "loftq"}, "'loftq' changed the base"),
        ({"target_modules": ["q_proj"]}, "matrices of .* target_modules don't name"),
        ({"exclude_modules": ["layers.0.self_attn.q_proj"]}, "matrices of .*layers.0.self_attn.q_proj, which exclude"),
        ({"exclude_modules": ".*q_proj"}, "exclude_modules '.*q_proj' is an expression, which is not run"),
        ({"r": "4"}, "is not a description of an adapter: rank '4' of .* is not a number"),
        ({"r": 4.0}, "rank 4.0 of .* is not a whole number"),
        ({"lora_alpha": "8"}, "is not a description of an adapter: alpha '8' of .* is not a number"),
        ({"alpha_pattern": {"q_proj": True}}, "alpha True of .* is not a number"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters name experts.gate_up_proj, of which"),
        ({"layers_to_transform": [1]}, r"adapts layers \[1\] alone .* has matrices of layer 0"),
    ],
)
def test_forms_that_cannot_be_honoured_are_refused_in_one_line(
    changes: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    """Each refusal names the field and the value, or what to do."""
    config = _config(tmp_path)
    with pytest.raises(ParlayError, match=message) as failure:
        read_adapter(save_adapter(tmp_path / "bad", config, changes=changes), config, "bad")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("rename", "shape", "message"),
    [
        ({_DOWN: _DOWN}, (4, 32), "it is for another base"),
        ({_DOWN: "base_model.model.lm_head.lora_A.weight"}, None, "no linear layers lm_head"),
        ({_DOWN: _DOWN.replace("layers.0", "layers.7")}, None, "no linear layers"),
        ({_DOWN: _DOWN.replace("lora_A.weight", "lora_magnitude_vector")}, None, "no linear layers"),
        ({_DOWN: ""}, None, "q_proj has lora_A missing"),
    ],
)
def test_tensors_of_another_model_are_named(
    rename: Mapping[str, str], shape: tuple[int, int] | None, message: str, tmp_path: Path
) -> None:
    """Another base's shapes, layers that are not there, parts that are missing."""
    config = _config(tmp_path)
    folder = save_adapter(tmp_path / "bad", config)
    tensors = load_file(folder / WEIGHTS)
    for old, new in rename.items():
        tensor = tensors.pop(old)
        if new:
            tensors[new] = torch.zeros(shape) if shape else tensor
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ParlayError, match=message):
        read_adapter(folder, config, "bad")


def test_modules_that_the_config_names_must_be_there(tmp_path: Path) -> None:
    """Those of other bases may be named beside them, and an expression is not run."""
    config = _config(tmp_path)
    products = ("self_attn.q_proj",)
    with pytest.raises(BadAdapter, match="target_modules name v_proj, of which"):
        read_adapter(
            save_adapter(tmp_path / "bad", config, products=products, changes={"target_modules": ["q_proj", "v_proj"]}),
            config,
            "bad",
        )
    for targets in (["q_proj", "c_attn"], "all-linear", "(a+)+$", None):
        folder = save_adapter(tmp_path / "good", config, products=products, changes={"target_modules": targets})
        assert read_adapter(folder, config, "good").matrices
    unsaid = {"later": None, "later_still": False, "megatron_core": "megatron.core"}
    assert read_adapter(save_adapter(tmp_path / "more", config, changes=unsaid), config, "more").matrices


@pytest.mark.parametrize("family", ["phi3", "phi4-mini", "glm4", "ernie", "gemma2", "gemma4-dense"])
def test_adapters_of_each_layout_change_what_they_were_trained_on(family: str, tmp_path: Path) -> None:
    """Fused projections are taken apart, and rows lie as the family's own: as if merged into the checkpoint's files."""
    save_random(family, tmp_path / "base")
    config, draw = read_config(tmp_path / "base"), torch.Generator().manual_seed(0)
    tensors, matrices = load_file(tmp_path / "base" / "model.safetensors"), {}
    for name, weight in tensors.items():
        if name.startswith("model.layers.") and "_proj." in name and weight.dim() == 2:
            down, up = (
                torch.randn(shape, generator=draw) * 0.1 for shape in ((3, weight.shape[1]), (weight.shape[0], 3))
            )
            module = f"base_model.model.{name.removesuffix('.weight')}"
            matrices |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
            tensors[name] = weight + up @ down
    folder = save_adapter(tmp_path / "one", config, rank=3, alpha=3, changes={"target_modules": "all-linear"})
    save_file(matrices, folder / WEIGHTS)
    save_random(family, tmp_path / "merged")
    save_file(tensors, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    base = runner_of(tmp_path / "base")
    plain, changed = logits_of(base, None, base.read_adapter(folder, "one"))
    (expected,) = logits_of(runner_of(tmp_path / "merged"), None)
    torch.testing.assert_close(changed, expected, rtol=1e-4, atol=1e-4)
    assert (plain - changed).abs().max() > 0.01
    (merged_in,) = logits_of(runner_of(tmp_path / "base", folder), None)
    torch.testing.assert_close(merged_in, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe", "granite-moe", "granite", "mixtral"])
def test_experts_take_adapters_of_single_rows(family: str, tmp_path: Path, forward: str) -> None:
    """Beside the base they compute what merged ones do, shared experts too; a row has its bits in any company."""
    save_random(family, tmp_path / "base")
    config = read_config(tmp_path / "base")
    folder = save_adapter(tmp_path / "one", config, rank=3, products=(*PRODUCTS, *EXPERT_PRODUCTS))
    other = save_adapter(tmp_path / "two", config, rank=18, seed=1, products=EXPERT_PRODUCTS)
    base = runner_of(tmp_path / "base")
    one, two = base.read_adapter(folder, "one"), base.read_adapter(other, "two")
    found = logits_of(base, None, one, two, one)
    assert found[0].equal(logits_of(base, None)[0])
    for place, adapter in ((1, folder), (2, other)):
        (expected,) = logits_of(runner_of(tmp_path / "base", adapter), None)
        torch.testing.assert_close(found[place], expected, rtol=1e-4, atol=1e-4)
        assert (found[place] - found[0]).abs().max() > 0.01
    assert found[3].equal(found[1])
    assert logits_of(base, one)[0].equal(found[1])
    base.open(0, (), salt="single")
    base.reserve(0, len(IDS))
    for row, token in enumerate(IDS):
        assert base.forward([Segment(0, (token,), adapter=one)]).logits_RV[0].equal(found[1][row])
        base.keep(0, ())


class _Stack(NamedTuple):
    """A parameter of stacked experts: PEFT's name of the module, the parameter's own, and ``[E, ...]`` sizes."""

    module: str
    parameter: str
    shape: tuple[int, int, int]


def _save_stacked(
    folder: Path, config: DecoderConfig, stacks: Sequence[_Stack], *, inputs_at: int = 2, changes: Mapping[str, object]
) -> dict[str, torch.Tensor]:
    """Write matrices of whole parameters by PEFT's formula; what each adds to its parameter, by that one's name.

    ``inputs_at``: which dimension of a parameter PEFT took for inputs.
    """
    rank, alpha, draw, tensors, added = 3, 6, torch.Generator().manual_seed(0), {}, {}
    for module, parameter, shape in stacks:
        inputs, outputs = shape[inputs_at], shape[3 - inputs_at]
        down, up = (
            torch.randn(size, generator=draw) * 0.1 for size in ((shape[0] * rank, inputs), (outputs, shape[0] * rank))
        )
        tensors |= {f"base_model.model.{module}.lora_A.weight": down, f"base_model.model.{module}.lora_B.weight": up}
        product = torch.einsum("ore,eri->eoi", up.view(outputs, rank, -1), down.view(-1, rank, inputs)) * alpha / rank
        key = f"{module.replace('.base_layer', '')}.{parameter}"
        added[key] = product if inputs_at == 2 else product.transpose(1, 2)
    targets = sorted(
        {f"{stack.module.replace('.base_layer', '').rpartition('.')[2]}.{stack.parameter}" for stack in stacks}
    )
    said = {"target_modules": [], "target_parameters": targets, **changes}
    save_adapter(folder, config, rank=rank, alpha=alpha, products=(), changes=said)
    save_file(tensors, folder / WEIGHTS)
    return added


def _experts_of(layer: int, hidden: int, inner: int, *, swap: bool = False) -> list[_Stack]:
    """Both parameters of a layer of six experts, the first one wrapped by the second one's wrapper."""
    at, sizes = f"model.layers.{layer}.mlp.experts", ((2 * inner, hidden), (hidden, inner))
    first, second = ((each[1], each[0]) for each in sizes) if swap else sizes
    return [_Stack(f"{at}.base_layer", "gate_up_proj", (6, *first)), _Stack(at, "down_proj", (6, *second))]


@pytest.mark.parametrize("inputs_at", [2, 1])
def test_stacked_experts_are_read_as_peft_writes_them(inputs_at: int, tmp_path: Path) -> None:
    """``target_parameters``: by PEFT's own formula, in the order of its first versions and of later ones."""
    save_random("qwen3-moe", tmp_path / "base")
    config = read_config(tmp_path / "base")
    stacks = [stack for layer in range(2) for stack in _experts_of(layer, 32, 24)]
    added = _save_stacked(tmp_path / "one", config, stacks, inputs_at=inputs_at, changes={})
    adapter = read_adapter(tmp_path / "one", config, "one")
    assert len(adapter.matrices) == 2 * 6 * 3
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        gates, downs = added[f"{at}.gate_up_proj"], added[f"{at}.down_proj"]
        for expert in range(6):
            whole = {"gate": gates[expert, :24], "up": gates[expert, 24:], "down": downs[expert]}
            for part, expected in whole.items():
                found = adapter.matrices[f"{at}.{expert}.{part}_proj.weight"]
                torch.testing.assert_close(found.up_OR @ found.down_RI, expected)
    base = runner_of(tmp_path / "base")
    plain, changed = logits_of(base, None, base.read_adapter(tmp_path / "one", "one"))
    assert (plain - changed).abs().max() > 0.01


def test_stacked_experts_of_gpt_oss_have_gates_and_ups_in_turn(tmp_path: Path) -> None:
    """Its parameters have inputs first, in every version of PEFT."""
    save_random("gpt-oss", tmp_path / "base")
    config = read_config(tmp_path / "base")
    form = config.forms[0].experts
    assert form is not None
    stacks = _experts_of(0, config.hidden_size, form.size, swap=True)
    stacks = [stack._replace(shape=(form.count, *stack.shape[1:])) for stack in stacks]
    added = _save_stacked(tmp_path / "one", config, stacks, inputs_at=1, changes={})
    adapter = read_adapter(tmp_path / "one", config, "one")
    at = "model.layers.0.mlp.experts"
    for expert in range(form.count):
        gate_up, down = added[f"{at}.gate_up_proj"][expert].t(), added[f"{at}.down_proj"][expert].t()
        for part, expected in {"gate": gate_up[::2], "up": gate_up[1::2], "down": down}.items():
            found = adapter.matrices[f"{at}.{expert}.{part}_proj.weight"]
            torch.testing.assert_close(found.up_OR @ found.down_RI, expected)


@pytest.mark.parametrize(
    ("changes", "keep", "message"),
    [
        (
            {"target_parameters": ["experts.down_proj"]},
            4,
            "2 pairs of matrices of .*experts, and target_parameters name 1",
        ),
        ({"target_parameters": []}, 4, "2 pairs of matrices of .*experts, and target_parameters name 0"),
        ({"target_parameters": "experts"}, 4, "target_parameters is not a list of names"),
        ({"r": 4}, 4, r"lora_A \[18, 32\] and lora_B \[48, 18\], and rank 4 .* asks for \[24, 32\] and \[48, 24\]"),
    ],
)
def test_stacks_that_are_not_what_the_config_says_are_named(
    changes: Mapping[str, object], keep: int, message: str, tmp_path: Path
) -> None:
    save_random("qwen3-moe", tmp_path / "base")
    config = read_config(tmp_path / "base")
    _save_stacked(tmp_path / "one", config, _experts_of(0, 32, 24), changes=changes)
    with pytest.raises(BadAdapter, match=message) as failure:
        read_adapter(tmp_path / "one", config, "one")
    assert "\n" not in str(failure.value)


def test_square_stacks_need_the_version_that_wrote_them(tmp_path: Path) -> None:
    """With as many inputs as outputs shapes don't tell which of PEFT's two layouts they have."""
    save_random("qwen3-moe", tmp_path / "base")
    config = read_config(tmp_path / "base")
    square = replace(
        config,
        layers=tuple(replace(form, experts=replace(form.experts, size=32)) for form in config.forms if form.experts),
    )
    stacks = _experts_of(0, 32, 32)[1:]
    name = "model.layers.0.mlp.experts.4.down_proj.weight"
    for version, inputs_at in (("0.18.1", 1), ("0.19.1", 2)):
        added = _save_stacked(
            tmp_path / version, config, stacks, inputs_at=inputs_at, changes={"peft_version": version}
        )
        found = read_adapter(tmp_path / version, square, "one").matrices[name]
        torch.testing.assert_close(found.up_OR @ found.down_RI, added["model.layers.0.mlp.experts.down_proj"][4])
    _save_stacked(tmp_path / "unsaid", config, stacks, changes={})
    with pytest.raises(BadAdapter, match="no peft_version says which way round"):
        read_adapter(tmp_path / "unsaid", square, "one")


def test_names_of_experts_may_be_listed_in_vain(tmp_path: Path) -> None:
    """PEFT lists what it was told to adapt, and experts whose matrices lie together are no modules."""
    save_random("qwen3-moe", tmp_path / "base")
    config, said = read_config(tmp_path / "base"), {"target_modules": ["q_proj", "gate_proj", "down_proj"]}
    adapter = read_adapter(
        save_adapter(tmp_path / "one", config, products=("self_attn.q_proj",), changes=said), config, "one"
    )
    assert len(adapter.matrices) == config.num_layers


def test_matrices_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    config = _config(tmp_path)
    folder = save_adapter(tmp_path / "bad", config)
    save_file({name: each.to(torch.int8) for name, each in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    with pytest.raises(BadAdapter, match=r"numbers of torch.int8 and torch.int8: expected fractions"):
        read_adapter(folder, config, "bad")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    """A folder with adapter_model.bin alone is refused by name, and so is one without a config."""
    config = _config(tmp_path)
    folder = save_adapter(tmp_path / "pickled", config)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(BadAdapter, match=r"adapter_model.bin is pickled, and never opened"):
        read_adapter(folder, config, "pickled")
    (folder / CONFIG).write_text(json.dumps([]))
    with pytest.raises(ParlayError):
        read_adapter(folder, config, "pickled")
    with pytest.raises(BadAdapter, match=f"no {CONFIG}"):
        read_adapter(tmp_path, config, "none")


def test_readers_refuse_ranks_for_which_the_compiled_decoder_has_no_room() -> None:
    header = (SOURCES / "adapters.h").read_text(encoding="utf-8")
    assert f"#define MOST_RANK {MOST_RANK} " in header
