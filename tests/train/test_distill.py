"""`parlay train distill`: a small model learns from a target, from its own answers, or from a server's, and drafts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parlay import models
from parlay.llm import LLM
from parlay.models.fetch.resolving import resolve
from parlay.models.loading import load_tokenizer
from parlay.options import LoadOptions, UsageError
from parlay.testing.checkpoints import VOCAB_SIZE, save_random
from parlay.testing.toy_tokenizers import toy_tokenizer
from parlay.text.prompts import TokensPrompt
from parlay.train.data.features import FeatureStore
from parlay.train.data.preparing import Answering, answer_as
from parlay.train.data.teacher_api import TeacherApi, ask
from parlay.train.data.user_texts import TrainingText, load_shard, save_shard, shard_path, shards
from parlay.train.divergences import DIVERGENCES, SummedInParts
from parlay.train.heads import DISTILL, fit
from parlay.train.loop import acceptance
from parlay.train.options import DistillTrainOptions
from parlay.train.recipes import distill
from parlay.train.recipes.target import Target
from parlay.types import ParlayError, SamplingParams
from tests.models import gguf_files

_SMALL: dict[str, Any] = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 32}


@pytest.fixture(scope="module")
def work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts that the target wrote greedily, each from another token on, and its states of them."""
    folder = tmp_path_factory.mktemp("work")
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        prompts = [TokensPrompt(prompt_token_ids=[start % VOCAB_SIZE, start]) for start in range(40)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=22), strategy="none")
    texts = [TrainingText((*out.prompt_token_ids, *out.outputs[0].token_ids), 2) for out in outputs]
    save_shard(shard_path(folder, 0), texts)
    featured(model, folder)
    return folder


def featured(model: Path, folder: Path) -> None:
    runner = models.load(str(model), LoadOptions(dtype="float32", device="cpu"))
    FeatureStore(folder, Target.named(str(model)).stored_layers()).compute(runner)


def options(model: Path, work: Path, out: Path, **more: Any) -> DistillTrainOptions:
    shared = {"model": str(model), "work": work, "out": out, "batch_tokens": 256, "updates": 5, "slow_rate": 3e-3}
    return DistillTrainOptions(**{**shared, **_SMALL, **more})


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_student_learns_by_every_divergence(divergence: str, model: Path, work: Path, tmp_path: Path) -> None:
    """Steps are counted, not timed: after so many the student guesses more than before, and is nearer its teacher."""
    target = Target.named(str(model))
    texts = FeatureStore(work, target.stored_layers()).load()
    asked = options(model, tmp_path, tmp_path / "out", divergence=divergence)
    torch.manual_seed(0)
    recipe = distill.start(asked, target, texts)
    optimizer = torch.optim.AdamW(recipe.module.parameters(), lr=3e-3)
    batch = next(distill_batches(texts, asked))
    before, first = acceptance(recipe, texts, asked)[0], float(recipe.loss(batch).detach())
    for _ in range(60):
        optimizer.zero_grad()
        recipe.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(recipe.loss(batch).detach()) < 0.9 * first
    assert acceptance(recipe, texts, asked)[0] > before


def distill_batches(texts: Any, asked: DistillTrainOptions) -> Iterator[Any]:
    from parlay.train.data.batches import endless

    return endless(texts, 4096, asked.longest, 0)


def test_a_student_is_a_model_that_drafts_for_its_target(model: Path, work: Path, tmp_path: Path) -> None:
    target, out = Target.named(str(model)), tmp_path / "draft"
    texts = FeatureStore(work, target.stored_layers()).load()
    said = fit(DISTILL, options(model, tmp_path, out), target, texts)
    assert said.startswith(str(out))
    assert "distill for" in (out / "README.md").read_text()
    again = options(model, tmp_path, out, student=str(out))
    with pytest.raises(UsageError, match=r"distill\.safetensors is from a run with student=, not .+: give"):
        fit(DISTILL, again, target, texts)
    (tmp_path / "again").mkdir()
    said = fit(DISTILL, replace(again, work=tmp_path / "again"), target, texts)
    assert said.startswith(str(out)), "a student learns further"

    prompt, params = TokensPrompt(prompt_token_ids=[3, 4]), SamplingParams(temperature=0, max_tokens=16)
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        plain, drafted = (
            llm.generate([prompt], params, strategy=strategy)[0].outputs[0]
            for strategy in ("none", f"draft-model:model={out},policy=fixed")
        )
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics is not None
    assert drafted.metrics.draft_tokens > 0


@pytest.mark.parametrize("embedding", ["", "Q5_0", "Q4_0"])
def test_the_student_of_a_gguf_file_is_one_with_the_same_tokenizer(embedding: str, tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "target.gguf", resolve("parlay-mini-draft"), tokenizer=True)
    target = Target.named(str(path))
    asked = options(path, tmp_path, tmp_path / "draft", embedding=embedding)
    torch.manual_seed(0)
    recipe = distill.start(asked, target, [])
    recipe.save(asked.out, "---\n---\n")
    (written,) = asked.out.glob("*.gguf")
    again = Target.named(str(written))
    for name, tensor in recipe.module.state_dict().items():
        kept = again.tensor(name)
        if tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType[embedding if embedding and "embed" in name else "Q8_0"]
            tensor = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
        assert torch.equal(kept, tensor), name
    text = "def add(a, b):\n    return a + b  # naïve"
    assert load_tokenizer(written).encode(text) == load_tokenizer(path).encode(text)
    with LLM(str(path), device="cpu") as llm:
        plain, drafted = (
            llm.generate("Once", SamplingParams(temperature=0, max_tokens=12), strategy=strategy)[0].outputs[0].text
            for strategy in ("none", f"draft-model:model={written},policy=fixed")
        )
    assert drafted == plain


def test_a_student_writes_for_itself_and_nothing_is_measured_on_that(model: Path, work: Path, tmp_path: Path) -> None:
    """On-policy: prompts of the target's texts, answers of the student's, distributions of the target's."""
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as student:
        answer_as(student, work, tmp_path, Answering(tokens=9, seed=1))
    (path,) = shards(tmp_path)
    texts = load_shard(path)
    assert [text.ids[:2] for text in texts] == [text.ids[:2] for text in load_shard(shards(work)[0])]
    assert all(text.answer == len(text.ids) for text in texts)
    (tmp_path / "given").mkdir()
    save_shard(shard_path(tmp_path / "given", 0), texts)  # which have no prompts
    answer_as(student, tmp_path / "given", tmp_path / "none", Answering(tokens=9, seed=1))
    assert not shards(tmp_path / "none")
    featured(model, tmp_path)
    target = Target.named(str(model))
    asked = options(model, tmp_path, tmp_path / "out")
    read = FeatureStore(tmp_path, target.stored_layers()).load()
    assert acceptance(distill.start(asked, target, read), read, asked) == (0, 0, 0)


def test_a_server_that_dies_half_way_is_asked_again_for_what_is_missing(tmp_path: Path) -> None:
    prompts = [f"prompt {number}" for number in range(80)]
    tokenizer = load_tokenizer(resolve("parlay-mini"))
    with served(dies_after=40) as (url, seen):
        with pytest.raises(ParlayError, match="answers 503"):
            ask(tmp_path, prompts, TeacherApi(url, "m", 8), tokenizer)
        assert len(shards(tmp_path)) == 1
    with served(dies_after=1000) as (url, seen):
        ask(tmp_path, prompts, TeacherApi(url, "m", 8), tokenizer)
        assert sorted(seen) == sorted(prompts[32:])
    texts = [text for path in shards(tmp_path) for text in load_shard(path)]
    assert len(texts) == 80
    assert tokenizer.decode(list(texts[3].ids[texts[3].answer :]), skip_special_tokens=True) == "answer to prompt 3"
    assert texts[3].ids[-1] == tokenizer.eos_token_id
    assert texts[5].ids[-1] != tokenizer.eos_token_id, "an answer that was cut off has no end"
    with pytest.raises(ParlayError, match="can't be reached"):
        ask(tmp_path / "new", prompts, TeacherApi("http://127.0.0.1:9", "m", 8), tokenizer)
    with pytest.raises(ParlayError, match="expected an address"):
        ask(tmp_path / "new", prompts, TeacherApi("file:///etc", "m", 8), tokenizer)


class served:
    """A server that answers so many prompts, and then 503."""

    def __init__(self, dies_after: int) -> None:
        self._seen: list[str] = []
        seen = self._seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][0]["content"]
                seen.append(prompt)
                good = len(seen) <= dies_after
                self.send_response(200 if good else 503)
                self.end_headers()
                reason = "length" if prompt == "prompt 5" else "stop"
                reply = {"choices": [{"message": {"content": f"answer to {prompt}"}, "finish_reason": reason}]}
                self.wfile.write(json.dumps(reply).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> tuple[str, list[str]]:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/v1", self._seen

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_text_alone_teaches_where_there_are_no_states(model: Path, work: Path, tmp_path: Path) -> None:
    target = Target.named(str(model))
    texts = [
        replace(text, numbers_TF=torch.zeros(len(text.ids_T), 0), exponents_TL=None)
        for text in FeatureStore(work, target.stored_layers()).load()
    ]
    prompts = tmp_path / "prompts.jsonl"
    asked = options(model, tmp_path, tmp_path / "out", url="http://127.0.0.1:9/v1", url_model="m", prompts=prompts)
    recipe = distill.start(asked, target, texts)
    recipe.loss(next(distill_batches(texts, asked))).backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None for weight in recipe.module.parameters())


def test_divergences_are_what_their_formulas_say() -> None:
    torch.manual_seed(0)
    log_p, log_q = (torch.randn(5, 11).log_softmax(-1) for _ in range(2))
    log_m = ((log_p.exp() + log_q.exp()) / 2).log()

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return F.kl_div(log_b, log_a, log_target=True, reduction="none").sum(-1)

    expected = {
        "forward": kl(log_p, log_q),
        "reverse": kl(log_q, log_p),
        "jsd": (kl(log_p, log_m) + kl(log_q, log_m)) / 2,
        "tvd": 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1),
    }
    for name, of in DIVERGENCES.items():
        torch.testing.assert_close(of(log_p, log_q), expected[name], msg=name)
        torch.testing.assert_close(of(log_p, log_p), torch.zeros(5), atol=1e-6, rtol=0)


def test_a_loss_in_parts_has_the_gradients_of_the_whole() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(7, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    labels = torch.arange(7)
    whole = F.cross_entropy(hidden @ head.T, labels, reduction="sum")
    expected = torch.autograd.grad(3 * whole, (hidden, head))
    parts = SummedInParts.apply(  # type: ignore[no-untyped-call]
        hidden, head, lambda logits, part: F.cross_entropy(logits, labels[part], reduction="sum"), 3
    )
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(torch.autograd.grad(3 * parts, (hidden, head)), expected)


def test_wishes_that_can_not_be_met_are_errors(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name the model that writes"):
        DistillTrainOptions(source="student")
    with pytest.raises(UsageError, match="url_model"):
        DistillTrainOptions(url="http://127.0.0.1:8000/v1")
    with pytest.raises(UsageError, match="remove texts"):
        DistillTrainOptions(url="http://127.0.0.1:8000/v1", url_model="m", prompts=tmp_path, texts=tmp_path)
    with pytest.raises(UsageError, match="remove whole=False"):
        DistillTrainOptions(student="x", source="student", whole=False)
    with pytest.raises(UsageError, match="forward, reverse"):
        DistillTrainOptions(divergence="hellinger")
    other = options(model, tmp_path, tmp_path / "out", student="parlay-mini-draft")
    with pytest.raises(ParlayError, match="tokenizer"):
        distill.start(other, Target.named(str(model)), [])


def test_a_folder_has_no_formats_of_blocks(model: Path, tmp_path: Path) -> None:
    asked = options(model, tmp_path, tmp_path / "out", embedding="Q4_0")
    with pytest.raises(ParlayError, match=r"embedding=Q4_0: .* is a folder"):
        distill.start(asked, Target.named(str(model)), [])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with biases and tied embeddings, of three layers and the target's vocabulary."""
    folder = tmp_path_factory.mktemp("qwen")
    save_random("qwen2", folder)
    return folder


def test_a_student_is_cut_out_of_a_model(qwen: Path, model: Path, work: Path, tmp_path: Path) -> None:
    """Layers that are named, embedding and norm are those of the model; the last layer and the norm learn."""
    target, out = Target.named(str(model)), tmp_path / "draft"
    texts = FeatureStore(work, target.stored_layers()).load()
    asked = options(model, tmp_path, out, cut_from=str(qwen), keep_layers="0,2", learning_layers=1, matrix_rate=0.02)
    recipe = distill.start(asked, target, texts)
    whole, before = Target.named(str(qwen)), {n: t.clone() for n, t in recipe.module.state_dict().items()}
    for name, tensor in before.items():
        assert tensor.equal(whole.tensor(name.replace("layers.1.", "layers.2."))), name
    fit(DISTILL, asked, target, texts)
    found = Target.named(str(out))
    assert (found.config.num_layers, found.config.qkv_bias, found.config.architecture) == (2, True, "Qwen2ForCausalLM")
    changed = {name for name, tensor in before.items() if not found.tensor(name).equal(tensor.bfloat16().float())}
    assert changed
    assert all(name.startswith(("model.layers.1.", "model.norm.")) for name in changed)
    prompt, params = TokensPrompt(prompt_token_ids=[3, 4]), SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(model), tokenizer=toy_tokenizer(VOCAB_SIZE), dtype="float32", device="cpu") as llm:
        plain, drafted = (
            llm.generate([prompt], params, strategy=strategy)[0].outputs[0].token_ids
            for strategy in ("none", f"draft-model:model={out},policy=fixed")
        )
    assert drafted == plain


def test_a_student_is_cut_out_of_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "target.gguf", resolve("parlay-mini"), tokenizer=True)
    target = Target.named(str(path))
    asked = options(path, tmp_path, tmp_path / "draft", cut_from=str(path), layers=2)
    recipe = distill.start(asked, target, [])
    recipe.save(asked.out, "---\n---\n")
    (written,) = asked.out.glob("*.gguf")
    found = Target.named(str(written))
    assert (found.config.num_layers, found.config.qk_norm) == (2, True)
    last = target.tensor(f"model.layers.{target.config.num_layers - 1}.mlp.down_proj.weight")
    expected = gguf_files.numbers(last, gguf.GGMLQuantizationType.Q8_0)
    assert found.tensor("model.layers.1.mlp.down_proj.weight").equal(expected)


@pytest.mark.parametrize("layers", ["0,9", "2,1", "one", "", "0,0"])
def test_layers_that_can_not_be_kept_are_named(
    layers: str, qwen: Path, model: Path, work: Path, tmp_path: Path
) -> None:
    asked = options(model, work, tmp_path, cut_from=str(qwen), keep_layers=layers)
    cut = Target.named(str(qwen))
    if not layers:
        assert distill.cut_out(cut, asked).config.num_layers == 1
        return
    with pytest.raises(UsageError, match="give rising numbers from 0 to 2"):
        distill.cut_out(cut, asked)


def test_options_of_a_cut_need_a_model_to_cut(model: Path, work: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need cut_from=MODEL"):
        options(model, work, tmp_path, keep_layers="0,1")
    with pytest.raises(UsageError, match="remove one of them"):
        options(model, work, tmp_path, cut_from="a", student="b")
