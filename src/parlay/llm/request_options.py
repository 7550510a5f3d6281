"""`RequestOptions`: what a request may say besides its prompt and its sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parlay.certificates.requirement import Allowed
from parlay.llm.voting import VoteParams
from parlay.strategies.spelling import StrategySpec
from parlay.text.prompts import Document, Ids
from parlay.types import Adapter, check_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request other than its prompt and sampling parameters.

    ``strategy``: None is the LLM's default or, if that names drafters and there is a ``prediction``, the strategy that
    drafts from predictions. ``exactness``: what the request allows, as `parlay.certificates.requirement` reads it;
    None: the strategy's own level. ``documents``, ``prediction``, ``store``: see `LLM.generate`. ``salt`` names the
    tenant, which shares cached prefixes and stores with nobody. ``owner``: who sent the request; owners share the
    engine evenly. ``priority``: lower is more urgent. ``adapter`` changes the model. ``cache_reuse``: runs of at least
    this many tokens that an earlier request has cached at another position are moved, not computed again, which is
    lossy. ``default_max_tokens``: used if the parameters have no ``max_tokens``; None: as much as the model holds.
    ``written``: for each sample, tokens that another engine wrote; it continues after them. ``vote``: how the samples
    decide on an answer. ``marks``: the text has all special tokens except those that end it, for parsers of calls or
    reasoning. ``given``: how many characters at the text's beginning the client has already; stops come after them.
    """

    strategy: str | StrategySpec | None = None
    exactness: str | Allowed | None = None
    documents: Sequence[Document] = ()
    prediction: Document | None = None
    store: bool = True
    salt: str = ""
    cache_reuse: int = 0
    owner: str = ""
    priority: int = 0
    default_max_tokens: int | None = None
    written: Sequence[Ids] = ()
    adapter: Adapter | None = None
    vote: VoteParams | None = None
    marks: bool = False
    given: int = 0

    def __post_init__(self) -> None:
        if self.strategy is not None:
            check_kind("strategy", self.strategy, (str, StrategySpec), 'a text, such as "none"')
        if self.exactness is not None:
            check_kind("exactness", self.exactness, (str, Allowed), 'a text, such as "bits"')
