"""A drafter behind HTTP: its drafts, its deadline, and everything that may be wrong with a service."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from parlay.drafters.copying.prompt_lookup import PromptLookup, PromptLookupOptions
from parlay.drafters.remote.link import KEY_VARIABLE, OtherVocabulary, ServiceLink, Vocabulary
from parlay.drafters.remote.messages import TextFacts, TextUpdate, answer_as_json
from parlay.drafters.remote.remote import Remote, RemoteOptions
from parlay.drafters.remote.service import DraftService, KnownTokens, Owner
from parlay.drafters.resources import Resources
from parlay.drafters.token_text import TokenText, open_text
from parlay.options import UsageError
from parlay.types import NO_DRAFT, Draft, Observation, SamplingParams, SequenceView

VOCAB = 30
Say = Callable[[str, str, dict[str, Any]], tuple[int, bytes]]
"""From method, path and body to status and content."""


def no_runner(name: str) -> Any:
    raise AssertionError(name)


def resources(stack: ExitStack) -> Resources:
    return Resources(VOCAB, no_runner, closing=stack)


def copier() -> PromptLookup:
    return PromptLookup(Resources(VOCAB, no_runner), PromptLookupOptions())


def text(number: int, tokens: Sequence[int]) -> TokenText:
    return open_text(number, tokens, SamplingParams(temperature=0.0))


def info(vocab_size: int = VOCAB, tokenizer: str = "") -> bytes:
    return json.dumps({"version": 1, "strategy": "toy", "vocab_size": vocab_size, "tokenizer": tokenizer}).encode()


class Service:
    """Says what a `DraftService` says, and notes what it was sent."""

    def __init__(self) -> None:
        self.service = DraftService(copier(), VOCAB, 1000)
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if method == "GET":
            return 200, info()
        self.bodies.append(body)
        asked = []
        for each in body["texts"]:
            facts = {name: value for name, value in each.items() if name not in {"id", "start", "tokens", "most"}}
            update = TextUpdate(each["id"], each["start"], each["tokens"], each["most"], TextFacts(**facts))
            asked.append((Owner("", body["client"]), update))
        answers = self.service.draft(asked)
        return 200, json.dumps({"drafts": [answer_as_json(answer) for answer in answers]}).encode()


@contextmanager
def serving(say: Say, port: int = 0) -> Iterator[str]:
    """The URL of a server of this process that answers as ``say`` does."""

    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.answer("GET", {})

        def do_POST(self) -> None:
            self.answer("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, method: str, body: dict[str, Any]) -> None:
            if gone.is_set():  # an open connection outlives the server
                self.close_connection = True
                return
            status, content = say(method, self.path, body | {"key": self.headers.get("Authorization", "")})
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        gone.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def remote(url: str, deadline_ms: float = 20_000, retry_s: float = 0.1) -> Iterator[Remote]:
    with ExitStack() as stack:
        yield Remote(resources(stack), RemoteOptions(url=url, deadline_ms=deadline_ms, retry_s=retry_s))


def give(drafter: Remote, seconds: float) -> ServiceLink:
    """Wait for answers no longer than this from now on."""
    link = drafter._link
    assert isinstance(link, ServiceLink)
    link._deadline = seconds
    return link


def propose(drafter: Remote, view: TokenText, budget: int = 4) -> Draft:
    (draft,) = drafter.propose([view], [budget])
    return draft


def test_drafts_are_those_of_the_drafter_and_only_new_tokens_are_sent() -> None:
    service = Service()
    with serving(service) as url, remote(url) as drafter:
        view = text(1, [1, 2, 3, 4, 1, 2])
        for _ in range(5):
            expected = copier().propose([view], [4])[0]
            assert propose(drafter, view).tree == expected.tree
            view.tokens += expected.tree.tokens[:2]
    sent = [body["texts"][0] for body in service.bodies]
    assert [each["start"] for each in sent] == [0, 6, 8, 10, 12]
    assert [len(each["tokens"]) for each in sent] == [6, 2, 2, 2, 2]


def test_a_text_that_was_cut_back_is_sent_from_there() -> None:
    service = Service()
    with serving(service) as url, remote(url) as drafter:
        view = text(1, [1, 2, 3, 1, 2, 3])
        propose(drafter, view)
        view.tokens[-2:] = [7, 8, 1, 2]
        assert propose(drafter, view).tree.tokens[0] == 3
        assert service.bodies[-1]["texts"][0]["start"] == 4


def test_a_service_that_forgot_a_text_is_told_it_again() -> None:
    service = Service()
    with serving(service) as url, remote(url) as drafter:
        view = text(1, [1, 2, 3, 1, 2])
        propose(drafter, view)
        service.service = DraftService(copier(), VOCAB, 1000)
        view.tokens.append(3)
        assert propose(drafter, view) == NO_DRAFT
        assert propose(drafter, view).tree.tokens[:2] == (1, 2)


def test_texts_that_are_over_are_named_in_the_next_request() -> None:
    service = Service()
    with serving(service) as url, remote(url) as drafter:
        propose(drafter, text(1, [1, 2, 1]))
        drafter.release(1)
        drafter.release(9)
        propose(drafter, text(2, [1, 2, 1]))
        assert [body["over"] for body in service.bodies] == [[], [1]]


def test_after_the_deadline_the_step_goes_on_and_a_late_answer_counts_for_nothing() -> None:
    service, go = Service(), threading.Event()

    def slow(method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if method == "POST":
            assert go.wait(600)
        return service(method, path, body)

    with serving(slow) as url, remote(url, deadline_ms=200) as drafter:
        view = text(1, [1, 2, 3, 1, 2])
        assert propose(drafter, view) == NO_DRAFT
        assert propose(drafter, view) == NO_DRAFT  # nothing more is asked meanwhile
        give(drafter, 600)
        go.set()
        for _ in range(10_000):
            view.tokens.append(view.tokens[-3])
            if len(propose(drafter, view)):
                break
            threading.Event().wait(0.01)
        else:
            raise AssertionError("no draft after a late answer")


STOPPABLE = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.say(json.loads(sys.argv[1]))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        last = [text["tokens"][-1] for text in asked["texts"]]  # a late draft would be one of another step
        self.say({"drafts": [{"tokens": [token], "parents": [-1]} for token in last]})

    def say(self, reply):
        content = json.dumps(reply).encode()
        self.wfile.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%s" % (len(content), content))

    def log_message(self, *words): pass

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_service_that_is_always_late_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    late = threading.Event()

    def say(method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if method == "POST":
            late.wait(600)
        return 200, info() if method == "GET" else b'{"drafts": [{"tokens": [], "parents": []}]}'

    with serving(say) as url, remote(url, deadline_ms=1) as drafter:
        view, link = text(1, [1, 2, 1]), give(drafter, 0.001)
        for _ in range(10):
            late.clear()
            propose(drafter, view)
            late.set()
            while link._late is not None and not link._late.done.is_set():
                time.sleep(0.001)
    (record,) = caplog.records
    assert "(deadline_ms)" in record.getMessage()


def test_an_answer_that_comes_by_and_by_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    now, begun = [0.0], threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            opened, _ = door.accept()
            with opened:
                opened.recv(4096)
                opened.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(info()), info()))
                opened.recv(4096)
                begun.set()
                with suppress(OSError):
                    while True:
                        opened.sendall(b"x")
                        time.sleep(0.01)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        link = ServiceLink(url, Vocabulary(VOCAB), "r", deadline=0.01, retry=5, clock=lambda: now[0])
        update = TextUpdate(1, 0, [1], 4, TextFacts(prompt_length=1))
        assert link.ask([update], []) is None
        assert begun.wait(600)
        now[0] += 60
        link.ask([update], [])
        door.close()
        for _ in range(10_000):
            link.ask([update], [])
            if caplog.records:
                break
            time.sleep(0.01)
        link.close()
    assert "requests are decoded without drafts" in caplog.records[0].getMessage()


def test_a_service_that_is_stopped_under_load_holds_nobody_up_and_drafts_again_when_it_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-I", "-S", "-c", STOPPABLE, info().decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            with remote(f"http://127.0.0.1:{int(process.stdout.readline())}") as drafter:
                views = [text(number, [1, 2, number]) for number in range(8)]

                def step(token: int) -> list[Draft]:
                    for view in views:
                        view.tokens.append(token)
                    return drafter.propose(views, [4] * len(views))

                assert {draft.tree.tokens for draft in step(3)} == {(3,)}
                process.send_signal(signal.SIGSTOP)
                link, waited = give(drafter, 0.2), list[object]()
                note_late = link._note_late
                monkeypatch.setattr(link, "_note_late", lambda job: (waited.append(job), note_late(job)))
                for number in range(50):
                    assert step(4 + number % 20) == [NO_DRAFT] * 8
                assert len(waited) == 1, "one deadline, and not one for each step"
                give(drafter, 600)
                process.send_signal(signal.SIGCONT)
                for number in range(10_000):
                    drafts = step(token := number % 25)
                    assert {draft.tree.tokens for draft in drafts} <= {(), (token,)}
                    if len(drafts[0]):
                        break
                    time.sleep(0.01)
                else:
                    raise AssertionError("no draft after it woke up")
        finally:
            process.kill()


RUBBISH = {
    "no JSON": b"<html>",
    "no object": b"[]",
    "too few drafts": b'{"drafts": []}',
    "an id beyond the vocabulary": b'{"drafts": [{"tokens": [30], "parents": [-1]}]}',
    "an id that is not a number": b'{"drafts": [{"tokens": ["1"], "parents": [-1]}]}',
    "a parent after its child": b'{"drafts": [{"tokens": [1, 2], "parents": [1, -1]}]}',
    "more tokens than asked for": b'{"drafts": [{"tokens": [1,1,1,1,1], "parents": [-1,0,1,2,3]}]}',
    "tokens that it never had": b'{"drafts": [{"held": 99}]}',
    "chances above 1": b'{"drafts": [{"tokens": [1], "parents": [-1], "scores": [2]}]}',
    "chances that are no numbers": b'{"drafts": [{"tokens": [1], "parents": [-1], "scores": "x"}]}',
}


@pytest.mark.parametrize("content", RUBBISH.values(), ids=RUBBISH.keys())
def test_rubbish_is_no_draft_and_one_line(content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def say(method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        return 200, info() if method == "GET" else content

    with serving(say) as url, remote(url, retry_s=60) as drafter:
        for _ in range(3):
            assert propose(drafter, text(1, [1, 2, 1])) == NO_DRAFT
    (record,) = caplog.records
    assert "requests are decoded without drafts" in record.getMessage()
    assert "\n" not in record.getMessage()


@contextmanager
def free_port() -> Iterator[int]:
    """A port at which nobody listens, and no other process will."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so a server of ours may
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def test_a_service_that_is_gone_is_asked_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    view = text(1, [1, 2, 3, 1, 2])
    with free_port() as port, remote(f"http://127.0.0.1:{port}", retry_s=0.1) as drafter:
        assert propose(drafter, view) == NO_DRAFT
        with serving(Service(), port):
            for _ in range(10_000):
                if len(propose(drafter, view)):
                    break
                threading.Event().wait(0.02)
        for _ in range(3):
            view.tokens.append(view.tokens[-3])
            assert propose(drafter, view) == NO_DRAFT
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "no answer" in said[0]
    assert "answers again" in said[1]


@pytest.mark.parametrize("said", [info(31), b'{"version": 1}'])
def test_another_vocabulary_is_an_error_at_the_start(said: bytes) -> None:
    with serving(lambda *_: (200, said)) as url, pytest.raises(OtherVocabulary, match="vocabulary of"), remote(url):
        pass


@pytest.mark.parametrize("said", [b'{"version": 2}', b"[1]", b"null", b"rubbish", b"[" * 100_000], ids=range(5))
def test_what_is_no_drafter_is_asked_again_later(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serving(lambda *_: (200, said)) as url, remote(url) as drafter:
        assert propose(drafter, text(1, [1, 2, 1])) == NO_DRAFT
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://[::1",
        "http://a:b@host",
        "http://a..b",
    ],
)
def test_what_is_no_url_is_an_error_at_once(url: str) -> None:
    with ExitStack() as stack, pytest.raises(UsageError, match=r"url must|url=URL"):
        Remote(resources(stack), RemoteOptions(url=url))


def test_a_key_that_is_none_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "two\nlines")
    with ExitStack() as stack, pytest.raises(UsageError, match=KEY_VARIABLE):
        Remote(resources(stack), RemoteOptions(url="http://127.0.0.1:1"))


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    seen: list[str] = []

    def noted(method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        seen.append(body["key"])
        return 401, b'{"error": {"message": "a valid API key is needed"}}'

    with serving(noted) as url, remote(url):
        pass
    assert seen == ["Bearer secret"]


class TestService:
    """Texts of other processes, bounded and bound to nobody else's."""

    def update(self, number: int, start: int, tokens: Sequence[int], most: int = 4) -> TextUpdate:
        return TextUpdate(number, start, tokens, most, TextFacts(prompt_length=3))

    def test_the_oldest_texts_are_forgotten_where_there_are_too_many_tokens(self) -> None:
        service, owner = DraftService(copier(), VOCAB, 100, most_tokens=20), Owner("", "a")
        for number in range(10):
            service.draft([(owner, self.update(number, 0, [1, 2, 3, 1, 2]))])
        assert len(service) == 4
        assert service.draft([(owner, self.update(0, 5, [3]))]) == [KnownTokens(0)]
        assert service.draft([(owner, self.update(9, 5, [3]))])[0] != KnownTokens(0)

    def test_the_oldest_texts_are_forgotten_where_there_are_too_many(self) -> None:
        service = DraftService(copier(), VOCAB, 100, most_texts=3)
        for number in range(10):
            service.draft([(Owner("", str(number)), self.update(1, 0, [1]))])
        assert len(service) == 3

    def test_a_text_that_is_refused_takes_no_room_from_others(self) -> None:
        service, owner = DraftService(copier(), VOCAB, 100, most_tokens=20), Owner("", "a")
        refused = TextUpdate(2, 0, [1] * 10, 4, TextFacts(prompt_length=3, temperature=float("inf")))
        for _ in range(3):
            with pytest.raises(ValueError, match="temperature"):
                service.draft([(owner, refused)])
        service.draft([(owner, self.update(1, 0, [1, 2, 3, 1, 2]))])
        service.draft([(owner, self.update(3, 0, [1, 2, 3, 1, 2]))])
        assert len(service) == 2

    def test_a_text_for_which_drafting_fails_costs_no_other_text_its_draft(self) -> None:
        class Picky(PromptLookup):
            def propose(self, views: Sequence[SequenceView], budgets: Sequence[int]) -> list[Draft]:
                if any(9 in view.tokens for view in views):
                    raise RuntimeError("no nines")
                return super().propose(views, budgets)

        service = DraftService(Picky(Resources(VOCAB, no_runner), PromptLookupOptions()), VOCAB, 100)
        owners = [Owner("", name) for name in "ab"]
        texts = [self.update(0, 0, [9, 2, 3, 9, 2]), self.update(0, 0, [1, 2, 3, 1, 2])]
        bad, good = service.draft(list(zip(owners, texts, strict=True)))
        assert isinstance(bad, Draft)
        assert isinstance(good, Draft)
        assert (bad.tree.tokens, good.tree.tokens) == ((), (3, 1, 2))
        with pytest.raises(RuntimeError, match="no nines"):
            service.draft([(owners[0], self.update(0, 5, [1]))])

    def test_clients_have_numbers_of_their_own(self) -> None:
        service = DraftService(copier(), VOCAB, 100)
        service.draft([(Owner("", "a"), self.update(1, 0, [1, 2, 3, 1, 2]))])
        assert service.draft([(Owner("", "b"), self.update(1, 5, [3]))]) == [KnownTokens(0)]
        service.release(Owner("", "b"), [1])
        assert len(service) == 1

    def test_one_text_twice_in_a_batch_is_taken_once(self) -> None:
        service, owner = DraftService(copier(), VOCAB, 100), Owner("", "a")
        news = self.update(1, 0, [1, 2, 3, 1, 2])
        first, second = service.draft([(owner, news), (owner, news)])
        assert isinstance(first, Draft)
        assert second == KnownTokens(0)

    def test_drafters_hear_how_far_their_drafts_were_right(self) -> None:
        heard: list[Observation] = []

        class Listener(PromptLookup):
            needs = PromptLookup.needs.__class__(outcomes=True)

            def observe(self, observations: Sequence[Observation]) -> None:
                heard.extend(observations)

        drafter = Listener(Resources(VOCAB, no_runner), PromptLookupOptions())
        service, owner = DraftService(drafter, VOCAB, 100), Owner("", "a")
        service.draft([(owner, self.update(1, 0, [1, 2, 3, 4, 1, 2]))])
        service.draft([(owner, self.update(1, 6, [3, 4, 9]))])
        assert [len(each.verdict.path) for each in heard] == [0, 2]
