"""Scores with chat models as rerankers, such as Qwen3-Reranker: does a document answer a query, yes or no?

The score is the probability of "yes" among the two words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

import torch

from parlay.llm.embedding import Reading, ScoringOutput, ScoringRequestOutput, check_embeds, groups
from parlay.text.chat_template import ChatOptions
from parlay.types import Adapter, FieldError, Runner, ScoreBy

if TYPE_CHECKING:
    from parlay.llm.llm import LLM

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction that Qwen3-Reranker's makers use by default."""
ANSWERS = ("yes", "no")
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


class Words(NamedTuple):
    """The token ids of both answers."""

    yes: int
    no: int


class Judged(Reading):
    """Reads prompts that ask for one of two words, and scores each."""

    def __init__(
        self, runner: Runner, prompts: Sequence[Sequence[int]], words: Words, adapter: Adapter | None = None
    ) -> None:
        super().__init__(runner, prompts, adapter)
        self._words = words
        self.scores = [0.0] * len(prompts)

    def _read(self, chunks: Mapping[int, tuple[int, ...]], last: Sequence[bool]) -> None:
        segments = [
            self._segment(place, chunk, len(chunk) - ends)
            for (place, chunk), ends in zip(chunks.items(), last, strict=True)
        ]
        logits_RV = self._runner.forward(segments).logits_RV
        ended = [place for place, ends in zip(chunks, last, strict=True) if ends]
        chances = torch.softmax(logits_RV[:, list(self._words)].double(), 1)[:, 0].tolist()
        for place, chance in zip(ended, chances, strict=True):
            self.scores[place] = chance


def by_answer(score_by: ScoreBy) -> bool:
    """Whether scores come from the model's answers, not from embeddings. Raises ValueError for an unknown name."""
    if score_by not in get_args(ScoreBy):
        raise FieldError("score_by", f"must be {' or '.join(get_args(ScoreBy))}, got {score_by!r}")
    return score_by == "yes-no"


def judge_prompts(llm: LLM, pairs: Sequence[tuple[object, object]], instruction: str) -> list[tuple[int, ...]]:
    """Prompts for pairs of a query and a document, in the model's chat format. Any thread may call this.

    Raises ValueError for a pair that the model can't hold, and for a model without a chat template.
    """
    check_embeds(llm.runner.spec, "last")
    if llm.tokenizer is None or not llm.tokenizer.chat_template:
        raise FieldError("score_by", "yes-no needs a model with a chat template: use cosine")
    prompts = []
    for query, document in pairs:
        if not isinstance(query, str) or not isinstance(document, str):
            raise FieldError("score_by", "yes-no takes texts, no token ids")
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]
        prompts.append(llm.token_ids(messages, ChatOptions(variables={"enable_thinking": False})))
    return prompts


def words_of(llm: LLM) -> Words:
    """The ids of yes and no. Raises ValueError if they are not one token each."""
    encode = llm.vocabulary.required_tokenizer.encode
    ids = [encode(word, add_special_tokens=False) for word in ANSWERS]
    if [len(each) for each in ids] != [1, 1]:
        raise FieldError("score_by", "yes-no needs a model to which yes and no are one token each: use cosine")
    return Words(ids[0][0], ids[1][0])


def judge(
    llm: LLM, pairs: Sequence[tuple[object, object]], instruction: str, adapter: Adapter | None
) -> list[ScoringRequestOutput]:
    """Score pairs of a query and a document; raises what `judge_prompts` and `words_of` raise."""
    prompts, words, scores = judge_prompts(llm, pairs, instruction), words_of(llm), list[float]()
    for group in groups(prompts):
        judged = Judged(llm.runner, [prompts[place] for place in group], words, adapter)
        judged.run()
        scores += judged.scores
    return score_outputs(prompts, scores)


def score_outputs(prompts: Sequence[tuple[int, ...]], scores: Sequence[float]) -> list[ScoringRequestOutput]:
    """Combine prompts and scores into outputs."""
    return [ScoringRequestOutput(ids, ScoringOutput(score)) for ids, score in zip(prompts, scores, strict=True)]
