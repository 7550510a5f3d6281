"""SmolLM2-135M-Instruct as `parlay pull smollm2-135m` brings it, and as bfloat16: real text, the same under every
strategy, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from parlay import LLM, SamplingParams
from parlay.llm.outputs import RequestOutput
from parlay.models.fetch.pulled import place_of
from parlay.models.fetch.resolving import BUILT_IN_DRAFTS
from parlay.testing.checkpoints import save_dense
from parlay.text.chat_template import render
from parlay.types import Exactness, Segment

NAME = "smollm2-135m"
pytestmark = pytest.mark.skipif(
    not place_of(NAME).is_file(), reason=f"the file is not in the cache: `parlay pull {NAME}` or `make demo` brings it"
)

QUESTION = [{"role": "user", "content": "What is the opposite of hot?"}]
RENAME = [
    {"role": "user", "content": "Rename the variable x to total:\n\nx = 0\nfor n in data:\n    x = x + n\nprint(x)"}
]
BLANK = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(NAME)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The same weights as a folder in bfloat16."""
    folder = tmp_path_factory.mktemp("bf16")
    save_dense(place_of(NAME), folder)
    return LLM(str(folder))


@pytest.fixture(params=["llm", "dense"])
def form(request: pytest.FixtureRequest) -> LLM:
    found: LLM = request.getfixturevalue(request.param)
    return found


def test_both_forms_by_their_paths_find_the_draft_model_of_the_package(dense: LLM) -> None:
    file = LLM(str(place_of(NAME)))
    for each in (file, dense):
        assert each.runner.spec.name != NAME
        each.generate(["The river"], SamplingParams(temperature=0, max_tokens=4), strategy="draft-model")
        assert each.draft_models == (BUILT_IN_DRAFTS[NAME],)
    file.close()


def test_the_file_brings_tokenizer_template_and_ends(llm: LLM) -> None:
    """Ids as llama.cpp has them for the same file."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    text = render(tokenizer, QUESTION)
    asked = "<|im_start|>user\nWhat is the opposite of hot?<|im_end|>\n<|im_start|>assistant\n"
    assert text == BLANK + asked
    assert tokenizer.encode("Hello, world 1984\n") == [19556, 28, 905, 216, 33, 41, 40, 36, 198]
    assert llm.runner.spec.eos_ids == (2,)
    assert tokenizer.decode([2]) == "<|im_end|>"


def test_it_answers_and_ends(form: LLM) -> None:
    sample = form.chat([QUESTION], SamplingParams(temperature=0, max_tokens=200))[0].outputs[0]
    assert "cold" in sample.text
    assert sample.finish_reason == "stop"


GREEDY, SAMPLED = (SamplingParams(temperature=temperature, max_tokens=32, seed=7) for temperature in (0.0, 0.8))


@pytest.fixture(scope="module")
def plain() -> Callable[[LLM, SamplingParams], list[RequestOutput]]:
    """The answers of plain decoding, decoded once."""
    known: dict[tuple[int, float], list[RequestOutput]] = {}

    def answers(form: LLM, params: SamplingParams) -> list[RequestOutput]:
        key = id(form), params.temperature
        if key not in known:
            known[key] = form.chat([RENAME, QUESTION], params, strategy="none")
        return known[key]

    return answers


@pytest.mark.parametrize(
    ("form", "params", "strategy"),
    [
        ("llm", GREEDY, "prompt-lookup"),
        ("llm", GREEDY, "lookahead"),
        ("llm", SAMPLED, "suffix-decoding"),
        ("llm", SAMPLED, "layer-skip"),
        ("dense", GREEDY, "suffix-decoding"),
        ("dense", GREEDY, "layer-skip"),
        ("dense", SAMPLED, "prompt-lookup"),
        ("dense", SAMPLED, "lookahead"),
    ],
    indirect=["form"],
)
def test_strategies_write_what_plain_decoding_writes(
    form: LLM,
    params: SamplingParams,
    strategy: str,
    plain: Callable[[LLM, SamplingParams], list[RequestOutput]],
) -> None:
    """Each on both forms of the weights, on one greedy and on the other sampled."""
    fast = form.chat([RENAME, QUESTION], params, strategy=f"{strategy}:policy=fixed")
    for one, other in zip(plain(form, params), fast, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
        assert other.outputs[0].exactness == Exactness.BITS


@pytest.mark.parametrize(("form", "method"), [("llm", "eagle3"), ("dense", "medusa")], indirect=["form"])
def test_the_heads_that_come_with_the_package_draft(
    form: LLM, plain: Callable[[LLM, SamplingParams], list[RequestOutput]], method: str
) -> None:
    """Without its path being named; a chain of random guesses would have 1.0 tokens per step.

    Each on one form of the weights: a head reads states, whatever products made them.
    """
    fast = form.chat([RENAME, QUESTION], GREEDY, strategy=f"{method}:policy=fixed")
    for one, other in zip(plain(form, GREEDY), fast, strict=True):
        assert other.outputs[0].token_ids == one.outputs[0].token_ids
    committed = sum(len(out.outputs[0].token_ids) for out in fast)
    assert committed / sum(out.outputs[0].metrics.steps for out in fast) > 1.2


def test_a_row_has_the_same_bits_in_any_company(form: LLM) -> None:
    """Zero differing logits: read at once, in pieces, and beside another text."""
    tokens = tuple(range(100, 140))
    whole = logits(form, 1, [tokens])
    assert torch.equal(whole, logits(form, 2, [tokens[:1], tokens[1:8], tokens[8:25], tokens[25:]]))
    opened(form, 3, tokens)
    opened(form, 4, tokens)
    beside = form.runner.forward([Segment(4, tokens[:9]), Segment(3, tokens)]).logits_RV
    assert torch.equal(whole, beside[9:])
    form.runner.release(3)
    form.runner.release(4)


def opened(llm: LLM, sequence: int, tokens: tuple[int, ...]) -> None:
    """A sequence that shares nothing with any other."""
    llm.runner.open(sequence, tokens, f"alone {sequence}")
    assert llm.runner.reserve(sequence, len(tokens))


def logits(llm: LLM, sequence: int, pieces: list[tuple[int, ...]]) -> torch.Tensor:
    """``[tokens, vocabulary]`` of a text that is read piece by piece."""
    opened(llm, sequence, tuple(token for piece in pieces for token in piece))
    parts = []
    for piece in pieces:
        parts.append(llm.runner.forward([Segment(sequence, piece)]).logits_RV)
        llm.runner.keep(sequence, ())
    llm.runner.release(sequence)
    return torch.cat(parts)


def test_the_draft_model_that_comes_with_the_package_drafts_the_same_text(llm: LLM) -> None:
    """Named or not: 40 % of its guesses on held-out texts are right, so of a chain of two some are."""
    params = SamplingParams(temperature=0, max_tokens=48)
    (plain,) = llm.chat([QUESTION], params, strategy="none")
    (drafted,) = llm.chat([QUESTION], params, strategy="draft-model:policy=fixed,k=2")
    (named,) = llm.chat([QUESTION], params, strategy=f"draft-model:model={NAME}-draft,policy=fixed,k=2")
    assert drafted.outputs[0].token_ids == named.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.outputs[0].metrics.accepted_tokens > 0
