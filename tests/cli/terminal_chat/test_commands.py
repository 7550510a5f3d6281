"""Commands of a chat change what they say they change, and a wrong one changes nothing and says what is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parlay.cli.terminal_chat.commands import COMMANDS, AnswerAgain, Leave, State, run_command
from parlay.cli.terminal_chat.conversation import ChatSettings, Conversation, read_conversation
from parlay.types import ParlayError, SamplingParams


@pytest.fixture
def state() -> State:
    return State(Conversation(), ChatSettings(SamplingParams(max_tokens=8)))


def test_set_changes_one_number_and_checks_its_range(state: State) -> None:
    assert run_command(state, "/set temperature 0.5") == "temperature: 0.5"
    assert run_command(state, "/set top-k=4") == "top_k: 4"
    assert (state.settings.params.temperature, state.settings.params.top_k) == (0.5, 4)
    for line, said in [
        ("/set temperature -1", "temperature must be"),
        ("/set temperature hot", "give a number"),
        ("/set top_k 1.5", "give a number"),
        ("/set temprature 1", "did you mean temperature"),
    ]:
        with pytest.raises(ValueError, match=said):
            run_command(state, line)
    assert state.settings.params.temperature == 0.5
    assert "top_k 4" in run_command(state, "/set")
    assert run_command(state, "/set top_k") == "top_k: 4"
    assert run_command(state, "/set max_tokens -1") == "max_tokens: -1"
    assert state.settings.params.max_tokens is None  # until the model ends
    assert run_command(state, "/set max_tokens") == "max_tokens: -1"
    assert run_command(state, "/set max_tokens 7") == "max_tokens: 7"


def test_a_system_message_that_is_no_text_is_refused_and_the_old_one_stays(state: State) -> None:
    run_command(state, "/system Be short.")
    with pytest.raises(ValueError, match="the system message is not valid Unicode text"):
        run_command(state, "/system caf\udce9")
    assert state.conversation.system == "Be short."


def test_seed_and_strategy(state: State) -> None:
    run_command(state, "/seed 7")
    assert state.settings.params.seed == 7
    run_command(state, "/seed")
    assert state.settings.params.seed is None
    with pytest.raises(ValueError, match="whole number"):
        run_command(state, "/seed x")
    run_command(state, "/strategy prompt-lookup:k=4")
    assert state.settings.strategy is not None
    assert state.settings.strategy.startswith("prompt-lookup")
    with pytest.raises(ValueError, match="prompt-lookup"):
        run_command(state, "/strategy prompt-lokup")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/9", "there is no /999"),
        ("/seed 9", "a whole number may have at most 64 bits"),
        ("/seed x9", "give a whole number of at least 0"),
        ("/set 9", "/set 999"),
        ("/set max_tokens 9", "a whole number may have at most 64 bits"),
        ("/set temperature x9", "give a number"),
        ("/strategy 9", "unknown strategy"),
        ("/load 9", "too long"),
        ("/save 9", "too long"),
    ],
)
def test_an_error_repeats_no_more_than_the_begin_of_a_long_word(state: State, line: str, said: str) -> None:
    before = state.settings
    with pytest.raises((ParlayError, ValueError), match=said) as raised:
        run_command(state, line.replace("9", "9" * 100_000))
    assert len(str(raised.value)) < 400
    assert state.settings == before


@pytest.mark.parametrize("line", ["/exit", "/quit", "/bye"])
def test_every_word_for_leaving_leaves(state: State, line: str) -> None:
    with pytest.raises(Leave):
        run_command(state, line)


def test_proposals_can_be_typed_as_they_stand_and_are_few(state: State) -> None:
    with pytest.raises(ValueError, match="did you mean /strategy"):
        run_command(state, "/strat none")
    with pytest.raises(ValueError, match=r"unknown strategy 'foo': parlay strategies lists them$"):
        run_command(state, "/strategy foo")
    assert "temperature 3 is above 2" in run_command(state, "/set temperature 3")


def test_what_was_saved_can_be_loaded(state: State, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    run_command(state, "/system Answer in French.")
    state.conversation.add("user", "Où?")
    state.conversation.add("assistant", "Là.")
    run_command(state, f"/save {path}")
    said = state.conversation.whole()
    run_command(state, "/clear")
    assert state.conversation.messages == []
    run_command(state, f"/load {path}")
    assert state.conversation.whole() == said
    assert read_conversation(path).system == "Answer in French."


def test_what_was_saved_before_stays_where_the_next_conversation_can_not_be_written(
    state: State, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    state.conversation.add("user", "Why?")
    run_command(state, f"/save {path}")
    saved = path.read_text()
    state.conversation.system = "caf\udce9"  # a byte of the command line that is no text
    with pytest.raises(ParlayError, match="/save"):
        run_command(state, f"/save {path}")
    assert path.read_text() == saved
    assert [*tmp_path.iterdir()] == [path]


NO_CONVERSATIONS = (
    *("", "{}", "[1]", '[{"role": "user"}]', '[{"role": "tool", "content": "x"}]'),
    '[{"role": "user", "content": "\\ud800"}]',  # half a character
)


@pytest.mark.parametrize("text", NO_CONVERSATIONS)
def test_a_file_that_is_no_conversation_is_refused_by_name(text: str, state: State, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ParlayError, match=r"bad\.json"):
        run_command(state, f"/load {path}")
    with pytest.raises(ParlayError, match="/save"):
        run_command(state, f"/save {tmp_path}")


@pytest.mark.parametrize("command", ["save", "load"])
def test_a_home_folder_of_nobody_is_an_error_of_one_line(command: str, state: State) -> None:
    with pytest.raises(ParlayError, match=r"~nobody_at_all/chat\.json: there is no such home folder"):
        run_command(state, f"/{command} ~nobody_at_all/chat.json")


def test_retry_takes_the_answer_back_and_exit_leaves(state: State) -> None:
    with pytest.raises(ValueError, match="there is no message to repeat"):
        run_command(state, "/retry")
    state.conversation.add("user", "Why?")
    state.conversation.add("assistant", "Because.")
    with pytest.raises(AnswerAgain):
        run_command(state, "/retry")
    assert [message["role"] for message in state.conversation.messages] == ["user"]
    with pytest.raises(Leave):
        run_command(state, "/exit")


def test_help_names_every_command_and_a_typing_error_gets_the_closest_one(state: State) -> None:
    listed = run_command(state, "/help")
    assert all(f"/{name}" in listed for name in COMMANDS)
    with pytest.raises(ValueError, match="did you mean /strategy"):
        run_command(state, "/stratgy none")


def test_every_command_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "chat.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`/([a-z]+)", page)) == set(COMMANDS)
