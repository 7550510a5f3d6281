"""The target, files and options from which drafters are built."""

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
    """A strategy that stands inside another one.

    ``text`` is how it is written there, ``k`` the most nodes that it may draft. ``build`` makes a new drafter of it,
    or returns None for plain decoding.
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
    """Everything a drafter gets when it is built; ``target`` says what the target is and can do.

    ``open_runner`` loads a model by name or path, once, and shares it; ``open_tokenizer`` gives the tokenizer that goes
    with such a model. ``open_datastore`` and ``open_ngrams`` take the place of opening a file, and ``open_drafter`` of
    connecting to a service, for toys. ``open_states`` opens a datastore with states of the target, or, where no file is
    named, gives the one that the target mixes in; it raises UsageError where there is none. ``find_head`` finds trained
    heads for the target; ``domains`` are the kinds of texts, beside texts in general, for which there are some.
    ``read_adapter`` reads an adapter of the target from a folder, under a name; None where the target runs none.
    ``mask_adapter`` is the folder of the one with which mask rows run where the strategy names none; empty: none.
    ``round_weights`` packs the target's weights in so many bits for drafts; None where it can't.
    ``spare_threads`` is how many of the target's threads may draft while it verifies on the others.
    ``prove`` is given each proof of a head, which runs the target: so it may be put off until nothing else does.
    ``closing`` runs when the drafter goes: a drafter that writes files registers its last write there. ``rule`` is the
    accept rule that judges the drafts, and ``nested`` are the strategies that the drafter's own options name, in the
    order of their text. ``room`` bounds what drafters keep of requests under way.
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
