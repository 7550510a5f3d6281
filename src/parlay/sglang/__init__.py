"""SGLang's speculative algorithm PARLAY: Parlay's drafters and budgets, verified by SGLang's own n-gram path.

`register` is an entry point of ``sglang.srt.plugins``, which SGLang calls in each of its processes. The algorithm is a
`CustomSpecAlgo` with ``is_ngram``; its worker is SGLang's `NGRAMWorker` with other drafts. It was checked against
SGLang's source, but never run; ``tests/vllm/test_sglang.py`` has the signatures that it relies on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from parlay.drafters.token_text import TokenText, open_text
from parlay.options import UsageError
from parlay.types import SamplingParams
from parlay.vllm.options import KEY, ProposerOptions, read_options
from parlay.vllm.proposer import StepDrafter
from parlay.vllm.rows import Call

NAME = "PARLAY"
VARIABLE = "PARLAY_SGLANG"
"""The environment variable with the options as JSON, as SGLang has no flags for plug-ins."""


class Request(Protocol):
    """The fields of SGLang's ``Req`` that are used here."""

    rid: str
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]


@dataclass(slots=True)
class _Model:
    max_model_len: int
    tokenizer: str | None
    vocab_size: int

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclass(eq=False)
class Texts:
    """The texts of SGLang's requests by request id. ``interrupted``: whether a prompt was read since the last call."""

    longest: int
    store: bool
    interrupted: bool = False
    _known: dict[str, TokenText] = field(default_factory=dict)
    _opened: int = 0

    def read(self, requests: Sequence[Request]) -> Call:
        """Add, to each request's text, the tokens that the last step committed."""
        before, texts, observations = self._known, list[TokenText](), []
        self._known = {}
        for request in requests:
            prompt, output = request.origin_input_ids, request.output_ids
            text = before.pop(request.rid, None)
            if text is None:
                self._opened += 1
                params = SamplingParams(temperature=0.0, max_tokens=max(1, self.longest - len(prompt)))
                text = open_text(self._opened, prompt, params, store=self.store)
            observations.append(text.commit(list(output[len(text.tokens) - text.prompt_length :])))
            self._known[request.rid] = text
            texts.append(text)
        decoded, self.interrupted = not self.interrupted, False
        return Call(texts, observations, list(before.values()), decoded)

    def clear(self) -> list[TokenText]:
        """Forget all texts, and return them."""
        texts, self._known = list(self._known.values()), {}
        return texts


def as_trees(
    roots: Sequence[int], drafts: Sequence[Sequence[int]], width: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Convert drafts to the arrays of SGLang's n-gram worker: ``width`` nodes per text, and the attention mask between
    nodes.

    Returns tokens ``[texts * width]`` and a mask ``[texts * width * width]``, row by row. The first node is the text's
    last token, the draft follows it as a chain, and each remaining node is token 0 below the first node. SGLang
    verifies these nodes like any others.
    """
    tokens = np.zeros((len(drafts), width), dtype=np.int64)
    mask = np.zeros((len(drafts), width, width), dtype=np.bool_)
    mask[:, :, 0] = True
    mask |= np.eye(width, dtype=np.bool_)
    for place, (root, draft) in enumerate(zip(roots, drafts, strict=True)):
        end = 1 + len(draft)
        tokens[place, :end] = [root, *draft]
        mask[place, :end, :end] = np.tri(end, dtype=np.bool_)
    return tokens.reshape(-1), mask.reshape(-1)


class Drafts:
    """The drafts of one SGLang worker."""

    def __init__(self, options: ProposerOptions, model: _Model, width: int) -> None:
        self._width = width
        self._drafter = StepDrafter(options, model, width - 1, engine="SGLang")
        self.texts = Texts(model.max_model_len, options.share_outputs)

    def of(self, requests: Sequence[Request]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Draft for a decoding batch; see `as_trees`."""
        drafts = self._drafter.step(len(requests), lambda: self.texts.read(requests), self.texts.clear)
        roots = [(request.output_ids or request.origin_input_ids)[-1] for request in requests]
        return as_trees(roots, drafts, self._width)


def options_from(environment: Mapping[str, str]) -> ProposerOptions:
    """Read the options. Raises UsageError unless they are a JSON object."""
    try:
        given = json.loads(environment.get(VARIABLE) or "{}")
    except ValueError as error:
        raise UsageError(f"{VARIABLE} holds no JSON ({error}): give an object of options") from None
    return read_options({KEY: given}, where=VARIABLE)


def register() -> None:
    """Register the algorithm with SGLang. Raises UsageError for options that can't work."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class ParlayAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # its base is untyped
        def is_ngram(self) -> bool:
            return True

        def handle_server_args(self, server_args: Any) -> None:
            from sglang.srt.arg_groups.speculative_hook import _handle_ngram

            _handle_ngram(server_args)
            server_args.disable_overlap_schedule = True  # each step's tokens must be known before the next draft

    options = options_from(os.environ)

    def worker(server_args: object) -> type:
        return _worker(options)

    SpeculativeAlgorithm.register(NAME, supports_overlap=False, spec_class=ParlayAlgorithm)(worker)


def _worker(options: ProposerOptions) -> type:
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class ParlayWorker(NGRAMWorker):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # they differ between SGLang's versions
            super().__init__(*args, **kwargs)
            config = self.model_runner.model_config
            model = _Model(config.context_len, self.server_args.tokenizer_path, config.vocab_size)
            self._parlay = Drafts(options, model, self.draft_token_num)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
            return self._parlay.of(batch.reqs)

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Learn nothing into SGLang's own store."""

        def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._parlay.texts.interrupted |= not batch.forward_mode.is_decode()
            return super().forward_batch_generation(batch, *args, **kwargs)

    return ParlayWorker
