"""Scores from the cache against decoding one block at a time, as a server would."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hstrain.drafter.attention import Blocks
from hstrain.drafter.losses import Head
from hstrain.drafter.model import Drafter, DrafterConfig, block_inputs, initialise
from hstrain.score import walk as evaluate
from hstrain.score.ddtree import accepted_lengths
from hstrain.score.walk import (
    Cost,
    SampleScore,
    difference,
    score_sample,
    score_store,
    speed_by_length,
    summarise,
)
from torch import Tensor

import hscache
from hscache.errors import HscacheError
from hscache.store.head import TargetHead, load_head
from hscache.store.reader import Sample
from tests.hstrain.drafter.test_losses import Largest
from tests.made.stores import Little
from tests.made.trainers import BLOCK, MASK, little_config, little_drafter, little_head, sample, training_store

K = BLOCK - 1
HEAD = little_head()
Accept = Callable[[Tensor, list[int]], int]
"""Log-probabilities [K, V] of a block and the turn's tokens behind its anchor -> drafted tokens that are accepted."""


def block_of(drafter: Drafter, one: Sample, anchor: int, head: Head = HEAD) -> Tensor:
    """Draft one block with a context of its own and return the log-probabilities of its slots, [K, V]."""
    positions = torch.arange(anchor)
    context = drafter.context(one.hidden_states[:anchor], positions)
    blocks = Blocks(torch.tensor([anchor]), torch.tensor([0]), torch.tensor([anchor]), BLOCK, anchor)
    inputs = block_inputs(one.input_ids[anchor : anchor + 1].long(), head.embed_VH, drafter.config)
    with torch.no_grad():
        return head.logits(drafter.draft(inputs, blocks, context))[1:].log_softmax(-1)


def greedy(logprobs: Tensor, rest: list[int]) -> int:
    """Return how many leading slots say what the turn says."""
    streak = 0
    while streak < min(K, len(rest)) and int(logprobs[streak].argmax()) == rest[streak]:
        streak += 1
    return streak


def turns_of(one: Sample) -> list[tuple[int, int]]:
    """Return the supervised stretches."""
    mask = [0, *one.loss_mask.tolist(), 0]
    starts = [t for t in range(len(one.loss_mask)) if not mask[t] and mask[t + 1]]
    stops = [t for t in range(1, len(mask)) if mask[t] == 0 and mask[t - 1]]
    return list(zip(starts, [stop - 1 for stop in stops], strict=True))


def slow_walk(drafter: Drafter, one: Sample, accept: Accept = greedy) -> list[int]:
    """Return what each step of serving yields: the first token of a turn is known, the rest is drafted."""
    steps = []
    for start, stop in turns_of(one):
        at = max(start, 1)
        while at < stop - 1:
            rest = one.input_ids[at + 1 : stop].tolist()
            taken = min(accept(block_of(drafter, one, at), rest) + 1, len(rest))
            steps.append(taken)
            at += taken
    return steps


def drafted(drafter: Drafter, n: int, turns: list[tuple[int, int]], seed: int) -> Sample:
    """Return a sample that the drafter predicts in part: its own blocks with a wrong token here and there."""
    one, rng = sample(n, turns, seed), np.random.default_rng(seed)
    ids = one.input_ids.clone()
    for start, stop in turns:
        at = max(start, 1)
        while at < min(stop, n) - 1:
            said = block_of(drafter, dataclasses.replace(one, input_ids=ids), at).argmax(-1)
            right = int(rng.integers(0, K + 1))
            for k in range(right + 1):
                if at + 1 + k < min(stop, n):
                    ids[at + 1 + k] = int(said[k]) if k < right else int(rng.integers(0, MASK))
            at += right + 1
    return dataclasses.replace(one, input_ids=ids, tag=("a", "b")[seed % 2])


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    return little_drafter()


@pytest.fixture(scope="module")
def samples(drafter: Drafter) -> list[Sample]:
    """One turn, several, a turn from the first token on, turns of two tokens and of one, and turns at the end."""
    shapes: list[list[tuple[int, int]]] = [
        [(5, 30)],
        [(3, 12), (15, 22), (26, 30)],
        [(0, 14), (20, 22), (24, 25), (28, 30)],
        [(10, 11), (29, 30)],
        [(2, 30)],
    ]
    return [drafted(drafter, 30, turns, seed) for seed, turns in enumerate(shapes)]


@pytest.fixture(scope="module")
def scores(drafter: Drafter, samples: list[Sample]) -> list[SampleScore]:
    return [score_sample(drafter, HEAD, one, trees=(1, 2, 4, 8, 16)) for one in samples]


def test_the_walk_is_that_of_decoding_one_block_at_a_time(
    drafter: Drafter, samples: list[Sample], scores: list[SampleScore]
) -> None:
    slow = [slow_walk(drafter, one) for one in samples]
    assert [score.walk(score.streak) for score in scores] == slow
    assert slow[3] == []  # single supervised tokens can be no anchors
    found = summarise(scores)
    steps = [step for walk in slow for step in walk]
    assert set(steps) == {1, 2, 3, 4}
    assert found["tau"] == pytest.approx(sum(steps) / len(steps))
    assert found["tau_per_response"] == pytest.approx(np.mean([sum(walk) / len(walk) for walk in slow if walk]))
    assert found["tau_per_response"] != pytest.approx(found["tau"], abs=1e-3)
    assert found["histogram"] == [Counter(steps)[n] for n in range(1, K + 2)]
    # every supervised token but the first of a turn, which prefill gives, comes from exactly one step
    assert sum(steps) == sum(stop - max(start, 1) - 1 for one in samples for start, stop in turns_of(one))


def test_averages_over_all_anchors_are_those_of_a_loop(
    drafter: Drafter, samples: list[Sample], scores: list[SampleScore]
) -> None:
    yields, streaks, full = [], [], []
    right: list[list[bool]] = [[] for _ in range(K)]
    after: list[list[bool]] = [[] for _ in range(K)]
    for one in samples:
        for start, stop in turns_of(one):
            for at in range(max(start, 1), stop - 1):
                logprobs, rest = block_of(drafter, one, at), one.input_ids[at + 1 : stop].tolist()
                streak = greedy(logprobs, rest)
                streaks.append(streak)
                yields.append(min(streak + 1, len(rest)))
                for k in range(min(K, len(rest))):
                    right[k].append(int(logprobs[k].argmax()) == rest[k])
                    if k <= streak:
                        after[k].append(right[k][-1])
                if len(rest) >= K:
                    full.append(streak == K)
    found = summarise(scores)
    assert found["anchors"] == len(yields)
    assert found["samples"] == 4
    assert found["tau_all"] == pytest.approx(np.mean(yields))
    assert found["streak"] == pytest.approx(np.mean(streaks))
    assert found["acc"] == pytest.approx([np.mean(slot) for slot in right])
    assert found["acc_after_right"] == pytest.approx([np.mean(slot) for slot in after])
    assert found["full_block"] == pytest.approx(np.mean(full))
    assert 0 < found["full_block"] < 1
    assert found["tau_all"] != pytest.approx(found["tau"], abs=1e-3)  # another number


def test_predicted_speeds_are_those_of_walks_with_shorter_blocks(
    drafter: Drafter, samples: list[Sample], scores: list[SampleScore]
) -> None:
    cost = Cost(draft=0.25, verify=1.75)
    assert (cost.step(K, K), cost.step(0, K)) == (2.0, 1.25)
    found = speed_by_length(scores, cost)
    for n, speed in enumerate(found, 1):
        steps = [
            step
            for one in samples
            for step in slow_walk(drafter, one, lambda logprobs, rest, n=n: min(greedy(logprobs, rest), n))
        ]
        assert max(steps) <= n + 1
        assert speed == pytest.approx(np.mean(steps) / (0.25 + 1 + 0.75 * n / K))
    assert found[-1] == pytest.approx(summarise(scores)["tau"] / 2)
    steeper = Cost(draft=0.25, verify=1.75, keep=0.5, row=0.125)
    assert (steeper.step(K, K), steeper.step(K - 2, K), Cost(0.25, 1.75, row=9.0).step(1, K)) == (2.5, 2.25, 1.25)
    assert speed_by_length(scores, cost, [K - 1])[0] == pytest.approx(found[-2] * cost.step(K - 1, K) / 2)
    kept = speed_by_length(scores, Cost(draft=0.25, verify=1.75, keep=0.5))
    assert kept[-1] == pytest.approx(summarise(scores)["tau"] / 2.5)


def test_acceptance_under_sampling_lies_between_its_bounds(little: Little) -> None:
    """Against the whole distributions, the target's from the final states."""
    store, drafter = hscache.open(little.path), little_drafter()
    head = Head(load_head(little.path / "target"), "cpu", torch.float32)
    scores = [score_sample(drafter, head, one, sampling=True) for one in store]
    exact: list[list[float]] = [[] for _ in range(K)]
    yields = []
    for one, score in zip(store, scores, strict=True):
        theirs = head.logits(one.final_state.float()).log_softmax(-1).exp()
        assert score.overlap_NK2 is not None
        for row, at in enumerate(score.anchors_N.tolist()):
            ours, left = block_of(drafter, one, at, head).exp(), int(score.left_N[row])
            expected = chance = 1.0
            for k in range(min(K, left)):
                accepted = float(torch.minimum(ours[k], theirs[at + k]).sum())
                low, high = score.overlap_NK2[row, k]
                assert low - 2e-2 <= accepted <= high + 2e-2  # final states are rounded to bf16, logits to fp16
                exact[k].append(accepted)
                chance *= accepted
                expected += chance if k < left - 1 else 0.0
            yields.append(expected)
    found: Any = summarise(scores)["sampling"]
    low, high = found["tau_all"]
    assert low - 1e-2 <= np.mean(yields) <= high + 1e-2
    assert low < high
    for bounds, slot in zip(found["acc"], exact, strict=True):
        assert bounds[0] - 1e-2 <= np.mean(slot) <= bounds[1] + 1e-2
    assert summarise([score_sample(drafter, head, one) for one in store])["sampling"] is None


def test_the_last_anchors_of_a_turn_yield_what_is_left(scores: list[SampleScore]) -> None:
    for score in scores:
        assert (score.left_N >= 1).all()
        behind = np.arange(K) >= score.left_N[:, None]
        assert not score.correct_NK[behind].any()
    assert scores[0].anchors_N.tolist() == list(range(5, 29))
    assert scores[0].left_N.tolist() == list(range(24, 0, -1))
    assert scores[2].anchors_N.tolist() == [*range(1, 13), 20, 28]
    assert scores[2].left_N.tolist() == [*range(12, 0, -1), 1, 1]
    assert scores[3].anchors_N.tolist() == []


def test_trees_are_scored_on_the_walk_that_they_make(
    drafter: Drafter, samples: list[Sample], scores: list[SampleScore]
) -> None:
    found = summarise(scores)
    for n in (1, 4, 16):

        def in_tree(logprobs: Tensor, rest: list[int], n: int = n) -> int:
            best, ids = logprobs.topk(logprobs.shape[1])
            row = (rest + [-1] * K)[:K]
            return int(accepted_lengths(ids[None], best[None], [row], (n,))[0, 0])

        steps = [step for one in samples for step in slow_walk(drafter, one, in_tree)]
        assert found["ddtree"][str(n)] == pytest.approx(sum(steps) / len(steps))


def test_more_nodes_accept_more_and_enough_of_them_no_less_than_the_chain(
    drafter: Drafter, samples: list[Sample], scores: list[SampleScore]
) -> None:
    taus = list(summarise(scores)["ddtree"].values())
    assert taus == sorted(taus)
    for score in scores:
        assert (np.diff(score.tree_Ns, axis=1) >= 0).all()
        assert (score.tree_Ns[:, 0] <= score.streak).all()  # one node is the first slot's best token
    # of V + V * V better continuations at most, the chain of three is among the first 1057
    many = [score_sample(drafter, HEAD, one, trees=(1057,)) for one in samples[:2]]
    assert all((score.tree_Ns[:, 0] >= score.streak).all() for score in many)
    few = summarise([score_sample(drafter, HEAD, one) for one in samples[:2]])
    assert summarise(many)["ddtree"]["1057"] >= few["tau"]
    assert few["ddtree"] == {}


def test_ties_fall_as_in_live_decoding_however_many_nodes_are_asked_for(
    drafter: Drafter, samples: list[Sample], scores: list[SampleScore]
) -> None:
    """A bf16 head ties often, and which of equal logits comes first in a top-k depends on k."""
    tied = little_head()
    tied.lm_head_VH = tied.lm_head_VH.clone()
    tied.lm_head_VH[8:16] = tied.lm_head_VH[16:24] = tied.lm_head_VH[:8]
    for one in samples[:3]:
        found = [score_sample(drafter, tied, one, trees=trees) for trees in ((), (1,), (8,), (16, 64))]
        anchors, turns = found[0].anchors_N, turns_of(one)
        for score in found[1:]:
            assert np.array_equal(score.correct_NK, found[0].correct_NK)
        for n, at in enumerate(anchors.tolist()):
            stop = next(stop for start, stop in turns if start <= at < stop)
            said = block_of(drafter, one, at, tied).argmax(-1).tolist()
            rest = one.input_ids[at + 1 : stop].tolist()
            assert found[0].correct_NK[n].tolist() == [k < len(rest) and said[k] == rest[k] for k in range(K)]


def test_the_interval_holds_tau_and_is_a_function_of_the_scores(scores: list[SampleScore]) -> None:
    for some in (scores, scores[:2], scores[2:], scores[:1]):
        found = summarise(some)
        low, high = found["tau_interval"]
        assert low <= found["tau"] <= high
        assert summarise(some)["tau_interval"] == [low, high]
    low, high = summarise(scores[:1])["tau_interval"]
    assert low == high
    low, high = summarise(scores)["tau_interval"]
    assert low < high


def by_hand(sample_id: str, correct: list[bool], left: int = 3) -> SampleScore:
    """Three anchors with one slot each."""
    anchors = np.arange(10, 10 + len(correct))
    lefts = np.arange(left, left - len(correct), -1)
    return SampleScore(
        sample_id, None, anchors, lefts, np.array(correct)[:, None], (), np.zeros((len(correct), 0), int)
    )


def test_a_difference_is_paired_over_the_samples_that_both_have() -> None:
    right, wrong = [True, True, True], [False, False, False]
    base = [by_hand("a", right), by_hand("b", wrong), by_hand("c", wrong), by_hand("alone", right)]
    other = [by_hand("c", right), by_hand("a", wrong), by_hand("b", wrong), by_hand("new", right)]
    found = difference(other, base)
    assert found is not None
    # walks 2 + 1, 1 + 1 + 1 and 1 + 1 + 1 on either side, of other samples
    assert (found["tau"], found["samples"], found["other_walks"]) == (0.0, 3, 2)
    low, high = found["interval"]  # type: ignore[misc]
    assert low < 0 < high
    # samples differ from each other, and not at all between the two sides: pairing leaves nothing
    assert difference(base, base) == {"tau": 0.0, "interval": [0.0, 0.0], "samples": 4, "other_walks": 0}
    worse = difference([by_hand(score.sample_id, wrong) for score in base], base)
    assert worse is not None
    assert worse["tau"] == 12 / 12 - 12 / 10


def test_a_difference_between_other_samples_is_none() -> None:
    base = [by_hand("a", [True])]
    assert difference([by_hand("b", [True])], base) is None
    assert difference([by_hand("a", [True, True])], base) is None
    assert difference([by_hand("a", [True], left=2)], base) is None
    assert difference([], base) is None


def test_nothing_to_score_is_told_apart_from_a_bad_drafter(scores: list[SampleScore]) -> None:
    assert summarise([]) == {"samples": 0, "anchors": 0}
    assert summarise([scores[3]]) == {"samples": 0, "anchors": 0}


def test_tau_by_tag(scores: list[SampleScore]) -> None:
    found = evaluate.by_tag(scores)
    assert found.keys() == {"a", "b"}
    assert found["a"] == summarise([s for s in scores if s.tag == "a"])["tau"]
    assert found["b"] == summarise([s for s in scores if s.tag == "b"])["tau"]
    assert evaluate.by_tag([dataclasses.replace(scores[0], tag=None)]).keys() == {"untagged"}


def test_many_anchors_are_drafted_a_few_at_a_time_without_a_difference(
    drafter: Drafter, samples: list[Sample], scores: list[SampleScore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_CHUNK_ANCHORS", 5)
    for one, score in zip(samples, scores, strict=True):
        again = score_sample(drafter, HEAD, one, trees=(1, 2, 4, 8, 16))
        for name in ("anchors_N", "left_N", "correct_NK", "tree_Ns"):
            assert np.array_equal(getattr(again, name), getattr(score, name))


def test_a_store_is_scored_sample_by_sample(drafter: Drafter, tmp_path: Path) -> None:
    little: Little = training_store(tmp_path / "store")
    store = hscache.open(little.path)
    found = score_store(drafter, HEAD, store, [4, 1], trees=(8,))
    for score, i in zip(found, (4, 1), strict=True):
        alone = score_sample(drafter, HEAD, store[i], trees=(8,))
        assert (score.sample_id, score.tag) == (store.sample_ids[i], store.tags[i])
        assert np.array_equal(score.correct_NK, alone.correct_NK)
        assert np.array_equal(score.tree_Ns, alone.tree_Ns)
    some = little_drafter(little_config(taps=(0, 3)))
    (score,) = score_store(some, HEAD, store, [3])
    whole = store[3]
    cut = dataclasses.replace(whole, hidden_states=whole.hidden_states[:, [0, 2]])
    assert np.array_equal(score.correct_NK, score_sample(some, HEAD, cut).correct_NK)


def test_logits_of_all_anchors_never_exist() -> None:
    vocab, slots = 248_320, 7
    weights = torch.randn(vocab, 8, generator=torch.Generator().manual_seed(0))
    facts: dict[str, Any] = {"head": {"scale": 1.0, "softcap": None}}
    head = Head(TargetHead(weights, weights, torch.ones(8), facts), "cpu", torch.float32)
    config = DrafterConfig(8, vocab, (0, 2, 3), 4, ("full_attention",), 16, 2, 1, 4, slots + 1, 0)
    drafter = Drafter(config)
    initialise(drafter, 0)
    with Largest() as seen:
        score = score_sample(drafter, head, sample(30, [(4, 30)]))
    assert len(score.anchors_N) * slots == 175
    assert seen.elements < 20 * vocab


def test_a_walk_over_turns_given_by_hand() -> None:
    correct = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]], bool)
    left = np.array([6, 5, 4, 3, 2, 1, 2, 1])  # a turn of seven tokens, and one of three
    score = SampleScore("s", None, np.arange(8), left, correct, (), np.zeros((8, 0), np.int64))
    assert score.streak.tolist() == [2, 0, 3, 0, 2, 1, 2, 1]
    assert score.walk(score.streak) == [3, 1, 2, 2]
    assert score.walk(np.zeros(8, np.int64)) == [1] * 8
    found = summarise([score])
    assert found["tau"] == 8 / 4
    assert found["histogram"] == [1, 2, 1, 0]
    assert found["full_block"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("trees", [(), (4,)])
def test_a_drafter_that_computes_no_numbers_is_refused(drafter: Drafter, trees: tuple[int, ...]) -> None:
    """Of NaN the most likely token is 0: a figure would be that token's frequency."""
    broken = copy.deepcopy(drafter)
    broken.norm.weight.data[0] = torch.nan
    with pytest.raises(HscacheError) as refused:
        score_sample(broken, HEAD, sample(30, [(5, 30)], 0), trees=trees)
    assert (refused.value.code, refused.value.exit_code) == ("not-finite", 3)
