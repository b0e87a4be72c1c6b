"""Losses in chunks against plain autograd over all logits at once, and the memory that chunks save."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hstrain.drafter import losses
from hstrain.drafter.losses import BlockLoss, Head, SlotTargets, chunk_rows, default_gamma, head_loss, logit_std
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hscache.store.head import TargetHead
from tests.made.stores import HIDDEN, VOCAB
from tests.made.trainers import little_head

KINDS = ("ce", "ce-argmax", "kl-topk", "kl-exact", "tv")
WEIGHTS = ("exp", "dpace", "none")
N, K, TOP = 7, 5, 6
GAMMA = 3.0


def targets_of(n: int = N, slots: int = K, vocab: int = VOCAB, hidden: int = HIDDEN, seed: int = 0) -> SlotTargets:
    """Return blocks of all lengths, from none to whole, and random distributions to learn."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (n, slots), generator=made)
    lengths = torch.arange(n) % (slots + 1)
    tokens[torch.arange(slots) >= lengths[:, None]] = -1
    rows = torch.randperm(n * slots, generator=made).view(n, slots)
    final = torch.randn(n * slots, hidden, generator=made)
    top, ids = (3 * torch.randn(n * slots, min(vocab, 64), generator=made)).log_softmax(-1).topk(TOP)
    return SlotTargets(tokens, rows, ids.int(), top.half(), final)


def hidden_of(n: int = N, slots: int = K, hidden: int = HIDDEN, seed: int = 1) -> Tensor:
    return torch.randn(n, slots, hidden, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain(hidden: Tensor, head: Head, targets: SlotTargets, kind: str, weights: str) -> tuple[Tensor, float]:
    """Return sum of weighted losses and sum of weights, slot by slot, in float64."""

    def logits_of(x: Tensor) -> Tensor:
        out = head.lm_head_VH.double() @ x * head.scale
        return out if head.softcap is None else head.softcap * torch.tanh(out / head.softcap)

    total, weight = torch.zeros((), dtype=torch.float64), 0.0
    for n, row in enumerate(targets.tokens_NK.tolist()):
        trained = [k for k, token in enumerate(row) if token >= 0]
        q = {k: logits_of(hidden[n, k].double()).log_softmax(-1) for k in trained}
        for k in trained:
            at = int(targets.rows_NK[n, k])
            if kind == "ce":
                loss = -q[k][row[k]]
            elif kind == "ce-argmax":
                loss = -q[k][int(targets.top_ids[at, 0])]
            elif kind == "kl-topk":
                ids, log_t = targets.top_ids[at].long(), targets.top_logprobs[at].double()
                loss = (log_t.exp() * (log_t - q[k][ids])).sum()
                rest_t, rest_q = 1 - log_t.exp().sum(), 1 - q[k][ids].exp().sum()
                loss = loss + rest_t * (rest_t.log() - rest_q.log())
            else:
                t = logits_of(targets.final_states[at].double()).softmax(-1)
                kl, tv = (t * (t.log() - q[k])).sum(), (t - q[k].exp()).abs().sum() / 2
                loss = kl if kind == "kl-exact" else tv
            w = {"exp": math.exp(-k / GAMMA), "none": 1.0}.get(weights)
            if w is None:  # D-PACE, arXiv 2605.18810: what a better slot would add to the expected length
                w = 0.0
                for m in range(k, len(trained)):
                    reach = 1.0
                    for i in range(m + 1):
                        reach *= 0.5 * math.exp(float(q[i][row[i]].detach())) + 0.5
                    w += reach
            total, weight = total + w * loss, weight + w
    return total, weight


def run(hidden: Tensor, head: Head, targets: SlotTargets, kind: str, weights: str) -> BlockLoss:
    return head_loss(hidden, head, targets, kind=kind, weights=weights, gamma=GAMMA)  # type: ignore[arg-type]


def compare(head: Head, kind: str, weights: str) -> None:
    hidden, targets = hidden_of(), targets_of()
    got = run(hidden, head, targets, kind, weights)
    want, weight = plain(hidden, head, targets, kind, weights)
    assert float(got.loss_sum.detach()) == pytest.approx(float(want.detach()), rel=2e-5)
    assert float(got.weight_sum) == pytest.approx(weight, rel=1e-5)
    (a,) = torch.autograd.grad(3 * got.loss_sum, hidden)
    (b,) = torch.autograd.grad(3 * want, hidden)
    torch.testing.assert_close(a, b, atol=2e-5 * float(b.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_value_and_gradient_are_those_of_plain_autograd(kind: str, weights: str) -> None:
    compare(little_head(), kind, weights)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_softcap_of_the_head_count(kind: str) -> None:
    compare(little_head(scale=0.3), kind, "exp")
    compare(little_head(scale=0.7, softcap=1.5), kind, "dpace")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: str, weights: str) -> None:
    found = []
    for elements in (1, 3 * K * VOCAB, 1 << 30):
        monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", {"cpu": elements})
        hidden = hidden_of()
        result = run(hidden, little_head(), targets_of(), kind, weights)
        result.loss_sum.backward()
        found.append((result, hidden.grad))
    for result, grad in found[1:]:
        torch.testing.assert_close(result.loss_sum, found[0][0].loss_sum, atol=0, rtol=1e-6)
        torch.testing.assert_close(result.weight_sum, found[0][0].weight_sum, atol=0, rtol=1e-6)
        torch.testing.assert_close(grad, found[0][1], atol=1e-6, rtol=1e-5)
        assert torch.equal(result.correct_NK, found[0][0].correct_NK)


def test_a_chunk_is_whole_blocks_and_at_least_one() -> None:
    for device, most in (("cpu", 1 << 22), ("cuda", 1 << 26)):
        for vocab in (32, 49152, 248320):
            rows = chunk_rows(vocab, 15, device)
            assert rows % 15 == 0
            assert rows == 15 or rows * vocab <= most < (rows + 15) * vocab


def test_what_counts_as_right_and_as_trained() -> None:
    head, targets = little_head(), targets_of()
    hidden = torch.zeros(N, K, HIDDEN)
    hidden[1:] = head.lm_head_VH[targets.tokens_NK.clamp_min(0)][1:] * 5
    result = run(hidden, head, targets, "ce", "none")
    assert torch.equal(result.trained_NK, targets.tokens_NK >= 0)
    best = (hidden @ head.lm_head_VH.T).argmax(-1)
    assert torch.equal(result.correct_NK, (best == targets.tokens_NK) & result.trained_NK)
    assert 0 < result.correct_NK.sum() <= result.trained_NK.sum()
    assert not result.loss_sum.requires_grad


def test_slots_that_do_not_train_have_no_gradient_and_no_influence() -> None:
    targets, head = targets_of(), little_head()
    hidden = hidden_of()
    result = run(hidden, head, targets, "ce", "dpace")
    result.loss_sum.backward()
    dead = targets.tokens_NK < 0
    assert hidden.grad[dead].eq(0).all()
    assert hidden.grad[~dead].abs().sum(-1).gt(0).all()
    with torch.no_grad():
        other = hidden.clone()
        other[dead] = 1e6
    assert torch.equal(run(other, head, targets, "ce", "dpace").loss_sum, result.loss_sum.detach())


def test_nothing_to_train_is_a_loss_of_zero_that_can_be_differentiated() -> None:
    hidden = hidden_of()
    nothing = SlotTargets(torch.full((N, K), -1), torch.zeros(N, K, dtype=torch.int64))
    result = run(hidden, little_head(), nothing, "ce", "exp")
    result.loss_sum.backward()
    assert (float(result.loss_sum.detach()), float(result.weight_sum)) == (0.0, 0.0)
    assert hidden.grad.eq(0).all()


def test_topk_divergence_is_zero_at_the_target_and_sees_the_tail_as_one_bucket() -> None:
    facts = {"head": {"scale": 1.0, "softcap": None}}
    head = Head(TargetHead(torch.eye(VOCAB), torch.eye(VOCAB), torch.ones(VOCAB), facts), "cpu", torch.float32)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3))
    top, ids = logits.log_softmax(-1).topk(4)
    targets = SlotTargets(torch.tensor([[0]]), torch.tensor([[0]]), ids[None].int(), top[None])

    def at(x: Tensor) -> tuple[float, Tensor]:
        x = x.clone().view(1, 1, -1).requires_grad_()
        loss = run(x, head, targets, "kl-topk", "none").loss_sum
        return float(loss.detach()), torch.autograd.grad(loss, x)[0].flatten()

    value, grad = at(logits)
    assert abs(value) < 1e-6
    assert grad.abs().max() < 1e-6
    tail = [i for i in range(VOCAB) if i not in ids.tolist()]
    swapped = logits.clone()
    swapped[tail] = logits[tail].flip(0)  # the same mass, on other tokens of the tail
    assert abs(at(swapped)[0]) < 1e-6
    heavy = logits.clone()
    heavy[tail] += 1.5  # mass moves from the stored tokens to the tail
    value, grad = at(heavy)
    assert value > 0.05
    assert (grad[tail] > 0).all()  # descending takes it back from every token of the tail
    assert (grad[ids] < 0).all()


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (4, 4.0), (32, 7.0)])
def test_default_decay_is_that_of_the_nearest_published_block_size(block: int, gamma: float) -> None:
    assert default_gamma(block) == gamma


def test_standard_deviation_of_logits_is_over_the_vocabulary() -> None:
    head, x = little_head(), hidden_of().detach().flatten(0, 1)
    assert logit_std(x, head) == pytest.approx(float((x @ head.lm_head_VH.T).std(1).mean()), rel=1e-5)
    assert logit_std(2 * x, head) == pytest.approx(2 * logit_std(x, head), rel=1e-5)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation gives."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [
            leaf.untyped_storage().nbytes() // leaf.element_size()
            for leaf in tree_leaves(out)
            if isinstance(leaf, Tensor)
        ]
        self.elements = max([self.elements, *sizes])
        return out


BIG_VOCAB, BIG_N, BIG_K = 248_320, 40, 15


@pytest.fixture(scope="module")
def big_head() -> Head:
    weights = torch.randn(BIG_VOCAB, 4, generator=torch.Generator().manual_seed(0))
    facts = {"head": {"scale": 1.0, "softcap": None}}
    return Head(TargetHead(weights, weights, torch.ones(4), facts), "cpu", torch.float32)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("ce", "dpace"), ("ce-argmax", "exp"), ("kl-topk", "exp"), ("kl-exact", "none"), ("tv", "dpace")],
)
def test_logits_of_all_queries_never_exist(big_head: Head, kind: str, weights: str) -> None:
    n = BIG_N if weights == "dpace" and kind == "ce" else 6  # as many as time allows
    hidden = hidden_of(n, BIG_K, 4)
    targets = targets_of(n, BIG_K, BIG_VOCAB, 4)
    targets.tokens_NK.clamp_min_(7)  # every slot trains
    with Largest() as seen:
        result = run(hidden, big_head, targets, kind, weights)
        result.loss_sum.backward()
    assert result.trained_NK.all()
    assert hidden.grad.abs().sum() > 0
    one_block = BIG_K * BIG_VOCAB
    assert one_block <= seen.elements < 1.3 * one_block, f"{seen.elements:,} elements at once"
