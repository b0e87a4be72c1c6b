"""The health battery: each fault under its name, healthy states none, statistics as numpy computes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hscache.health import REASONS, Health, RowMeter, RowStats, find_fault, may_be_faulty, reduce_rows
from hscache.store.layout import canonical_json

TAPS = (1, 5, 9)


def healthy(n: int = 12, taps: int = 3, width: int = 16, seed: int = 0) -> torch.Tensor:
    """Return states as real targets have them: growing with depth, outlier channels, massive activations at token 0."""
    made = torch.Generator().manual_seed(seed)
    states = torch.randn(n, taps, width, generator=made) * torch.tensor([1.0, 4.0, 30.0, 60.0])[:taps, None]
    states[:, :, 3] *= 50
    states[0, :, 7] = 3000.0
    return states.bfloat16()


def final(n: int = 12, width: int = 16) -> torch.Tensor:
    return torch.randn(n, 1, width, generator=torch.Generator().manual_seed(1)).bfloat16()


def stats_of(states: torch.Tensor, last: torch.Tensor | None = None) -> RowStats:
    return RowStats.join(*(reduce_rows(part) for part in (states, last) if part is not None))


def fault(states: torch.Tensor, last: torch.Tensor | None = None) -> tuple[str, str]:
    return find_fault(stats_of(states, last), TAPS[: states.shape[1]])


@pytest.mark.parametrize("n", [1, 2, 12, 300])
def test_healthy_states_have_no_fault(n: int) -> None:
    assert fault(healthy(n), final(n)) == ("", "")
    assert fault(healthy(n)) == ("", "")
    assert fault(healthy(n, taps=1)) == ("", "")


Plant = Callable[[torch.Tensor], object]
PLANTS: list[tuple[str, str, str, Plant]] = [
    ("one inf", "non-finite", "tap 5, token 4; 1 state vectors in all", lambda x: x[4, 1].__setitem__(2, torch.inf)),
    ("one -inf", "non-finite", "tap 9, token 0", lambda x: x[0, 2].__setitem__(0, -torch.inf)),
    ("one nan", "non-finite", "tap 1, token 11", lambda x: x[11, 0].__setitem__(15, torch.nan)),
    ("nan rows", "non-finite", "24 state vectors", lambda x: x[:, 1:].fill_(torch.nan)),
    ("too large", "non-finite", "tap 1, token 2", lambda x: x[2, 0].mul_(1e25)),
    ("zero tap", "zero-tap", "tap 9", lambda x: x[:, 2].zero_()),
    ("negative zeros", "zero-tap", "tap 1", lambda x: x[:, 0].fill_(-0.0)),
    ("zero row", "constant-row", "tap 5, token 3: every channel is 0", lambda x: x[3, 1].zero_()),
    ("constant row", "constant-row", "tap 1, token 11: every channel is 2.5", lambda x: x[11, 0].fill_(2.5)),
    ("constant tap", "constant-tap", "tap 5: the same state at all 12", lambda x: x[:, 1].copy_(x[:1, 1].clone())),
    ("twin taps", "duplicate-taps", "tap 1 equals tap 5", lambda x: x[:, 1].copy_(x[:, 0].clone())),
    ("last twins", "duplicate-taps", "tap 5 equals tap 9", lambda x: x[:, 2].copy_(x[:, 1].clone())),
]


@pytest.mark.parametrize(("reason", "told", "harm"), [p[1:] for p in PLANTS], ids=[p[0] for p in PLANTS])
def test_a_planted_fault_is_named_with_its_place(reason: str, told: str, harm: Plant) -> None:
    states = healthy()
    harm(states)
    got, detail = fault(states, final())
    assert (got, told in detail) == (reason, True), detail


def test_the_plants_cover_all_reasons_that_states_can_give() -> None:
    assert {plant[1] for plant in PLANTS} == REASONS.keys() - {"length-mismatch", "out-of-memory"}


def test_a_fault_of_the_final_state_is_called_so() -> None:
    last = final()
    last[5] = 1.0
    assert fault(healthy(), last) == ("constant-row", "final state, token 5: every channel is 1")


def test_one_equal_state_of_two_taps_or_tokens_is_no_fault() -> None:
    states = healthy()
    states[4, 1] = states[4, 0]
    states[7, 2] = states[6, 2]
    assert fault(states) == ("", "")


def test_a_sample_of_one_token_is_not_called_constant() -> None:
    assert fault(healthy(1)) == ("", "")


def test_rows_of_neighbouring_samples_do_not_count_as_equal() -> None:
    states = healthy(6)
    states[3] = states[2]  # the last token of one sample, the first of the next
    stats = stats_of(states)
    assert find_fault(stats.rows(0, 3), TAPS) == ("", "")
    assert find_fault(stats.rows(3, 6), TAPS) == ("", "")


shapes = st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(2, 24), st.integers(0, 1 << 32))


@given(shapes)
def test_reductions_are_those_of_numpy(shape: tuple[int, int, int, int]) -> None:
    n, taps, width, seed = shape
    states = healthy(n, taps, max(width, 8), seed)
    if n > 2:
        states[1] = states[0]
    stats, numbers = stats_of(states), states.float().numpy()
    np.testing.assert_array_equal(stats.low, numbers.min(-1))
    np.testing.assert_array_equal(stats.high, numbers.max(-1))
    np.testing.assert_allclose(stats.square, np.square(numbers, dtype=np.float64).mean(-1), rtol=1e-5)
    np.testing.assert_array_equal(stats.same_as_next_tap, (numbers[:, 1:] == numbers[:, :-1]).all(-1))
    next_row = np.append((numbers[1:] == numbers[:-1]).all(-1), np.zeros((1, taps), bool), axis=0)
    np.testing.assert_array_equal(stats.same_as_next_row, next_row)


def test_health_numbers_are_those_of_numpy_over_all_samples() -> None:
    parts = [(healthy(n, seed=n), final(n)) for n in (3, 1, 40)]
    health = Health(4)
    for states, last in parts:
        health.add(stats_of(states, last))
    numbers = torch.cat([torch.cat(part, dim=1) for part in parts]).double().numpy()
    square = np.square(numbers).mean(-1)
    got = health.to_json()
    assert got["tokens"] == 44
    np.testing.assert_allclose(got["rms"], np.sqrt(square.mean(0)), rtol=1e-5)
    np.testing.assert_allclose(got["typical_rms"], np.exp(np.log(square).mean(0) / 2), rtol=1e-5)
    np.testing.assert_array_equal(got["max_abs"], np.abs(numbers).max((0, 2)))


def test_typical_magnitude_hardly_moves_with_a_few_massive_states() -> None:
    plain, massive = healthy(200), healthy(200)
    massive[:4] *= 100
    first, second = Health(3), Health(3)
    first.add(stats_of(plain))
    second.add(stats_of(massive))
    ratio = np.divide(second.to_json()["typical_rms"], first.to_json()["typical_rms"])
    assert ((ratio > 1) & (ratio < 1.2)).all()
    assert (np.divide(second.to_json()["rms"], first.to_json()["rms"]) > 3).any()


@pytest.mark.parametrize("scale", [1e-33, 1e-20, 1.0, 1e17])
def test_any_accepted_magnitude_gives_a_record_that_is_json(scale: float) -> None:
    states = (healthy(5).float() / 3000 * scale).bfloat16()
    assert fault(states) == ("", "")
    health = Health(3)
    health.add(stats_of(states))
    assert canonical_json(health.to_json())


def test_health_of_nothing_is_json() -> None:
    assert canonical_json(Health(3).to_json())


def signs(states: torch.Tensor, last: torch.Tensor) -> bool:
    meter, parts = RowMeter(states.shape[-1]), (states, last)
    measured = [meter.measure(part.contiguous().view(torch.int16).numpy().view(np.uint16)) for part in parts]
    square, largest = (np.concatenate([part[k] for part in measured], axis=1) for k in (0, 1))
    return may_be_faulty(square, largest, states.shape[1])


@pytest.mark.parametrize(("reason", "harm"), [(p[1], p[3]) for p in PLANTS], ids=[p[0] for p in PLANTS])
@pytest.mark.parametrize("width", [16, 40])
def test_no_fault_lacks_the_signs_that_the_fast_measure_looks_for(reason: str, harm: Plant, width: int) -> None:
    states, last = healthy(width=width), final(width=width)
    assert not signs(states, last)
    harm(states)
    assert fault(states, last)[0] == reason
    assert signs(states, last)


@pytest.mark.parametrize("value", [0.0, 2.5, torch.inf, torch.nan])
def test_a_fault_of_the_final_state_has_signs_too(value: float) -> None:
    states, last = healthy(), final()
    last[4, 0] = value
    assert fault(states, last)[0]
    assert signs(states, last)


@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 3, 24), (300, 5, 2048)])
def test_the_fast_measure_gives_the_numbers_of_the_reductions(shape: tuple[int, int, int]) -> None:
    states = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 40).bfloat16()
    square, largest = RowMeter(shape[-1]).measure(states.view(torch.int16).numpy().view(np.uint16))
    slow = RowStats.join(reduce_rows(states))
    np.testing.assert_array_equal(largest, np.maximum(-slow.low, slow.high))
    np.testing.assert_allclose(square, slow.square, rtol=1e-5)
