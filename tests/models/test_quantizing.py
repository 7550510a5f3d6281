"""`parlay quantize`: files in fewer bits that Parlay and others read, from folders and from GGUF files."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from parlay.cli import main
from parlay.models.config import DecoderConfig
from parlay.models.gguf.blocks import WRITERS, encoded
from parlay.models.gguf.importance import ReadText, embedded, importance, run_layer
from parlay.models.gguf.metadata import lost_facts
from parlay.models.gguf.mixtures import FILE_TYPES, Mixed
from parlay.models.gguf.quantizing import Source, Written, gguf_tensors, quantize, source_of
from parlay.models.gguf.reader import read
from parlay.models.gguf.weights import mapped
from parlay.models.loading import load_tensors, load_tokenizer, load_weights, read_config
from parlay.models.native import NativeRunner
from parlay.models.random_decoder import save_decoder
from parlay.models.rope import cosines_and_sines
from parlay.models.torch_ops.packing import build_layer
from parlay.models.weights.formats import Format
from parlay.models.weights.fused import as_tensor
from parlay.models.weights.stored import StoredTensor
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.types import ParlayError, Segment
from tests.models import gguf_files

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LIKE_GGUF = (Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1, Format.Q8_0)
_LEFT = {
    Format.Q4_K: 0.0057,
    Format.Q5_K: 0.0014,
    Format.Q6_K: 0.00037,
    Format.Q3_K: 0.0275,
    Format.Q2_K: 0.105,
    Format.IQ4_NL: 0.0068,
    Format.IQ4_XS: 0.0069,
}
"""The most that may be left of normal numbers' squares as error; Q4_0 leaves 0.0082."""
_TEXT = "The quick brown fox jumps over 13 lazy dogs, and doesn't stop.\n" * 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def byte_tokenizer(size: int, expression: str = _QWEN2, alphabet: list[str] | None = None) -> PreTrainedTokenizerFast:
    """One like Qwen2's, with a template; letters outside of ``alphabet`` are lost."""
    made = Tokenizer(kinds.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(expression), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(use_regex=False, add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet,
        special_tokens=["<|pad|>", "<|begin|>", "<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", chat_template="{{ messages[0].content }}"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two layers whose rows are whole blocks of every format, in float32, with a tokenizer."""
    place = tmp_path / "tiny"
    config = DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=256,
        intermediate_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_context=256,
    )
    save_decoder(config, place)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    byte_tokenizer(320).save_pretrained(place)
    return place


def written(model: Path, name: str, out: Path) -> Written:
    return quantize(source_of(model), FILE_TYPES[name], out)


def formats(path: Path) -> dict[str, str]:
    return {info.name: info.format.name for info in read(path).tensors}


def sample(rows: int = 64) -> Tensor:
    return torch.randn(rows, 512, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("format", _LIKE_GGUF)
def test_blocks_of_32_are_those_of_the_package_gguf(format: Format) -> None:
    numbers = sample()
    numbers[3, :32] = 0
    numbers[4, 32:64] = 0.25
    theirs = gguf.quantize(numbers.numpy(), Kind[format.name])
    assert encoded(format, numbers).equal(torch.from_numpy(theirs))


@pytest.mark.parametrize("format", sorted(WRITERS, key=lambda format: format.number))
def test_other_readers_find_numbers_near_those_that_were_written(format: Format) -> None:
    numbers = sample()
    numbers[3, :256] = 0
    found = torch.from_numpy(gguf.dequantize(encoded(format, numbers).numpy(), Kind[format.name]).copy())
    assert not found[3, :256].any()
    if format in _LEFT:
        assert (found - numbers).square().mean() < _LEFT[format] * numbers.square().mean()


@pytest.mark.parametrize("format", sorted(set(WRITERS) - {Format.Q8_0}, key=lambda format: format.number))
def test_errors_are_smaller_where_they_count_more(format: Format) -> None:
    numbers, counts = sample(), torch.rand(512, generator=torch.Generator().manual_seed(1)) ** 4 + 0.01
    errors = [
        (torch.from_numpy(gguf.dequantize(encoded(format, numbers, known).numpy(), Kind[format.name]).copy()) - numbers)
        for known in (None, counts)
    ]
    plain, weighed = ((error.square() * counts).mean() for error in errors)
    assert weighed < 0.93 * plain


def test_mixtures_are_llama_cpps() -> None:
    """Layers of the first and last eighth, and each third between, get more bits; so does the head."""
    mixed = Mixed(FILE_TYPES["Q4_K_M"], layers=16, sharing=2, tied=False, weighed=False)
    more = [layer for layer in range(16) if mixed.format_of(f"blk.{layer}.ffn_down.weight", (8, 512)) is Format.Q6_K]
    assert more == [0, 1, 4, 7, 10, 13, 14, 15]
    chosen = {
        name: mixed.format_of(name, shape).name
        for name, shape in {
            "output.weight": (9, 512),
            "token_embd.weight": (9, 512),
            "blk.2.attn_v.weight": (8, 512),
            "blk.1.attn_v.weight": (8, 96),
            "blk.3.attn_q.weight": (8, 96),
            "blk.3.attn_k.weight": (8, 33),
            "blk.3.attn_norm.weight": (512,),
        }.items()
    }
    assert list(chosen.values()) == ["Q6_K", "Q4_K", "Q4_K", "Q8_0", "Q5_0", "F16", "F32"]
    weighed = Mixed(FILE_TYPES["Q4_0"], layers=16, sharing=2, tied=True, weighed=True)
    assert weighed.format_of("blk.1.ffn_down.weight", (8, 512)) is Format.Q4_1
    assert weighed.format_of("token_embd.weight", (8, 96)) is Format.Q8_0


def written_of(name: str, folder: Path, kind: str) -> Path:
    """The GGUF file of a random model of this layout, which stays in the folder."""
    save_random(name, folder)
    byte_tokenizer(VOCAB_SIZE, alphabet=list("abcdefghijklmnopqrstuvwxyzĠ.,'123")).save_pretrained(folder)
    out = folder / "model.gguf"
    written(folder, kind, out)
    return out


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "llama-llama3", "llama-yarn", "llama-linear", "mistral", "qwen2", "qwen3"]
)
def test_every_family_is_written_from_a_folder(name: str, tmp_path: Path) -> None:
    out = written_of(name, tmp_path, "F16")
    config, expected = read_config(out), read_config(tmp_path)
    assert (config.qkv_bias, config.qk_norm, config.tie_embeddings) == (
        expected.qkv_bias,
        expected.qk_norm,
        expected.tie_embeddings,
    )
    ours, theirs = (cosines_and_sines(each.rope, each.head_dim, 40) for each in (config, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    stored = load_tensors(tmp_path, expected)
    for key, weight in load_weights(out, config).items():
        exact = stored[key].float()
        assert as_tensor(weight, torch.float32).equal(exact if exact.ndim == 1 else exact.half().float())
    text = "the fox, 13 dogs."
    assert load_tokenizer(out).encode(text) == load_tokenizer(tmp_path).encode(text)


_FAMILIES = [
    *("gemma", "gemma2", "gemma3", "phi3", "phi4-mini", "olmo2", "olmo3", "smollm3", "granite", "ernie", "glm4"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "granite-moe", "granite-moe-shared", "gpt-oss"),
]


@pytest.mark.parametrize("name", _FAMILIES)
def test_every_family_that_gguf_can_name_is_written_from_a_folder(name: str, tmp_path: Path) -> None:
    """What is read back is the same decoder, with the numbers of the folder."""
    out = written_of(name, tmp_path, "BF16")
    config, expected = read_config(out), read_config(tmp_path)
    assert lost_facts(config, expected) == []
    stored = load_tensors(tmp_path, expected)
    for key, weight in load_weights(out, config).items():
        exact, found = stored[key].float(), as_tensor(weight, torch.float32)
        assert found.equal(exact) or found.equal(exact.bfloat16().float()), key


def test_models_that_no_keys_describe_are_refused_by_name(tmp_path: Path) -> None:
    reasons = {"mistral-window": "say window", "exaone4": "writes no GGUF files of this family"}
    reasons |= {"gemma4-moe": "of layers that differ", "gemma4-dense": "of layers that differ"}
    for name, reason in reasons.items():
        save_random(name, tmp_path / name)
        with pytest.raises(ParlayError, match=reason):
            source_of(tmp_path / name)


def test_a_tokenizer_keeps_its_tokens_its_ends_and_its_template(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    written(folder, "Q4_K_M", out)
    found, expected = load_tokenizer(out), load_tokenizer(folder)
    for text in (_TEXT, "Grüße  \n\n 42!", "a <|end|> b"):
        assert found.encode(text) == expected.encode(text)
    assert found.chat_template == expected.chat_template
    assert found.special_tokens_map == expected.special_tokens_map
    assert read_config(out).eos_ids == (2, 7)


def test_a_token_may_be_called_none(folder: Path, tmp_path: Path) -> None:
    """As in every vocabulary that saw Python; it is no special token that is missing."""
    tokenizer = byte_tokenizer(319)
    tokenizer.add_tokens(["None"])
    tokenizer.save_pretrained(folder)
    written(folder, "Q8_0", tmp_path / "model.gguf")
    assert load_tokenizer(tmp_path / "model.gguf").encode("a None") == load_tokenizer(folder).encode("a None")


def test_sentence_pieces_are_written_with_scores_in_the_order_of_merges(folder: Path, tmp_path: Path) -> None:
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("q", "u"), ("c", "k"), ("i", "ck"), ("h", "e"), ("qu", "ick")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thequickbrownfx"]
    tokens = list(dict.fromkeys([*tokens, *(left + right for left, right in merges)]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(kinds.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    out = tmp_path / "model.gguf"
    written(folder, "Q8_0", out)
    for text in ("the quick brown fox, thé", "</s>he", "quickthe"):
        assert load_tokenizer(out).encode(text) == load_tokenizer(folder).encode(text)


def test_a_tokenizer_that_gguf_has_no_words_for_is_refused(folder: Path) -> None:
    byte_tokenizer(320, expression=r"\p{L}+").save_pretrained(folder)
    with pytest.raises(ParlayError, match="no name for how it cuts text"):
        source_of(folder)


def test_a_file_is_written_from_another_and_keeps_its_keys(folder: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "q8.gguf", tmp_path / "q4.gguf"
    written(folder, "Q8_0", first)
    report = written(first, "Q4_0", second)
    keys = read(second).keys
    assert keys["general.file_type"] == FILE_TYPES["Q4_0"].number
    assert keys["general.quantization_version"] == 2
    assert set(read(first).keys) == set(keys)
    assert dict(report.formats) == {"Q4_0": 15, "F32": 5, "Q6_K": 1}
    source = load_weights(first, read_config(first))
    for name, weight in load_weights(second, read_config(second)).items():
        if isinstance(weight, StoredTensor) and weight.format is Format.Q4_0:
            exact = as_tensor(source[name], torch.float32)
            assert as_tensor(weight, torch.float32).equal(gguf_files.numbers(exact, Kind.Q4_0))


def test_no_matrix_gets_more_bits_than_it_has(folder: Path, tmp_path: Path) -> None:
    mixed, same = tmp_path / "mixed.gguf", tmp_path / "same.gguf"
    written(folder, "Q4_K_M", mixed)
    report = written(mixed, "Q5_0", same)
    before, after = formats(mixed), formats(same)
    assert report.kept == sum(before[name] == after[name] != "F32" for name in before) > 0
    fewer = written(mixed, "Q3_K_M", tmp_path / "fewer.gguf")
    assert fewer.kept + fewer.fell_back <= sum(kind != "F32" for kind in before.values()), "none is counted twice"
    with pytest.raises(ParlayError, match="--to Q8_0: no matrix of this model has more bits"):
        written(mixed, "Q8_0", tmp_path / "never.gguf")
    assert not (tmp_path / "never.gguf").exists()


def test_importance_is_the_mean_square_of_what_a_matrix_reads(folder: Path) -> None:
    config = read_config(folder)
    weights = load_weights(folder, config)
    ids = load_tokenizer(folder).encode(_TEXT)
    found = importance(config, weights, ReadText(ids))
    embedded = load_tensors(folder, config)["model.embed_tokens.weight"].float()[torch.tensor(ids)]
    normed = torch.nn.functional.rms_norm(
        embedded, (256,), as_tensor(weights["model.layers.0.input_layernorm.weight"], torch.float32), 1e-5
    )
    torch.testing.assert_close(found["blk.0.attn_q.weight"], normed.square().mean(0), rtol=1e-4, atol=1e-3)
    assert len(found) == 14
    with pytest.raises(ParlayError, match="the text has 3 tokens"):
        importance(config, weights, ReadText(ids[:3]))


def test_each_chunk_of_the_text_begins_as_the_text_does(folder: Path) -> None:
    """Models take the token for granted with which their texts begin."""
    config = read_config(folder)
    weights, ids = load_weights(folder, config), [3, *(7 * place % 50 + 5 for place in range(700))]
    (first, second) = embedded(config, weights, ReadText(ids, [3]))
    (whole,) = embedded(config, weights, ReadText([3, *ids[512:]]))
    assert len(first) == 512
    torch.testing.assert_close(second, whole)


@pytest.mark.parametrize("name", ["llama-yarn", "qwen3", *_FAMILIES])
def test_importance_is_computed_as_each_family_computes(name: str, tmp_path: Path) -> None:
    """What leaves a layer is what the decoder has there, and every matrix of a layer has its numbers."""
    save_random(name, tmp_path)
    config, ids = read_config(tmp_path), [7 * place % 50 + 5 for place in range(40)]
    weights = load_weights(tmp_path, config)
    runner = NativeRunner(
        config, weights, dtype=torch.float32, device=torch.device("cpu"), max_tokens_cached=64, name=name
    )
    runner.open(0, ids)
    assert runner.reserve(0, len(ids))
    states = runner.forward([Segment(0, ids)], taps=range(config.num_layers)).taps
    for layer in range(config.num_layers - 1):
        found = run_layer(config, build_layer(config, weights, layer), layer, states[layer])
        torch.testing.assert_close(found, states[layer + 1], rtol=1e-4, atol=1e-4)
    tensors = gguf_tensors(config, load_tensors(tmp_path, config), json.loads((tmp_path / "config.json").read_text()))
    known = importance(config, weights, ReadText(ids))
    assert {key: counts.shape[-1] for key, counts in known.items()} == {
        key: weight.shape[-1]
        for key, weight in tensors.items()
        if key.startswith("blk.") and key.endswith(".weight") and len(weight.shape) > 1 and "_gate_inp" not in key
    }


def test_each_expert_is_weighed_by_the_tokens_that_chose_it(tmp_path: Path) -> None:
    """Their sums are what all tokens give, as often as they choose; rows of one expert are rounded with its own."""
    save_random("qwen2-moe", tmp_path)
    config = read_config(tmp_path)
    found = importance(config, load_weights(tmp_path, config), ReadText([7 * place % 50 + 5 for place in range(64)]))
    experts, shared = found["blk.0.ffn_up_exps.weight"], found["blk.0.ffn_up_shexp.weight"]
    torch.testing.assert_close(experts.sum(0), 2 * shared, rtol=0.02, atol=1e-3)
    numbers = torch.randn(6, 4, 256, generator=torch.Generator().manual_seed(0))
    known = torch.rand(6, 256, generator=torch.Generator().manual_seed(1)) ** 4
    source = Source(config, [], {"blk.0.ffn_up_exps.weight": numbers})
    quantize(source, FILE_TYPES["Q4_0"], tmp_path / "out.gguf", importance={"blk.0.ffn_up_exps.weight": known})
    (stored,) = [stored for _, stored in mapped(read(tmp_path / "out.gguf"))]
    assert stored.data[3].equal(encoded(Format.Q4_0, numbers[3], known[3]))


def test_nothing_is_left_where_a_file_can_not_be_finished(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "model.gguf"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ParlayError, match=r"can't write .*model\.gguf"):
            written(folder, "Q8_0", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.parent.iterdir())


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str]:
    """Run it, and return the exit code and all that it printed."""
    try:
        code: object = main(("quantize", *words))
    except SystemExit as ended:
        code = ended.code
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_the_command_writes_a_file_and_says_what_is_in_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "model.gguf", tmp_path / "text.txt"
    text.write_text(_TEXT)
    words = (str(folder), "--to", "q4_k_m", "-o", str(out))
    code, printed = command(capsys, *words, "--imatrix", str(text))
    assert code == 0
    assert "bits a weight" in printed
    assert read(out).keys["quantize.imatrix.dataset"] == "text.txt"
    code, printed = command(capsys, *words)
    assert code == 2
    assert "exists already" in printed
    assert command(capsys, *words, "--force")[0] == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--to", "Q4_K_X", "-o", "a.gguf"), "did you mean Q4_K"),
        (("--to", "Q4_0", "-o", "a.bin"), "must end in .gguf"),
        (("--to", "Q4_0", "-o", "a.gguf", "--imatrix", "nowhere.txt"), "can't read the text nowhere.txt of --imatrix"),
    ],
)
def test_what_can_not_work_is_said_before_the_model_is_opened(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = command(capsys, "/nowhere/at/all", *words)
    assert code == 2
    assert reason in printed
