"""Compiles requests' structured output to grammars over one vocabulary, and caches them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

from parlay.structured.constraint import GrammarConstraint
from parlay.structured.limits import check_size, schema_of
from parlay.system.bounded_process import BoundedProcess, LimitMet, NoAnswer
from parlay.types import FieldError, MachineBusy, ParlayError, StructuredOutputsParams, Tokenizer, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
_Key = tuple[str, str]
"""The owner, and a digest of the request's constraint."""

_KEPT = 128  # how many compiled grammars and refusals are kept
_STACK = 256 << 20
"""Bytes of stack for compiling, four times the checker's. Only the used part takes memory."""
_stack_lock = threading.Lock()
CPU_SECONDS = 2.0
"""Seconds of CPU time for checking one constraint."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, which makes a constraint for each sample."""

    tokenizer: LLTokenizer
    matcher: LLMatcher
    vocab_size: int
    lock: threading.Lock

    def constraint(self, stop_ids: Collection[int]) -> GrammarConstraint:
        """Make a constraint.

        ``stop_ids``: the request's stop ids. The special ones among them are allowed where the text may end.
        """
        ends = frozenset(token for token in stop_ids if self.tokenizer.is_special_token(token))
        barred = frozenset(self.tokenizer.eos_tokens) - ends
        return GrammarConstraint(self.copy, self.vocab_size, ends=ends, barred=barred)

    def copy(self) -> LLMatcher:
        """Copy the matcher, which has read nothing. Any thread may call this."""
        with self.lock:
            return self.matcher.deep_copy()


class Checker:
    """Has constraints compiled in a separate process, `parlay.structured.checker`, before this process compiles them.

    A definition can exhaust the compiler's stack, which ends the process that compiles it. ``vocabulary``: arguments of
    `LLTokenizer`. Any thread may use it.
    """

    def __init__(self, vocabulary: dict[str, object]) -> None:
        first = json.dumps(vocabulary).encode()
        self._process = BoundedProcess("parlay.structured.checker", first, "structured output")

    def end(self) -> None:
        """End the process, if it is running."""
        self._process.end()

    def check(self, question: bytes) -> str:
        """Return the definition for a question that `spelled` made, after the process has compiled it once.

        Raises MachineBusy if the process got too little CPU time to answer, and ValueError for a definition that is
        invalid or too large.
        """
        try:
            answer = json.loads(self._process.ask(question, CPU_SECONDS))
        except NoAnswer as error:
            message = f"structured_outputs took more than {error} to compile, on a busy machine: try again"
            raise MachineBusy(message, "structured_outputs") from None
        except LimitMet as error:
            raise FieldError("structured_outputs", f"took more than {error} to compile: make it simpler") from None
        if "error" in answer:
            raise UsageError(answer["error"], answer["field"])
        return str(answer["definition"])


def spelled(wanted: StructuredOutputsParams) -> bytes:
    """Write the structured output as JSON. A schema gives the same JSON whether it is given as text or as data."""
    schema = None if wanted.json is None else schema_of(wanted.json)
    others = {"regex": wanted.regex, "choice": wanted.choice, "grammar": wanted.grammar}
    spaces = {"disable_any_whitespace": wanted.disable_any_whitespace}
    return json.dumps({"json": schema, "json_object": wanted.json_object, **others, **spaces}).encode()


@dataclass(frozen=True, slots=True)
class _Compiler:
    tokenizer: LLTokenizer
    checker: Checker


class Grammars:
    """Compiles grammars for one tokenizer, and keeps those used last. Any thread may use it.

    ``owner``: who sent the request. Owners share neither compiled grammars nor compilations under way; otherwise the
    speed of an answer would tell one owner what another has asked. If the cache is full, the owner with the most
    entries loses its oldest.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiler: _Compiler | None = None
        self._kept: OrderedDict[_Key, Grammar | UsageError] = OrderedDict()
        self._under_way: dict[_Key, Future[Grammar | UsageError]] = {}
        self._lock = threading.Lock()

    def compile(self, wanted: StructuredOutputsParams, owner: str = "") -> Grammar:
        """Compile a grammar.

        Raises ValueError if the grammar is invalid, too large, or can't be written with this vocabulary; ParlayError if
        the package llguidance is missing; MachineBusy if compiling got too little CPU time.
        """
        if find_spec("llguidance") is None:
            raise ParlayError("structured output needs the package llguidance: pip install 'parlay[structured]'")
        check_size(wanted)
        question = spelled(wanted)
        key = (owner, hashlib.sha256(question).hexdigest())
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            work = self._under_way.get(key)
            first = work is None
            if found is None and work is None:
                work = self._under_way[key] = Future()
        if found is None:
            assert work is not None
            if first:
                self._settle(key, question, work)
            found = work.result()
        if isinstance(found, UsageError):
            raise UsageError(str(found), *found.fields)
        return found

    def prepare(self) -> None:
        """Read the vocabulary now. Otherwise the first structured request, and all other threads, would wait for it.

        The first structured request gets the error, if there is one.
        """
        if find_spec("llguidance") is not None:
            with suppress(ValueError):
                self._read_once()

    def rest(self) -> None:
        """Forget compiled grammars, and end the second process. Later requests compile as before."""
        with self._lock:
            self._kept.clear()
            compiler = self._compiler
        if compiler is not None:
            compiler.checker.end()

    def _settle(self, key: _Key, question: bytes, work: Future[Grammar | UsageError]) -> None:
        """Compile once for this request and all requests of the same owner that ask for the same grammar meanwhile."""
        try:
            found = self._compiled_or_refused(question)
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            work.set_exception(error)
            return
        self._keep(key, found)
        work.set_result(found)

    def _compiled_or_refused(self, question: bytes) -> Grammar | UsageError:
        try:
            return self._compile(question)
        except UsageError as error:
            return error

    def _compile(self, question: bytes) -> Grammar:
        from parlay.structured.definition import matcher

        compiler = self._read_once()
        text = compiler.checker.check(question)
        compiled = _with_large_stack(lambda: matcher(compiler.tokenizer, text))
        return Grammar(compiler.tokenizer, compiled, self._vocab_size, threading.Lock())

    def _keep(self, key: _Key, found: Grammar | UsageError) -> None:
        with self._lock:
            del self._under_way[key]
            self._kept[key] = found
            if len(self._kept) > _KEPT:
                ((greediest, _),) = Counter(owner for owner, _ in self._kept).most_common(1)
                del self._kept[next(kept for kept in self._kept if kept[0] == greediest)]

    def _read_once(self) -> _Compiler:
        with self._lock:
            self._compiler = self._compiler or self._read()
            return self._compiler

    def _read(self) -> _Compiler:
        if self._tokenizer is None:
            raise FieldError("structured_outputs", "needs a tokenizer, and this model came without one: name one")
        if not self._tokenizer.is_fast:
            raise FieldError(
                "structured_outputs",
                "can't be used with this model's tokenizer, which is written in Python: name another",
            )
        backend = self._tokenizer.backend_tokenizer
        if backend.padding is not None or backend.truncation is not None:
            backend = copy(backend)
            backend.no_padding()
            backend.no_truncation()
        parts: dict[str, object] = {
            "tokenizer": backend.to_str(),
            "n_vocab": max(len(self._tokenizer), self._vocab_size),
            "eos_token": self._eos_ids or self._tokenizer.eos_token_id,
        }
        from llguidance import LLTokenizer

        try:
            return _Compiler(LLTokenizer(**parts), Checker(parts))  # type: ignore[arg-type]
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise FieldError("structured_outputs", f"can't be used with this model's tokenizer: {reason}") from None


def _with_large_stack(function: Callable[[], T]) -> T:
    """Call the function in a thread with a large stack; return its result, or raise its error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    with _stack_lock:  # the stack size is a setting of the whole process
        before = threading.stack_size(_STACK)
        try:
            threading.Thread(target=run, name="parlay-compile").start()
        finally:
            threading.stack_size(before)
    return future.result()
