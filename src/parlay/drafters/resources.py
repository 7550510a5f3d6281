"""The resources that drafters are built from: the target, files and options."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from parlay.drafters.state_room import StateRoom
from parlay.options import Options
from parlay.types import Adapter, Drafter, Runner, RunnerSpec, Tokenizer

if TYPE_CHECKING:
    from parlay.drafters.remote.link import Link
    from parlay.drafters.stores.datastore_file import Datastore
    from parlay.drafters.stores.state_store import MappedStates
    from parlay.heads.opening import FindHead
    from parlay.ngrams.model import NgramModel


@dataclass(frozen=True, slots=True)
class NestedStrategy:
    """A strategy inside another one.

    ``text``: how it is written there. ``k``: the most nodes that it may draft. ``build`` makes a new drafter of it, or
    returns None for plain decoding.
    """

    name: str
    text: str
    k: int
    options: Options
    build: Callable[[], Drafter | None]


def at_once(call: Callable[[], None]) -> None:
    """Make the call now."""
    call()


@dataclass(frozen=True, slots=True)
class Resources:
    """Everything a drafter gets when it is built. ``target`` describes the target model.

    ``open_runner`` loads a model by name or path, once, and shares it; ``open_tokenizer`` opens the tokenizer of such a
    model. ``open_datastore`` and ``open_ngrams`` replace opening a file, and ``open_drafter`` replaces connecting to a
    service, for toys. ``open_states`` opens a datastore with states of the target or, without a file name, returns the
    one that the target mixes in; it raises UsageError if there is none. ``find_head`` finds trained heads for the
    target; ``domains`` are the kinds of texts, besides general ones, that have heads. ``read_adapter`` reads an adapter
    of the target from a folder, under a name; None if the target can't run any. ``mask_adapter``: the folder of the
    adapter for mask rows if the strategy names none; empty: none. ``round_weights`` packs the target's weights in fewer
    bits for drafts; None if it can't. ``spare_threads``: how many of the target's threads may draft while it verifies
    on the others. ``prove`` is called with each proof of a head; a proof runs the target, so it may be postponed until
    nothing else does. ``closing`` runs when the drafter goes: a drafter that writes files registers its last write
    there. ``rule``: the accept rule that judges the drafts. ``nested``: the strategies in the drafter's own options, in
    the order of their text. ``room`` bounds what drafters keep for requests under way.
    """

    vocab_size: int
    open_runner: Callable[[str], Runner]
    default_draft: str | None = None
    tokenizer: Tokenizer | None = None
    open_tokenizer: Callable[[str], Tokenizer] | None = None
    target: RunnerSpec | None = None
    open_datastore: Callable[[str], Datastore] | None = None
    open_ngrams: Callable[[str], NgramModel] | None = None
    open_states: Callable[[str], MappedStates] | None = None
    open_drafter: Callable[[str], Link] | None = None
    find_head: FindHead | None = None
    domains: Callable[[], Collection[str]] = tuple
    read_adapter: Callable[[Path, str], Adapter] | None = None
    mask_adapter: str = ""
    round_weights: Callable[[int], None] | None = None
    spare_threads: int = 0
    prove: Callable[[Callable[[], None]], None] = at_once
    closing: ExitStack = field(default_factory=ExitStack)
    rule: str = "shared-noise"
    nested: tuple[NestedStrategy, ...] = ()
    room: StateRoom = field(default_factory=StateRoom)
