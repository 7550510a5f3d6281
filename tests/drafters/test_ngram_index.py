"""An index of a fixed text finds what a search of every place finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parlay.drafters.copying.ngram_index import END, Indexes, NgramIndex
from parlay.drafters.state_room import StateRoom

VOCAB = 3

texts = st.lists(st.integers(0, VOCAB - 1), max_size=20)


@given(
    several=st.lists(texts, max_size=3),
    query=st.lists(st.integers(0, VOCAB - 1), max_size=6),
    longest=st.integers(1, 5),
)
def test_it_finds_every_place_of_every_suffix(several: list[list[int]], query: list[int], longest: int) -> None:
    index = NgramIndex(several, longest, VOCAB)
    text = index.text.tolist()
    expected = []
    for size in range(1, min(longest, len(query)) + 1):
        places = [at for at in range(size, len(text)) if text[at - size : at] == query[-size:]]
        if not places:
            break
        expected.append(places)
    assert [list(places) for places in index.places(query)] == expected


def test_copies_end_with_their_part() -> None:
    index = NgramIndex([[1, 2], [], [0]], 2, VOCAB)
    assert index.copy(0, 9) == [1, 2]
    assert index.copy(1, 1) == [2]
    assert index.copy(2, 9) == []
    assert index.copy(4, 9) == [0]


def test_ids_that_the_target_does_not_have_divide_a_text_and_are_never_copied() -> None:
    index = NgramIndex([[0, 1, 7, 2, -5, 1]], 3, VOCAB)
    assert index.text.tolist() == [0, 1, END, 2, END, 1, END]
    assert index.copy(0, 9) == [0, 1]


def test_samples_share_the_index_of_their_texts_while_one_of_them_is_under_way() -> None:
    indexes = Indexes(2, VOCAB, room := StateRoom())
    texts = ((1, 2), (0,))
    indexes.begin([1, 1])
    first = indexes.ready(1, texts)
    assert first is not None
    assert indexes.ready(2, texts) is first
    held = room.nbytes
    indexes.release(1)
    assert indexes.ready(2, texts) is first
    assert room.nbytes == held > 0
    indexes.release(2)
    assert room.nbytes == 0
