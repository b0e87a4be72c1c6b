"""The distance of two sets of states: the figures by their definitions, and what has no angle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hscache.distance import POSITIONS, Distance, Sums, compare, position_groups


def by_definition(reference: torch.Tensor, other: torch.Tensor) -> Distance:
    apart = 1 - torch.cosine_similarity(reference, other, dim=-1)
    size = reference.norm()
    return Distance(
        len(apart),
        float(apart.mean()),
        float(apart.max()),
        float((other - reference).norm() / size),
        float(other.norm() / size),
    )


def same(distance: Distance, expected: Distance) -> bool:
    return list(vars(distance).values()) == pytest.approx(list(vars(expected).values()))


def test_sums_over_batches_give_the_figures_of_all_vectors_together() -> None:
    made = torch.Generator().manual_seed(0)
    a_BTCH = torch.randn(4, 130, 2, 16, generator=made, dtype=torch.float64)
    b_BTCH = 1.01 * a_BTCH + 0.1 * torch.randn(a_BTCH.shape, generator=made, dtype=torch.float64)
    keep_BT = torch.rand(4, 130, generator=made) < 0.7
    sums, groups_T = Sums(2), position_groups(130)
    for batch in (slice(0, 1), slice(1, 4)):
        sums.add(compare(a_BTCH[batch], b_BTCH[batch]), keep_BT[batch])
    assert same(sums.distance(), by_definition(a_BTCH[keep_BT].view(-1, 16), b_BTCH[keep_BT].view(-1, 16)))
    for column in range(2):
        a_BTH, b_BTH = a_BTCH[:, :, column], b_BTCH[:, :, column]
        assert same(sums.distance(column), by_definition(a_BTH[keep_BT], b_BTH[keep_BT]))
        by_position = sums.by_position(column)
        assert list(by_position) == list(POSITIONS)
        for group, name in enumerate(POSITIONS):
            rows = keep_BT & (groups_T == group)
            assert same(by_position[name], by_definition(a_BTH[rows], b_BTH[rows]))


def test_tokens_are_grouped_by_where_kernels_fail() -> None:
    groups = [POSITIONS[group] for group in position_groups(130).tolist()]
    assert [t for t, group in enumerate(groups) if group == "first 4"] == [0, 1, 2, 3]
    assert [t for t, group in enumerate(groups) if group == "chunk border"] == [63, 64, 65, 127, 128, 129]


@pytest.mark.parametrize(
    ("reference", "other", "apart"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [1.0, 0.0], 1.0),
        ([1.0, 0.0], [0.0, 0.0], 1.0),
        ([1.0, 0.0], [-1.0, 0.0], 2.0),
        ([1.0, 0.0], [math.nan, 0.0], math.nan),
        ([1.0, 0.0], [math.inf, 0.0], math.nan),
    ],
)
def test_vectors_without_a_direction(reference: list[float], other: list[float], apart: float) -> None:
    found = compare(torch.tensor(reference), torch.tensor(other)).apart
    assert float(found) == pytest.approx(apart, nan_ok=True)


def test_an_angle_far_below_the_precision_of_its_cosine_is_seen() -> None:
    other = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert float(compare(torch.tensor([1.0, 0.0]), other).apart) == pytest.approx(5e-19, rel=1e-6)


def test_a_distance_that_is_not_finite_is_infinite() -> None:
    pairs = compare(torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 2), math.nan))
    sums = Sums(1)
    sums.add(replace(pairs, apart=pairs.apart.nan_to_num(nan=math.inf)))
    assert sums.distance() == Distance(1, math.inf, math.inf, math.inf, math.inf)
