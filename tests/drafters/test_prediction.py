"""A predicted output is followed through every kind of edit, however either text is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from parlay.drafters.copying.prediction import SOURCE, PredictedOutput
from parlay.drafters.other_vocabularies.letters import Letters, readable
from parlay.drafters.resources import Resources
from parlay.options import UsageError
from parlay.strategies.building import build
from parlay.strategies.spelling import parse
from parlay.testing.toy_tokenizers import byte_level, sentence_pieces
from parlay.types import NO_DRAFT, Draft, Request
from tests.drafters.sight import GREEDY, Sight, drafted, no_runner

LINES = (
    "def total(values):",
    "    result = 0",
    "    for value in values:",
    "        result = result + value",
    "    if result > 100:",
    "        print('so much', result)",
    "    return result",
    "# naïve café, 日本語 and 🙂",
)
TEXT = "\n".join(LINES)
TOKENIZER = byte_level([TEXT], 340, specials=["<end>"])
PIECES = sentence_pieces(["▁", "▁the", "▁quick", "the", "▁dog", "qu", "ick", "br", "own", "▁🙂", "é", ",", "o"])


def resources(tokenizer: PreTrainedTokenizerFast | None = TOKENIZER, vocab_size: int = 500) -> Resources:
    return Resources(vocab_size=vocab_size, open_runner=no_runner, tokenizer=tokenizer)


def predicted(ids: Sequence[int], *documents: Sequence[int]) -> Request:
    return replace(GREEDY, references=(tuple(ids), *map(tuple, documents)))


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def accepted(draft: Draft, answer: Sequence[int]) -> int:
    """How many tokens of ``answer`` the tree holds from its root on."""
    nodes = {(parent, token): node for node, (token, parent) in enumerate(zip(*_arrays(draft), strict=True))}
    node = -1
    for count, token in enumerate(answer):
        if (node, token) not in nodes:
            return count
        node = nodes[node, token]
    return len(answer)


def _arrays(draft: Draft) -> tuple[Sequence[int], Sequence[int]]:
    return draft.tree.tokens, draft.tree.parents


def made(resources: Resources, fallback: str = "") -> PredictedOutput:
    drafter = build(parse(f"prediction:fallback={fallback}"), resources)
    assert isinstance(drafter, PredictedOutput)
    return drafter


def steps(drafter: PredictedOutput, request: Request, answer: Sequence[int], budget: int = 31) -> int:
    """How many steps a target takes that writes ``answer``."""
    tokens, count = list(request.prompt), 0
    while len(tokens) < len(request.prompt) + len(answer):
        left = answer[len(tokens) - len(request.prompt) :]
        draft = drafted(drafter, tokens, budget, request)
        assert len(draft) <= budget
        tokens += left[: accepted(draft, left) + 1]
        count += 1
    return count


def edited(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new)


MOVED = "\n".join([*LINES[4:6], *LINES[:4], *LINES[6:]])
EDITS = {
    "a word replaced": (edited("so much", "enough"), 8),
    "a name renamed everywhere": (edited("result", "sum"), 14),
    "a word inserted": (edited("so much", "so very much"), 6),
    "a line inserted": (edited("    if ", "    result *= 2\n    if "), 8),
    "a line deleted": (edited("    result = 0\n", ""), 3),
    "another beginning": ("Here it is:\n" + TEXT, 14),
    "more at the end": (TEXT + "\nok", 4),
    "blocks moved": (MOVED, 7),
    "all indented": ("\n".join("  " + line for line in LINES), 21),
}


@pytest.mark.parametrize(("answer", "most"), EDITS.values(), ids=EDITS)
def test_every_kind_of_edit_is_survived(answer: str, most: int) -> None:
    """Plain decoding takes 42 to 64 steps; what is new comes letter by letter here, so the tokenizer is a hard one."""
    drafter = made(resources(), "prompt-lookup")
    assert steps(drafter, predicted(ids_of(TEXT)), ids_of(answer)) <= most


def test_a_prediction_that_is_the_answer_fills_every_step() -> None:
    ids = ids_of(TEXT)
    assert steps(made(resources()), predicted(ids), ids, 10) == -(-len(ids) // 11)
    draft = drafted(made(resources()), [0], 10, predicted(ids))
    assert list(draft.tree.tokens) == ids[:10]
    assert set(draft.sources) == {SOURCE}
    assert list(draft.scores) == sorted(draft.scores)


def test_tokens_may_be_cut_elsewhere() -> None:
    """The target writes byte by byte what the prediction holds in long tokens: drafted is what it has not said yet."""
    drafter, request = made(resources()), predicted(ids_of("the values of value"))
    single = [ids_of(letter)[0] for letter in "the val"]
    draft = drafted(drafter, [0, *single], 20, request)
    assert TOKENIZER.decode(list(draft.tree.tokens)) == "ues of value"


def test_inside_a_character_it_waits_for_its_end() -> None:
    single = {Letters(TOKENIZER).of(token): token for token in range(len(TOKENIZER))}
    smile = [single[chr(byte)] for byte in "🙂".encode()]
    drafter, request = made(resources()), predicted(ids_of("so 🙂 now"))
    start = [0, *ids_of("so"), *ids_of(" ")]
    drafts = [drafted(drafter, [*start, *smile[:count]], 9, request) for count in (0, 2, 4)]
    assert [TOKENIZER.decode(list(draft.tree.tokens)) for draft in drafts] == ["🙂 now", "", " now"]


def test_a_tokenizer_that_writes_spaces_as_signs() -> None:
    ids = PIECES.encode("the quick brown dog", add_special_tokens=False)
    drafter = made(resources(PIECES))
    answer = PIECES.encode("the 🙂 quick brown dog", add_special_tokens=False)
    assert steps(drafter, predicted(ids), answer) < len(answer) / 2


def test_without_a_tokenizer_ids_are_aligned() -> None:
    drafter = made(resources(None))
    request = predicted(range(100, 140))
    answer = [*range(100, 110), 7, *range(111, 120), 8, 9, *range(120, 125), *range(130, 140)]
    assert steps(drafter, request, answer) <= 7
    assert drafted(drafter, [0, 100, 101], 3, request).tree.tokens == (102, 103, 104)


def test_the_first_token_that_differs_stands_in_place_of_one() -> None:
    """So a substitution costs no step of its own; a second token that differs is another kind of change."""
    drafter, request = made(resources(None)), predicted(range(100, 140))
    assert drafted(drafter, [0, 100, 101, 7], 2, request).tree.tokens == (103, 104)
    assert drafted(drafter, [0, 100, 101, 7, 8], 2, request) == NO_DRAFT


def test_a_line_put_in_stands_before_the_next_one_that_is_indented_alike() -> None:
    """After its end the prediction goes on where it was left, with one token known: the line's beginning."""
    tokenizer = byte_level(["if it:\n    this is\n    that is\n"] * 9, 300)
    ids = tokenizer.encode("if it:\n    this is\n    that is\n")
    tokens = [0, *tokenizer.encode("if it:\n    zzz\n   ")]
    (draft,) = made(resources(tokenizer)).propose([Sight(0, tokens, predicted(ids))], [20])
    assert tokenizer.decode([*tokens[1:], *draft.tree.tokens]) == "if it:\n    zzz\n    this is\n    that is\n"


def test_special_tokens_are_no_text() -> None:
    """What reads like a special token is not one, and neither is drafted for the other."""
    end = TOKENIZER.convert_tokens_to_ids("<end>")
    spelled = [token for letter in "<end>" for token in ids_of(letter)]
    assert ids_of("a<end>b")[1] == end
    assert drafted(made(resources()), [0, *ids_of("a"), end], 5, predicted(ids_of("a<end>b"))).tree.tokens == (
        ids_of("b")[0],
    )
    assert Letters(TOKENIZER).text(spelled) != Letters(TOKENIZER).of(end)


def test_a_prediction_that_is_wrong_leaves_the_draft_to_the_fallback() -> None:
    ids = list(range(100, 130))
    request = replace(predicted(range(200, 230)), prompt=(*ids, 0))
    tokens = [*request.prompt, 100, 101, 102, 103]
    view = Sight(0, tokens, request, len(request.prompt))
    (draft,) = made(resources(None), "prompt-lookup").propose([view], [4])
    assert draft.tree.tokens == (104, 105, 106, 107)
    assert set(draft.sources) == {"prompt-lookup"}
    assert made(resources(None)).propose([view], [4]) == [NO_DRAFT]


def test_where_the_place_is_a_guess_the_fallback_is_tried_beside_it() -> None:
    request = replace(predicted([1, 2, 3, 4, 5, 6, 7, 8]), prompt=(9, 20, 21, 0))
    view = Sight(0, [*request.prompt, 1, 2, 9], request, 4)
    (draft,) = made(resources(None), "prompt-lookup").propose([view], [8])
    assert accepted(draft, [4, 5, 6, 7]) == 4
    assert accepted(draft, [20, 21]) == 2


@pytest.mark.parametrize("references", [(), ((),), ((), (5, 6))])
def test_without_a_prediction_the_fallback_drafts(references: tuple[tuple[int, ...], ...]) -> None:
    request = replace(GREEDY, references=references)
    assert drafted(made(resources(None)), [0, 1, 2], 4, request) == NO_DRAFT
    drafter = made(resources(None), "prompt-lookup")
    assert drafted(drafter, [0, 1, 2, 0, 1], 4, request).tree.tokens[:1] == (2,)


def test_budgets_from_none_to_absurd_and_ids_that_the_target_lacks() -> None:
    drafter = made(resources(None))
    assert drafted(drafter, [0, 1], 0, predicted([1, 2])) == NO_DRAFT
    assert drafted(drafter, [0, 1], 10**9, predicted([1, 2, 500, 3])).tree.tokens == (2,)
    assert drafted(drafter, [0, 1, 2, 500, 3], 5, predicted([1, 2, 500, 3])) == NO_DRAFT


@settings(max_examples=60, deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, 15), st.lists(st.integers(1, 30), max_size=12)), max_size=5),
    ids=st.lists(st.integers(1, 30), max_size=20),
    fallback=st.sampled_from(["", "prompt-lookup"]),
    tokenizer=st.sampled_from([None, TOKENIZER]),
)
def test_whatever_happened_before_it_proposes_what_a_fresh_one_would(
    edits: list[tuple[int, list[int]]],
    ids: list[int],
    fallback: str,
    tokenizer: PreTrainedTokenizerFast | None,
) -> None:
    drafter, request = made(resources(tokenizer), fallback), predicted(ids)
    live = [0]
    for cut, new in edits:
        live[1 + cut :] = new
        fresh = made(resources(tokenizer), fallback)
        assert drafted(drafter, live, 7, request) == drafted(fresh, live, 7, request)


def test_sequences_have_their_own_places_and_their_release_forgets_them() -> None:
    drafter, request = made(resources(None)), predicted([1, 2, 3, 4])
    views = [Sight(0, [0, 1], request), Sight(1, [0], request), Sight(2, [0, 1], predicted([1, 9]))]
    assert [draft.tree.tokens for draft in drafter.propose(views, [2, 2, 2])] == [(2, 3), (1, 2), (9,)]
    drafter.release(0)
    drafter.release(7)
    assert drafted(drafter, [0, 1, 2], 2, request).tree.tokens == (3, 4)


def test_one_fallback_at_most() -> None:
    with pytest.raises(UsageError, match="must name one drafter, or none"):
        made(resources(), "prompt-lookup+aggressive")
    with pytest.raises(UsageError, match="none drafts nothing"):
        made(resources(), "none")
    assert str(parse("prediction:fallback=")) == "prediction:fallback="


def test_letters_are_bytes() -> None:
    for tokenizer in (TOKENIZER, PIECES):
        ids = tokenizer.encode("the quick 🙂 café", add_special_tokens=False)
        assert readable(Letters(tokenizer).text(ids)).strip() == "the quick 🙂 café"
    assert readable("a\xf0\x9f") == "a"
    assert readable("\x9f\x99a") == ""
    assert readable("ab" + chr(300) + "c") == "ab"
