"""The shared noise: fixed numbers for ever, uniform, independent, and the same token by the short and the long way."""

from __future__ import annotations

import math

import pytest
import torch

from parlay.compiled.build import NAMES
from parlay.compiled.library import SWITCH
from parlay.sampling import noise
from parlay.types import NoiseKey

MASK = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """Output number ``index`` of the published generator, in plain integers."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow_token(logits_V: torch.Tensor, state: int) -> int:
    scores = logits_V.double() + noise.gumbel(noise.bits([state], torch.arange(len(logits_V))))[0]
    return int((scores == scores.max()).nonzero()[0])


def looks_uniform(counts: torch.Tensor) -> bool:
    """Pearson's chi-square statistic within 4.5 standard deviations of its mean."""
    expected = counts.sum().item() / counts.numel()
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    free = counts.numel() - 1
    return abs(statistic - free) < 4.5 * math.sqrt(2 * free)


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]),
    ],
)
def test_bits_are_those_of_the_published_generator(seed: int, outputs: list[int]) -> None:
    assert [value & MASK for value in noise.bits([seed], torch.arange(4))[0].tolist()] == outputs


@pytest.mark.parametrize(
    ("key", "position", "purpose", "state"),
    [
        (NoiseKey(0), 0, 0, 0x2130748AAAC80268),
        (NoiseKey(42), 17, 0, 0x23E7CE5341A2B2CF),
        (NoiseKey(42, 1), 17, 0, 0x4E1875BC7802DED4),
        (NoiseKey(42), 17, 1, 0x3E26589911AFEAB2),
        (NoiseKey(-1, 3), 100_000, 0, 0x8CC1CF321EBB4BEE),
    ],
)
def test_streams_never_change(key: NoiseKey, position: int, purpose: int, state: int) -> None:
    assert noise.stream(key, position, purpose) == state


def test_noise_never_changes() -> None:
    state = noise.stream(NoiseKey(42), 17)
    values = noise.gumbel(noise.bits([state], torch.tensor([0, 1, 4095, 150_000])))[0]
    torch.testing.assert_close(
        values,
        torch.tensor(
            [-0.6997835157598972, -0.5202617196988245, -0.7965204860902112, 1.887352773836363], dtype=torch.float64
        ),
        rtol=1e-14,
        atol=0,
    )


def test_tensor_arithmetic_wraps_like_unsigned_integers() -> None:
    states = [0, 1, MASK, 1 << 63, noise.stream(NoiseKey(7), 7)]
    ids = [0, 1, 2, 127, 4096, 151_935, (1 << 31) - 1]
    table = noise.bits(states, torch.tensor(ids))
    for state, row in zip(states, table.tolist(), strict=True):
        assert [value & MASK for value in row] == [splitmix64(state, token) for token in ids]
    unmixed = [[state + (token + 1) * 0x9E3779B97F4A7C15 & MASK for token in ids] for state in states]
    signed = torch.tensor([[value - (1 << 64) if value >> 63 else value for value in row] for row in unmixed])
    assert torch.equal(noise._signed_hash(signed), table)  # as other devices compute it


def test_uniforms_stay_strictly_inside_the_unit_interval() -> None:
    extremes = torch.tensor([-(1 << 63), (1 << 63) - 1, 0, -1])
    uniforms = noise.uniform(extremes)
    assert uniforms.min() == 2.0**-53
    assert uniforms.max() == 1 - 2.0**-53
    assert noise.gumbel(extremes).isfinite().all()


def test_a_value_does_not_depend_on_the_values_beside_it() -> None:
    ids = torch.arange(1000)
    whole = noise.gumbel(noise.bits([99], ids)[0])
    for picked in (ids[3:4], ids[5:18], ids[::7], ids[991:]):
        assert torch.equal(noise.gumbel(noise.bits([99], picked)[0]), whole[picked])


COUNT = 16_384
SWEEPS = {
    "ids": ([NoiseKey(5)], [9], range(COUNT)),
    "positions": ([NoiseKey(5)], range(COUNT), [77]),
    "seeds": ([NoiseKey(seed) for seed in range(COUNT)], [9], [77]),
    "samples": ([NoiseKey(5, index) for index in range(COUNT)], [9], [77]),
}


@pytest.mark.parametrize("axis", SWEEPS)
def test_noise_is_uniform_and_neighbours_are_independent(axis: str) -> None:
    keys, positions, tokens = SWEEPS[axis]
    states = [noise.stream(key, position) for key in keys for position in positions]
    uniforms = noise.uniform(noise.bits(states, torch.tensor(tokens))).flatten()
    assert looks_uniform(torch.histc(uniforms, 128, 0, 1))
    pairs = (uniforms[:-1] * 16).long() * 16 + (uniforms[1:] * 16).long()
    assert looks_uniform(torch.bincount(pairs, minlength=256).double())
    low_bits = (uniforms * 2.0**52).long() & 63
    assert looks_uniform(torch.bincount(low_bits, minlength=64).double())


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 8.0, 60.0])
@pytest.mark.parametrize("coarse", [False, True])
def test_large_vocabularies_draw_the_token_of_the_full_computation(scale: float, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(int(scale * 10) + coarse)
    for state in range(12):
        logits_V = scale * torch.randn(9001 + 128 * state, generator=generator)
        if coarse:
            logits_V = logits_V.round()
        assert noise.draw(logits_V[None], [state * 3]) == [slow_token(logits_V, state * 3)]


def test_large_vocabularies_draw_among_few_unmasked_tokens() -> None:
    for count in (1, 5, 300):
        logits_V = torch.full((20_000,), -torch.inf)
        ids = torch.randperm(20_000, generator=torch.Generator().manual_seed(count))[:count].sort().values
        logits_V[ids] = torch.linspace(-3, 3, count)
        assert noise.draw(logits_V[None], [count]) == [slow_token(logits_V, count)]
        assert noise.draw_among(logits_V, ids, count) == slow_token(logits_V, count)


@pytest.mark.parametrize("size", [50, 20_000])
def test_equal_scores_go_to_the_lowest_id(size: int) -> None:
    """At 1e18 the noise is lost in rounding, so that all large logits tie."""
    logits_V = torch.zeros(size)
    logits_V[[7, 30, size - 1]] = 1e18
    assert noise.draw(logits_V[None], [1]) == [7]


def test_an_unlikely_token_wins_as_often_as_it_should() -> None:
    """Ten thousand tokens far below two hundred good ones share a twentieth of the draws."""
    size, draws, share = 10_200, 1500, 0.05
    logits_V = torch.full((size,), math.log(share / 10_000))
    logits_V[:200] = math.log((1 - share) / 200)
    outside = sum(token >= 200 for token in noise.draw(logits_V.expand(draws, size), range(draws)))
    assert abs(outside - draws * share) < 4.5 * math.sqrt(draws * share)


@pytest.mark.parametrize("switch", ["0", *NAMES])
@pytest.mark.parametrize("size", [1, 63, 64, 1000, 9001])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_the_best_are_the_same_with_and_without_the_compiled_library(
    switch: str, size: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    generator = torch.Generator().manual_seed(size)
    for scale in (0.0, 1.0, 30.0):
        logits_V = scale * torch.randn(size, generator=generator)
        logits_V[1::3] = -torch.inf
        scores_V = logits_V.double() + noise.gumbel(noise.bits([size], torch.arange(size)))[0]
        expected = [token for token in scores_V.sort(descending=True, stable=True).indices.tolist() if token % 3 != 1]
        assert noise.best(logits_V[None], [size], min(count, size)) == [expected[:count]]
        assert noise.draw(logits_V[None], [size]) == expected[:1]


@pytest.mark.parametrize("switch", ["0", *NAMES])
def test_more_equal_scores_than_the_library_has_room_for_go_to_the_lowest_ids(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    for size in (500, 20_000):
        assert noise.best(torch.full((1, size), 1e18), [1], 3) == [[0, 1, 2]]


def test_rows_of_another_type_are_read_as_what_they_are() -> None:
    logits_V = torch.randn(1000, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert noise.best(logits_V[None], [7], 5) == noise.best(logits_V[None].float(), [7], 5)
