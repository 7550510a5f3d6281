"""Which layers stay in memory: as many as the room holds beside two buffers, evenly spread."""

from __future__ import annotations

import pytest

from parlay.types.layer_split import least_room, split_layers


@pytest.mark.parametrize(
    ("room", "streamed"),
    [
        (100, ()),
        (99, (1, 5, 8)),
        (90, (1, 5, 8)),
        (89, (1, 3, 6, 8)),
        (29, tuple(range(10))),
        (20, tuple(range(10))),
    ],
)
def test_as_many_layers_stay_as_there_is_room_for(room: int, streamed: tuple[int, ...]) -> None:
    split = split_layers([10] * 10, room)
    assert split is not None
    assert split.streamed == streamed
    assert sorted(split.streamed + split.pinned) == list(range(10))
    assert split.streamed_bytes == 10 * len(streamed)
    assert split.resident_bytes <= room


def test_less_than_two_buffers_is_too_little() -> None:
    assert split_layers([10] * 10, 19) is None
    assert least_room([10] * 10) == 20
    assert least_room([10]) == 10  # streaming one layer saves nothing
    assert split_layers([10, 10], 19) is None
    assert split_layers([], 0) is not None


def test_buffers_are_as_large_as_the_largest_layer_in_them() -> None:
    sizes = [10, 10, 40, 10, 10, 10]
    assert least_room(sizes) == 80
    for room in range(80, 90):
        split = split_layers(sizes, room)
        assert split is not None
        assert split.resident_bytes <= room
