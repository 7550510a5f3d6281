"""The plug-in for SGLang against the signatures that its source has: SGLang itself was never run here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parlay import sglang
from parlay.options import UsageError
from parlay.sglang import Texts, as_trees, options_from, register

VOCAB, WIDTH = 50, 6


@dataclass
class Req:
    """The fields of ``Req`` that are read."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)


class CustomSpecAlgo:
    """``sglang/srt/speculative/spec_registry.py``: what a plug-in may subclass."""

    def __init__(
        self, name: str, factory: Any, *, supports_overlap: bool = False, validate_server_args: Any = None
    ) -> None:
        self.name, self.factory = name, factory

    def is_ngram(self) -> bool:
        return False

    def handle_server_args(self, server_args: Any) -> None: ...


class NGRAMWorker:
    """``sglang/srt/speculative/ngram_worker.py``: a step asks for drafts, verifies them, and updates the store."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        self.server_args = server_args
        self.model_runner = target_worker.model_runner
        self.draft_token_num = server_args.speculative_num_draft_tokens

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        raise AssertionError("SGLang's own drafts")

    def _update_ngram_corpus(self, batch: Any) -> None:
        raise AssertionError("SGLang's own store")

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
        if not batch.forward_mode.is_decode():
            return None
        found = self._prepare_draft_tokens(batch)
        self._update_ngram_corpus(batch)
        return found


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's modules, as far as they are imported, and what was registered by name."""
    found: dict[str, Any] = {}

    class SpeculativeAlgorithm:
        """``sglang/srt/speculative/spec_info.py``."""

        @classmethod
        def register(
            cls,
            name: str,
            *,
            supports_overlap: bool = False,
            validate_server_args: Any = None,
            spec_class: type[Any] = CustomSpecAlgo,
        ) -> Callable[[Any], Any]:
            def keep(factory: Any) -> Any:
                found[name] = spec_class(name=name, factory=factory, supports_overlap=supports_overlap)
                return factory

            return keep

    def handle(server_args: Any) -> None:
        server_args.speculative_num_draft_tokens = server_args.speculative_num_draft_tokens or 12

    for path, names in (
        ("spec_info", {"SpeculativeAlgorithm": SpeculativeAlgorithm}),
        ("spec_registry", {"CustomSpecAlgo": CustomSpecAlgo}),
        ("ngram_worker", {"NGRAMWorker": NGRAMWorker}),
    ):
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, f"sglang.srt.speculative.{path}", module)
    hook = ModuleType("speculative_hook")
    vars(hook)["_handle_ngram"] = handle
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.speculative_hook", hook)
    return found


def batch(*requests: Req, decode: bool = True) -> SimpleNamespace:
    return SimpleNamespace(reqs=list(requests), forward_mode=SimpleNamespace(is_decode=lambda: decode))


def test_a_copied_text_is_drafted_and_its_drafts_are_learned_from(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARLAY_SGLANG", '{"strategy": "prompt-lookup"}')
    register()
    algorithm = registered["PARLAY"]
    assert algorithm.is_ngram()
    args = SimpleNamespace(speculative_num_draft_tokens=WIDTH, tokenizer_path=None, disable_overlap_schedule=False)
    algorithm.handle_server_args(args)
    assert args.disable_overlap_schedule
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=256, vocab_size=VOCAB))
    worker = algorithm.factory(args)(args, 0, None, 0, SimpleNamespace(model_runner=runner))
    request = Req("a", [1, 2, 3, 4, 5, 1, 2])
    assert worker.forward_batch_generation(batch(request, decode=False)) is None
    request.output_ids.append(3)
    tokens, mask = worker.forward_batch_generation(batch(request))
    assert tokens.shape == (WIDTH,)
    assert mask.shape == (WIDTH * WIDTH,)
    assert tokens[:3].tolist() == [3, 4, 5]
    request.output_ids += [4, 5, 1]
    worker.forward_batch_generation(batch(request, Req("b", [7, 7, 7, 7])))
    counts = worker._parlay._drafter.counts
    assert (counts.accepted_tokens, counts.failures) == (2, 0)


def test_the_overridden_methods_have_sglangs_signatures(registered: dict[str, Any]) -> None:
    made = sglang._worker(options_from({}))
    for name in ("_prepare_draft_tokens", "_update_ngram_corpus"):
        assert list(inspect.signature(vars(made)[name]).parameters) == list(
            inspect.signature(vars(NGRAMWorker)[name]).parameters
        )


def test_a_chain_hangs_from_the_last_token_and_the_rest_are_guesses_beside_it() -> None:
    tokens, mask = as_trees([9, 8], [[5, 6], []], 4)
    assert tokens.tolist() == [9, 5, 6, 0, 8, 0, 0, 0]
    first, second = mask.reshape(2, 4, 4).astype(int)
    assert first.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert second.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert np.issubdtype(tokens.dtype, np.int64)


def test_texts_are_known_by_the_names_of_their_requests() -> None:
    texts = Texts(longest=64, store=False)
    one, two = Req("a", [1, 2], [3]), Req("b", [1, 2], [3])
    first = texts.read([one, two])
    assert [text.tokens for text in first.texts if text] == [[1, 2, 3], [1, 2, 3]]
    two.output_ids.append(4)
    second = texts.read([two])
    assert second.texts == [first.texts[1]]
    assert second.ended == [first.texts[0]]
    texts.interrupted = True
    assert not texts.read([two]).decoded


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "PARLAY_SGLANG holds no JSON"),
        ('{"drafter": 1}', "PARLAY_SGLANG: \"parlay\" has no option 'drafter'"),
        ("[]", "must be an object of options"),
    ],
)
def test_options_that_can_not_work_are_one_line(value: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options_from({"PARLAY_SGLANG": value})
