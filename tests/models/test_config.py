"""read_config says what transformers would compute, and refuses by name what the native decoder can't."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CONFIG_OF_MODELS

from parlay.models.config import RopeConfig, UnsupportedModel
from parlay.models.families.reading import read_config
from parlay.models.families.table import CAUSAL
from parlay.testing.checkpoints import NATIVE, save_random
from parlay.types import ParlayError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LAYER_TYPES = ["full_attention", "sliding_attention"]


def written(directory: Path, config: dict[str, Any], **changes: Any) -> Path:
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


@pytest.mark.parametrize("name", NATIVE)
def test_saved_checkpoints_read_back_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    save_random(name, tmp_path)
    ours, theirs = read_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert (ours.hidden_size, ours.num_kv_heads, ours.max_context) == (32, 2, 256)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert (ours.qk_norm, ours.qkv_bias) == (name == "qwen3", name.startswith("qwen2"))
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.kind == theirs.rope_parameters["rope_type"]


def test_old_and_new_spellings_of_rope_mean_the_same(tmp_path: Path) -> None:
    old = read_config(written(tmp_path, LLAMA, rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}))
    new_parameters = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    new = read_config(written(tmp_path, LLAMA, rope_parameters=new_parameters))
    assert old == new
    assert new.rope == RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, original_max_context=64, low_freq_factor=1.0, high_freq_factor=4.0
    )


@pytest.mark.parametrize(
    "numbers",
    [
        {"factor": 4.0},
        {"factor": 4.0, "original_max_position_embeddings": 32},
        {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 32},
        {"factor": 4.0, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2},
    ],
)
def test_yarn_attention_factor_is_the_one_transformers_computes(numbers: dict[str, Any], tmp_path: Path) -> None:
    directory = written(tmp_path, LLAMA, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, **numbers})
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(directory), "cpu")
    rope = read_config(directory).rope
    assert rope.attention_factor == pytest.approx(expected, abs=0)
    assert rope.original_max_context == numbers.get("original_max_position_embeddings", 128)


def test_positions_stretched_by_yarn_reach_as_far_as_they_are_stretched(tmp_path: Path) -> None:
    """Users add rope_scaling to a published config.json, and leave its context as it is."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96}
    assert read_config(written(tmp_path, LLAMA, rope_scaling=yarn)).max_context == 384
    assert read_config(written(tmp_path, LLAMA, rope_scaling=yarn, max_position_embeddings=512)).max_context == 512


@pytest.mark.parametrize("architecture", [family.architecture for family in CAUSAL if not family.left_out])
def test_a_norm_has_the_floor_of_its_family_where_none_is_said(architecture: str, tmp_path: Path) -> None:
    theirs = next(kind for kind in CONFIG_OF_MODELS.values() if kind.__name__ == architecture).config_class()
    sizes = {**LLAMA, "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 64}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    own = {"layer_types": ["full_attention"] * 2, **(experts if architecture == "Glm4MoeForCausalLM" else {})}
    assert read_config(written(tmp_path, {**sizes, **own}, architectures=[architecture])).rms_norm_eps == (
        theirs.rms_norm_eps
    )


@pytest.mark.parametrize(
    "said",
    [
        {"architectures": ["Phi3ForCausalLM"], "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "normalization_function": "rmsnorm",
            "init_method": "mup",
            "num_local_experts": 0,
            "layer_types": ["attention", "attention"],
        },
        {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        {"architectures": ["GptOssForCausalLM"], "experts_per_token": 4, "initial_context_length": 4096},
    ],
)
def test_keys_of_published_configs_that_change_nothing_are_accepted(said: dict[str, Any], tmp_path: Path) -> None:
    assert read_config(written(tmp_path, LLAMA, **said)).architecture == said["architectures"][0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Phi3ForCausalLM"], "full_attn_mod": 2}, "full_attn_mod 2"),
        ({"normalization_function": "layernorm"}, "normalization_function 'layernorm'"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "quip"}}, "quant_method 'quip'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "no short_factor"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"num_key_value_heads": 3}, "4 heads over 3"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "layers of 'chunked_attention'",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional attention"),
    ],
)
def test_what_the_native_decoder_does_not_compute_is_refused_by_name(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        read_config(written(tmp_path, LLAMA, **changes))
    assert "\n" not in str(caught.value)
    assert changes.get("architectures", LLAMA["architectures"])[0] in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False},
        {
            "architectures": ["Qwen3ForCausalLM"],
            "sliding_window": 64,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
    ],
)
def test_a_sliding_window_that_hides_nothing_counts_as_none(changes: dict[str, Any], tmp_path: Path) -> None:
    assert read_config(written(tmp_path, LLAMA, **changes)).layers == ()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, [64, 64]),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": LAYER_TYPES,
            },
            [None, 64],
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            [None, 64],
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64}, [64, None]),
    ],
)
def test_each_layer_has_the_window_that_its_family_gives_it(
    changes: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    assert [form.window for form in read_config(written(tmp_path, LLAMA, **changes)).layers] == windows


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, LLAMA)).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_config(tmp_path).eos_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    images = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**LLAMA, "eos_token_id": [5]}}
    assert read_config(written(tmp_path, images)).eos_ids == (5,)


def test_broken_config_files_are_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ParlayError, match="is this a model's folder"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ParlayError, match="can't read"):
        read_config(tmp_path)
    incomplete = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(UnsupportedModel, match="no hidden_size"):
        read_config(written(tmp_path, incomplete))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"hidden_size": None},
        {"num_attention_heads": "x"},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 0},
        {"vocab_size": -5},
        {"head_dim": 7},
        {"num_hidden_layers": 10_001},
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"hidden_size": 10**12},
        {"hidden_size": float("nan")},
        {"num_attention_heads": 10**9, "hidden_size": 10**6},
        {"num_key_value_heads": -4},
        {"head_dim": 10**9},
        {"max_position_embeddings": 10**15},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1e-5},
        {"rope_theta": float("nan")},
        {"rope_theta": -1e4},
        {"rope_scaling": {"type": "linear", "factor": float("nan")}},
        {"rope_scaling": {"type": "linear", "factor": -2.0}},
        {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": float("inf")}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": -8}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": -0.5}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e308}},
        {"rope_scaling": {"type": "linear", "factor": 1e-320}},
        {"rope_theta": 1.0000001, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": "yarn"},
        {"rms_norm_eps": []},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
        {"architectures": ["MistralForCausalLM"], "sliding_window": "wide"},
        {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 0},
        {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": float("nan")},
        {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1.0},
        {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": float("inf")},
        {"eos_token_id": [1, "a"]},
    ],
)
def test_values_without_sense_or_measure_are_one_clear_line(changes: dict[str, Any], tmp_path: Path) -> None:
    """And no model for transformers either: the file is broken, whoever reads it."""
    with pytest.raises(ParlayError, match=r"config\.json(: [\w ]+ must be| can't be read)") as caught:
        read_config(written(tmp_path, LLAMA, **changes))
    assert not isinstance(caught.value, UnsupportedModel)
    assert "\n" not in str(caught.value)


def test_a_wrong_end_token_is_told_with_the_file_that_has_it(tmp_path: Path) -> None:
    written(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ParlayError, match=r"generation_config\.json: eos_token_id must be a token id or .*, got x$"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": [1]}, "hidden_size must be a whole number, got [1]"),
        ({"rope_theta": "x"}, "rope_theta must be a number, got x"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be a number, got true"),
        ({"rms_norm_eps": False}, "rms_norm_eps must be a number, got false"),
        ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "factor must be a number, got true"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object, got [1]"),
        ({"rope_scaling": {"rope_type": "linear", "factor": {}}}, "rope_scaling.factor must be a number, got {}"),
        ({"hidden_size": None}, "hidden_size must be a whole number, got null"),
        ({"hidden_size": 256.5}, "hidden_size must be a whole number, got 256.5"),
        ({"hidden_act": []}, "hidden_act must be a name, got []"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1 and at most 10000, got 0"),
    ],
)
def test_a_value_of_another_type_is_named_without_words_of_python(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ParlayError, match=re.escape(said)):
        read_config(written(tmp_path, LLAMA, **changes))


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["GPT2LMHeadModel"], "n_layer": 10**9},
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 10**9},
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"num_hidden_layers": 10**9}},
    ],
)
def test_a_model_that_would_never_be_built_is_refused_before_transformers_tries(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ParlayError, match="must be at most 10000") as caught:
        read_config(written(tmp_path, config))
    assert not isinstance(caught.value, UnsupportedModel)


def test_a_config_that_is_nested_too_deep_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ParlayError, match="can't read") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_pipe_is_no_config_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ParlayError, match="it is not a file"):
        read_config(tmp_path)
