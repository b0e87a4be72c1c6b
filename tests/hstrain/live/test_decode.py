"""Decoding with a drafter writes the target's text, and what it says of its steps is what happened."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_targets
import torch
from hstrain.drafter.attention import Blocks
from hstrain.live.decode import Decoded, Draft, decode
from hstrain.live.target import LiveTarget, Sampling

from tests.hstrain.live.test_sampling import far
from tests.made.live import FAMILIES, PROMPT, Oracle, checkpoint, head_of, live, random_drafter

GREEDY = Sampling(max_new_tokens=30)
B = 6
STREAKS = [0, 5, 1, 4, 2, 3, 5, 5, 0, 0]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of nine tokens, as few as loading allows."""
    return tiny_targets.save(
        "qwen3", tmp_path_factory.mktemp("targets") / "small", vocab_size=9, num_hidden_layers=2, hidden_size=32,
        head_dim=8, eos_token_id=None, bos_token_id=None, pad_token_id=None, initializer_range=0.3,
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("tree_size", [None, 6])
def test_sampled_text_is_distributed_as_the_targets(small, tree_size):
    prompt, runs, temperature, top_p = [1, 4, 2, 2, 0, 3], 1000, 0.9, 0.95
    with live(small, (0, 1)) as target:
        # an independent account of p(first two tokens), by the model's own forward
        def distribution(ids: list[int]) -> np.ndarray:
            logits = target.loaded.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            p = (logits.double() / temperature).softmax(-1).numpy()
            order = np.argsort(-p)
            keep = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]
            return np.where(np.isin(range(9), keep), p, 0) / p[keep].sum()

        first = distribution(prompt)
        second = np.array([distribution([*prompt, a]) for a in range(9)])
        third = np.array([[distribution([*prompt, a, b]) for b in range(9)] for a in range(9)])
        joint = first[:, None, None] * second[:, :, None] * third
        draft = Draft(random_drafter(target, block_size=4, seed=5), head_of(target), target.device)
        counts, accepted = np.zeros((9, 9, 9)), []
        for seed in range(runs):
            out = decode(target, prompt, Sampling(3, temperature, top_p, seed), draft, tree_size)
            counts[tuple(out.ids)] += 1
            accepted += [step.streak for step in out.steps]
    assert 0.2 < np.mean(accepted) < 1.8, "drafts are both kept and rejected, else nothing is tested"
    for axes in ((1, 2), 2, (0, 1), (0,), ()):
        seen, wanted = counts.sum(axes).ravel(), joint.sum(axes).ravel()
        often = wanted * runs > 5  # where a chi-square statistic means something
        seen, wanted = (np.append(x[often], x[~often].sum()) for x in (seen, wanted))
        assert far(seen, wanted) < 4


@pytest.fixture(scope="module", params=["tiny-hybrid", *FAMILIES])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTarget]:
    with live(checkpoint(request.param, tmp_path_factory.mktemp("targets"))) as opened:
        opened.eos_ids = set()
        yield opened


@pytest.fixture(scope="module")
def text(target: LiveTarget) -> list[int]:
    """What the target writes after the prompt, and some more for an oracle to propose beyond the end."""
    return decode(target, PROMPT, Sampling(max_new_tokens=GREEDY.max_new_tokens + B)).ids


def oracle(target: LiveTarget, text: Sequence[int], streaks: Sequence[int]) -> Oracle:
    return Oracle([*PROMPT, *text], target.loaded.shape.vocab_size, streaks, B)


def check_steps(out: Decoded) -> None:
    """The steps account for every token but the first, one after the other."""
    position = len(PROMPT)
    for step in out.steps:
        assert step.anchor == position
        assert step.accepted in (step.streak, step.streak + 1)
        position += step.accepted
    assert position == len(PROMPT) + len(out.ids) - 1
    assert all(step.accepted == step.streak + 1 for step in out.steps[:-1])
    assert len(out.ids) == len(out.top_ids) == len(out.top_logits)


@pytest.mark.parametrize("tree_size", [None, 10])
def test_a_random_drafter_changes_nothing(target, text, tree_size):
    draft = Draft(random_drafter(target, block_size=B), head_of(target), target.device)
    out = decode(target, PROMPT, GREEDY, draft, tree_size)
    assert out.ids == text[: GREEDY.max_new_tokens]
    assert [ids[0] for ids in out.top_ids] == out.ids
    check_steps(out)


def test_every_length_is_accepted_as_far_as_the_draft_is_right(target, text):
    out = decode(target, PROMPT, GREEDY, oracle(target, text, STREAKS))
    assert out.ids == text[: GREEDY.max_new_tokens]
    check_steps(out)
    streaks = [step.streak for step in out.steps]
    assert streaks[:-1] == (STREAKS * 3)[: len(streaks) - 1]
    assert set(streaks) == set(range(B))


def test_a_tree_goes_round_an_error(target, text):
    # the oracle's second choice at the wrong slot is the true token
    out = decode(target, PROMPT, GREEDY, oracle(target, text, STREAKS), 24)
    assert out.ids == text[: GREEDY.max_new_tokens]
    check_steps(out)
    assert all(step.streak == B - 1 for step in out.steps[:-1])
    # a tree of 3 nodes has no room for it
    streaks = [step.streak for step in decode(target, PROMPT, GREEDY, oracle(target, text, [1]), 3).steps]
    assert max(streaks) <= 3


def test_context_rows_are_those_before_the_anchor(target, text):
    told = oracle(target, text, STREAKS)
    out = decode(target, PROMPT, GREEDY, told)  # the oracle checks each anchor
    assert len(out.steps) == told.steps
    states = torch.cat(told.states)
    whole = target.prefill([*PROMPT, *text][: len(states)]).states
    assert float((states - whole).norm() / whole.norm()) < 1e-5


@pytest.mark.parametrize("new_tokens", [1, 2, 5, 7, 8])
def test_the_last_step_is_clipped(target, text, new_tokens):
    out = decode(target, PROMPT, Sampling(max_new_tokens=new_tokens), oracle(target, text, [B - 1]))
    assert out.ids == text[:new_tokens]
    assert out.finish_reason == "length"
    check_steps(out)
    wanted = {1: [], 2: [(1, 1)], 5: [(4, 4)], 7: [(5, 6)], 8: [(5, 6), (1, 1)]}[new_tokens]
    assert [(step.streak, step.accepted) for step in out.steps] == wanted


@pytest.mark.parametrize("tree_size", [None, 8])
def test_an_end_token_ends_the_text(target, text, tree_size):
    end = next(i for i in range(3, len(text)) if text[i] not in text[:i]) if len(set(text[:20])) > 3 else 0
    target.eos_ids = {text[end]}
    try:
        out = decode(target, PROMPT, GREEDY, oracle(target, text, [B - 1]), tree_size)
        assert out.ids == text[: end + 1] == decode(target, PROMPT, GREEDY).ids
        assert out.finish_reason == "stop"
        check_steps(out)
    finally:
        target.eos_ids = set()


def test_a_grown_context_drafts_as_one_pass_over_it(target):
    states = target.prefill(PROMPT).states
    drafter, head = random_drafter(target, block_size=B), head_of(target)
    draft = Draft(drafter, head, target.device)
    for first, last in ((0, 7), (7, 8), (8, 19), (19, len(PROMPT))):
        draft.extend(states[first:last])
    n = len(PROMPT)
    blocks = Blocks(torch.tensor([n]), torch.tensor([0]), torch.tensor([n]), B, n)
    inputs = head.embed[torch.tensor([42, *[drafter.config.mask_token_id] * (B - 1)])] * head.embed_scale
    once = head.logits(drafter(states.bfloat16(), torch.arange(n), inputs, blocks))[1:]
    torch.testing.assert_close(draft.propose(42), once, atol=1e-5, rtol=1e-5)


def test_sampling_follows_from_the_seed(target):
    draft = Draft(random_drafter(target, block_size=B), head_of(target), target.device)
    texts = [
        decode(target, PROMPT, Sampling(12, temperature=1.0, top_p=0.9, seed=seed), draft).ids for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
