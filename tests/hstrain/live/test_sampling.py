"""Rejection leaves the target's distribution as it is, whatever the drafter proposes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hstrain.live.sampling import accept_drafted, distribution, draw
from hypothesis import given
from hypothesis import strategies as st

DRAWS = 4000


def far(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return by how many standard deviations a chi-square statistic is above its mean."""
    used = expected > 1e-12
    assert counts[~used].sum() == 0, "a token without probability was drawn"
    degrees = used.sum() - 1
    if not degrees:
        return 0.0
    wanted = expected[used] * counts.sum()
    return float((((counts[used] - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees))


def make(seed: int, *shape: int, temperature: float = 1.0, top_p: float = 1.0) -> torch.Tensor:
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.5
    return distribution(logits, temperature, top_p)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.8), (1.7, 0.95)])
@pytest.mark.parametrize("same", [False, True])
def test_the_first_two_tokens_are_the_targets(temperature, top_p, same):
    vocabulary = 5
    p_BV = make(1, 3, vocabulary, temperature=temperature, top_p=top_p)
    q_kV = p_BV[:2] if same else make(2, 2, vocabulary, temperature=temperature, top_p=top_p)
    generator = torch.Generator().manual_seed(0)
    first, second, streaks = np.zeros(vocabulary), np.zeros(vocabulary), np.zeros(3)
    for _ in range(DRAWS):
        drafted_k = draw(q_kV, generator)
        streak, token = accept_drafted(p_BV, q_kV, drafted_k, generator)
        text = [*drafted_k[:streak].tolist(), token]
        streaks[streak] += 1
        first[text[0]] += 1
        if len(text) > 1:
            second[text[1]] += 1
    assert far(first, p_BV[0].numpy()) < 4
    assert far(second, p_BV[1].numpy()) < 4
    kept = torch.minimum(p_BV[:2], q_kV).sum(-1).numpy()
    assert far(streaks, np.array([1 - kept[0], kept[0] * (1 - kept[1]), kept[0] * kept[1]])) < 4
    if same:
        assert streaks[2] == DRAWS


def test_the_bound_would_find_a_drafters_distribution():
    p_V, q_V = make(1, 1, 5)[0], make(2, 1, 5)[0]
    counts = np.bincount(draw(q_V.expand(DRAWS, -1), torch.Generator().manual_seed(0)).numpy(), minlength=5)
    assert far(counts, p_V.numpy()) > 40


@given(st.integers(0, 10_000), st.floats(0.05, 1.0), st.floats(0.2, 3.0))
def test_the_nucleus_is_as_small_as_can_be(seed, top_p, temperature):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed))
    whole, cut = distribution(logits, temperature), distribution(logits, temperature, top_p)
    assert torch.allclose(cut.sum(-1), torch.ones(2, dtype=torch.float64))
    for p_V, cut_V in zip(whole, cut, strict=True):
        inside = cut_V > 0
        assert torch.allclose(cut_V[inside], p_V[inside] / p_V[inside].sum())
        assert float(p_V[inside].sum()) >= top_p - 1e-9
        assert float(p_V[inside].sum() - p_V[inside].min()) < top_p + 1e-9
        assert inside.all() or p_V[inside].min() >= p_V[~inside].max()


@pytest.mark.parametrize("temperature", [1e-310, 1.0, 1.7])
def test_a_nucleus_of_nothing_is_the_most_likely_token(temperature: float) -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3))
    logits[2, 7] = logits[2, 4] = 9.0  # equal: the first of them, as argmax has it
    p_nV = distribution(logits, temperature, 0.0)
    assert torch.equal(p_nV, torch.nn.functional.one_hot(logits.argmax(-1), 9).double())


def test_next_to_no_temperature_is_greedy() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(3)) - 50
    for top_p in (1.0, 0.5):
        assert torch.equal(distribution(logits, 1e-310, top_p).argmax(-1), logits.argmax(-1))
        assert torch.equal(distribution(logits, 1e-310, top_p).amax(-1), torch.ones(4).double())


def test_it_is_what_transformers_samples_from():
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 2
    theirs = TopPLogitsWarper(0.7)(None, TemperatureLogitsWarper(0.8)(None, logits)).softmax(-1)
    torch.testing.assert_close(distribution(logits, 0.8, 0.7).float(), theirs)
