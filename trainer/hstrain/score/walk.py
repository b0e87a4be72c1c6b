"""Measure how well a drafter predicts, from the store alone.

A block is drafted from every possible anchor of a held-out sample, so one pass gives both averages:

- ``tau``, the serving walk, in tokens per step: start at the first token of the target's turn, draft, jump by the
  accepted tokens plus the one that the target adds, and repeat. Live greedy decoding makes the same steps.
- ``tau_all``: the mean over all anchors. It is another number: the walk visits anchors that follow a miss, which are
  harder.

``streak`` is the number of leading slots that agree with the sample. A step yields streak + 1 tokens, but never more
than the turn has left, as in serving. Samples are scored one by one; only the bootstrap is random.

Shapes: N anchors, K = B - 1 slots, m candidates a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hscache.errors import EnvironmentFault, IntegrityError
from hscache.store.reader import Sample, Store
from hstrain.data.anchors import anchor_candidates, random_of
from hstrain.data.packs import PackBuilder, PackShape
from hstrain.drafter.attention import Backend
from hstrain.drafter.losses import Head, SlotTargets
from hstrain.drafter.model import Drafter, block_inputs
from hstrain.score.ddtree import accepted_lengths

_CHUNK_ANCHORS = 256
_BOOTSTRAPS = 1000


@dataclass(frozen=True)
class SampleScore:
    """A drafter's predictions from every anchor of a sample.

    Attributes:
        sample_id: The sample.
        tag: Its tag.
        anchors_N: int64 positions.
        left_N: int64 tokens that the turn has after each anchor, at least 1.
        correct_NK: bool, whether slot k predicts token anchor + k; False after the turn's end.
        sizes: Nodes of the DDTrees that were scored.
        tree_Ns: int64 [N, sizes], drafted tokens of each tree that the target would accept.
        overlap_NK2: float32 bounds, between which lies the chance that a target sampling at temperature 1 accepts a
            token drawn from the slot, 1 - TV; from the stored top-k. None where they were not asked for or stored.
    """

    sample_id: str
    tag: str | None
    anchors_N: NDArray[np.int64]
    left_N: NDArray[np.int64]
    correct_NK: NDArray[np.bool_]
    sizes: tuple[int, ...]
    tree_Ns: NDArray[np.int64]
    overlap_NK2: NDArray[np.float32] | None = None

    @property
    def streak(self) -> NDArray[np.int64]:
        """int64 [N]: leading slots that are right."""
        return np.logical_and.accumulate(self.correct_NK, 1).sum(1)  # type: ignore[no-any-return]

    def walk(self, accepted_N: NDArray[np.int64]) -> list[int]:
        """Return what each step of serving yields, in tokens.

        Args:
            accepted_N: Drafted tokens that are accepted at each anchor.
        """
        yields = np.minimum(accepted_N + 1, self.left_N).tolist()
        left, steps, n = self.left_N.tolist(), [], 0
        while n < len(yields):
            steps.append(yields[n])
            # anchors of a turn are consecutive; its last token is not an anchor, so a finished turn leads to the next
            n += min(yields[n], left[n])
        return steps


@torch.no_grad()
def score_sample(
    drafter: Drafter,
    head: Head,
    sample: Sample,
    *,
    backend: Backend = "sdpa",
    trees: Sequence[int] = (),
    sampling: bool = False,
) -> SampleScore:
    """Draft from every anchor of a sample.

    Args:
        drafter: The drafter, on the head's device.
        head: Head of the target.
        sample: A whole sample with the drafter's taps, in their order; of kind ``torch``.
        backend: Implementation of attention.
        trees: Numbers of nodes of the DDTrees to score.
        sampling: Also compare distributions, if the sample has the target's.

    Raises:
        EnvironmentFault: ``not-finite``.
    """
    config, sampling = drafter.config, sampling and sample.logits is not None
    anchors = anchor_candidates(sample.loss_mask.numpy())
    left = tokens_left(sample.loss_mask.numpy(), anchors)
    correct, tree = [np.zeros((0, config.block_size - 1), np.bool_)], [np.zeros((0, len(trees)), np.int64)]
    overlap = [np.zeros((0, config.block_size - 1, 2), np.float32)]
    device = head.embed_VH.device
    for first in range(0, len(anchors), _CHUNK_ANCHORS):
        with torch.autocast("cpu", enabled=False):  # which cannot join tensors of float16
            builder = PackBuilder(PackShape(config.taps, config.block_size, top=sampling))
            builder.add(sample, anchors[first : first + _CHUNK_ANCHORS])
            pack = builder.pack(len(config.taps), config.hidden_size).to(device)
        inputs = block_inputs(pack.anchor_ids_N, head.embed_VH, config)
        blocks = pack.blocks(config.block_size, backend)
        hidden_NBH = drafter(pack.states_TLH, pack.positions_T, inputs, blocks).unflatten(0, (-1, config.block_size))
        tokens_NK = pack.targets.tokens_NK
        best_NK, ids_NKm, logprobs_NKm = _top(hidden_NBH[:, 1:], head, max([0, *trees]))
        if sampling:
            overlap.append(_overlaps(hidden_NBH[:, 1:], head, pack.targets).cpu().numpy())
        correct.append((best_NK == tokens_NK).cpu().numpy())
        if trees:
            tree.append(accepted_lengths(ids_NKm.cpu(), logprobs_NKm.cpu(), tokens_NK.cpu(), trees))
    parts = np.concatenate(correct), tuple(trees), np.concatenate(tree), np.concatenate(overlap) if sampling else None
    return SampleScore(sample.sample_id, sample.tag, anchors, left, *parts)


def score_store(
    drafter: Drafter,
    head: Head,
    store: Store,
    numbers: Iterable[int],
    *,
    backend: Backend = "sdpa",
    trees: Sequence[int] = (),
    sampling: bool = False,
    unreadable: dict[str, str] | None = None,
) -> list[SampleScore]:
    """Score samples of a store; see :func:`score_sample`.

    Args:
        drafter: The drafter, on the head's device.
        head: Head of the target.
        store: An opened store.
        numbers: Numbers of the samples.
        backend: Implementation of attention.
        trees: Numbers of nodes of the DDTrees to score.
        sampling: Also compare distributions, if the store has the target's.
        unreadable: Receives the id and error of each sample that cannot be read; None to raise the first error.

    Raises:
        IntegrityError: ``store-damaged``.
        EnvironmentFault: ``not-finite``.
    """
    buffers, scores = store.buffers(taps=len(drafter.config.taps)), []
    for i in numbers:
        try:
            sample = store.sample(i, taps=drafter.config.taps, out=buffers)
        except IntegrityError as error:
            if unreadable is None:
                raise
            unreadable[store.sample_ids[i]] = f"{error.code}: {error.message}"
            continue
        scores.append(score_sample(drafter, head, sample, backend=backend, trees=trees, sampling=sampling))
    return scores


def check_finite(who: str, *tensors: torch.Tensor) -> None:
    """Refuse NaN and infinities: from NaN, target and drafter choose the same token, so the draft would be accepted.

    Args:
        who: The model that computed the tensors, for the message.
        tensors: Logits or states.

    Raises:
        EnvironmentFault: ``not-finite``.
    """
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise EnvironmentFault(
            "not-finite",
            f"{who} computed NaN or infinities",
            hint="use another precision or other kernels, which hscache doctor and hscache verify --kernels report",
        )


def summarise(scores: Sequence[SampleScore]) -> dict[str, object]:
    """Return the usual figures over samples, JSON-plain.

    Keys: ``tau`` with its 95 % ``tau_interval`` (bootstrap over samples); ``tau_per_response``, the mean of the
    samples' own taus, as some papers report it; ``tau_all``; ``streak``; ``acc`` by slot, beginning with slot 1;
    ``acc_after_right``, the same where all slots before are right; ``full_block``, the share of wholly accepted blocks
    among those that fit into their turn; ``sampling``, bounds [low, high] of what to expect when target and drafter
    sample at temperature 1: ``tau_all``, and ``acc`` by slot (None without the target's distributions); ``histogram``
    of walk steps by yield; ``ddtree`` (nodes -> walk tau with trees); ``samples``; ``anchors``.
    """
    scores = [score for score in scores if len(score.anchors_N)]
    if not scores:
        return {"samples": 0, "anchors": 0}
    K = scores[0].correct_NK.shape[1]
    walks = [score.walk(score.streak) for score in scores]
    correct, left = (np.concatenate([getattr(s, name) for s in scores]) for name in ("correct_NK", "left_N"))
    streak = np.concatenate([score.streak for score in scores])
    there = np.arange(K) < left[:, None]
    reached = np.c_[np.ones((len(left), 1), np.bool_), np.logical_and.accumulate(correct, 1)[:, :-1]] & there
    whole = left >= K
    steps = np.concatenate([np.array(walk) for walk in walks])
    return {
        "tau": _tau(walks),
        "tau_interval": _middle(_drawn_taus(walks)),
        "tau_per_response": float(np.mean([sum(walk) / len(walk) for walk in walks])),
        "tau_all": float(np.minimum(streak + 1, left).mean()),
        "streak": float(streak.mean()),
        "acc": _means(correct, there),
        "acc_after_right": _means(correct, reached),
        "full_block": float((streak[whole] == K).mean()) if whole.any() else None,
        "sampling": _sampling(scores, left),
        "histogram": np.bincount(steps, minlength=K + 2)[1:].tolist(),
        "ddtree": {str(n): _tau([s.walk(s.tree_Ns[:, i]) for s in scores]) for i, n in enumerate(scores[0].sizes)},
        "samples": len(scores),
        "anchors": len(left),
    }


def _sampling(scores: Sequence[SampleScore], left: NDArray[np.int64]) -> dict[str, object] | None:
    """Return bounds of what sampling accepts after prefixes that the sample has."""
    overlaps = [score.overlap_NK2 for score in scores]
    if any(overlap is None for overlap in overlaps):
        return None
    accepted = np.concatenate([overlap for overlap in overlaps if overlap is not None]).astype(np.float64)
    slots = np.arange(accepted.shape[1])
    # a step yields one token more than it accepts, but never more than the turn has left
    counted = np.cumprod(accepted, 1) * (slots < left[:, None] - 1)[..., None]
    there = slots < left[:, None]
    return {
        "tau_all": (1 + counted.sum(1)).mean(0).tolist(),
        "acc": [accepted[there[:, k], k].mean(0).tolist() if there[:, k].any() else None for k in slots],
    }


def _means(correct_NK: NDArray[np.bool_], counted_NK: NDArray[np.bool_]) -> list[float | None]:
    """Return the share of right slots among those that count, by slot; None where none counts."""
    n_K, right_K = counted_NK.sum(0), (correct_NK & counted_NK).sum(0)
    return [float(right / n) if n else None for right, n in zip(right_K, n_K, strict=True)]


def by_tag(scores: Sequence[SampleScore]) -> dict[str, float]:
    """Return tau of the samples of each tag."""
    tags = dict.fromkeys(score.tag or "untagged" for score in scores)
    groups = {tag: summarise([s for s in scores if (s.tag or "untagged") == tag]) for tag in tags}
    return {tag: float(figures["tau"]) for tag, figures in groups.items() if figures["samples"]}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Cost:
    """What a step costs, in the time of one token without a drafter.

    Attributes:
        draft: Drafting a block.
        verify: The target's pass over a whole block, anchor included; at least 1, which a pass over one token takes.
        keep: Putting the target's states right after the accepted tokens.
        row: What each drafted token adds to both; None to take the anchor's row for a plain token and the others alike.
    """

    draft: float
    verify: float
    keep: float = 0.0
    row: float | None = None

    def step(self, drafted: int, most: int) -> float:
        """Return the cost of a step that verifies fewer drafted tokens than the block has; a pass costs 1 at least."""
        row = (self.verify - 1) / most if self.row is None else self.row
        return self.draft + max(1.0, self.verify + self.keep - row * (most - drafted))


def speed_by_length(scores: Sequence[SampleScore], cost: Cost, lengths: Sequence[int] | None = None) -> list[float]:
    """Return the predicted speed, in times that without a drafter, by the number of drafted tokens that are verified.

    The walk is that of :func:`summarise` with shorter blocks; it is greedy, one request at a time.

    Args:
        scores: Scores of samples.
        cost: Cost of a step with the last of the lengths.
        lengths: Numbers of drafted tokens, ascending; None for 1, 2, ... B - 1.
    """
    scores = [score for score in scores if len(score.anchors_N)]
    if lengths is None:
        lengths = range(1, scores[0].correct_NK.shape[1] + 1) if scores else ()
    taus = [_tau([score.walk(np.minimum(score.streak, n)) for score in scores]) for n in lengths]
    return [tau / cost.step(n, lengths[-1]) for n, tau in zip(lengths, taus, strict=True)]


def difference(scores: Sequence[SampleScore], base: Sequence[SampleScore]) -> dict[str, object] | None:
    """Return the difference of tau over the samples that two lists of scores share; None if they share none.

    Keys, JSON-plain: ``tau``, the difference; its 95 % ``interval`` (bootstrap over samples, with the same draws on
    both sides); ``samples``; ``other_walks``, the number of samples on which serving would take other steps.

    Args:
        scores: Scores of one drafter on one store.
        base: Scores to subtract; samples with other anchors are left out.
    """
    before = {score.sample_id: score for score in base if len(score.anchors_N)}
    pairs = [
        (score.walk(score.streak), there.walk(there.streak))
        for score in scores
        if (there := before.get(score.sample_id)) is not None
        and np.array_equal(score.anchors_N, there.anchors_N)
        and np.array_equal(score.left_N, there.left_N)
    ]
    if not pairs:
        return None
    walks, others = ([pair[side] for pair in pairs] for side in (0, 1))
    return {
        "tau": _tau(walks) - _tau(others),
        "interval": _middle(_drawn_taus(walks) - _drawn_taus(others)),
        "samples": len(pairs),
        "other_walks": sum(walk != other for walk, other in pairs),
    }


def _tau(walks: Sequence[Sequence[int]]) -> float:
    return sum(map(sum, walks)) / sum(map(len, walks))


def _drawn_taus(walks: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return tau of many bootstrap draws; for an equal number of samples the draws are the same."""
    tokens, steps = (np.array([of(walk) for walk in walks]) for of in (sum, len))
    draws = random_of("bootstrap", len(walks)).integers(len(walks), size=(_BOOTSTRAPS, len(walks)))
    return tokens[draws].sum(1) / steps[draws].sum(1)  # type: ignore[no-any-return]


def _middle(values: NDArray[np.float64]) -> list[float]:
    """Return the bounds of the middle 95 %."""
    return [float(q) for q in np.quantile(values, (0.025, 0.975))]


def tokens_left(loss_mask: NDArray[np.uint8], anchors: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many supervised tokens follow each anchor without a gap."""
    ends = np.flatnonzero((loss_mask != 0) & np.append(loss_mask[1:] == 0, True))
    return ends[np.searchsorted(ends, anchors)] - anchors


def _overlaps(hidden_NKH: torch.Tensor, head: Head, targets: SlotTargets) -> torch.Tensor:
    """Return bounds [N, K, 2] of the sum over tokens of the lesser of the drafter's and the target's probability.

    The target's is known for its k most likely tokens; of the others, both can share no more than either has left.
    """
    assert targets.top_ids is not None
    assert targets.top_logprobs is not None
    N, K, _ = hidden_NKH.shape
    step, bounds, rows = max(1, (1 << 22) // head.vocab_size), [], targets.rows_NK.flatten()
    for x_RH, rows_R in zip(hidden_NKH.flatten(0, 1).split(step), rows.split(step), strict=True):
        logits = head.logits(x_RH)
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.float()
            ours = (logits.gather(1, targets.top_ids[rows_R].long()) - logits.logsumexp(-1, keepdim=True)).exp()
            theirs = targets.top_logprobs[rows_R].float().exp()
            shared = torch.minimum(ours, theirs).sum(-1)
            rest = torch.minimum(1 - ours.sum(-1), 1 - theirs.sum(-1)).clamp(min=0)
            bounds.append(torch.stack((shared, shared + rest), -1))
    return torch.cat(bounds).view(N, K, 2)


def _top(hidden_NKH: torch.Tensor, head: Head, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the token [N, K] that each slot drafts, and ids and log-probabilities [N, K, m] of its most likely ones.

    The drafted token is the argmax, as in decoding: bf16 logits may be equal, and a top-k orders equal ones by k.
    """
    N, K, _ = hidden_NKH.shape
    rows = max(1, (1 << 22) // head.vocab_size)
    best, ids, logprobs = [], [], []
    for x_RH in hidden_NKH.flatten(0, 1).split(rows):
        logits = head.logits(x_RH)
        check_finite("the drafter", logits)
        best.append(logits.argmax(-1))
        # only trees need the softmax, to compare tokens of different slots
        top = (logits.log_softmax(-1) if m else logits).topk(min(m, head.vocab_size), -1)
        logprobs.append(top.values)
        ids.append(top.indices)
    return torch.cat(best).view(N, K), *(torch.cat(parts).unflatten(0, (N, K)) for parts in (ids, logprobs))
