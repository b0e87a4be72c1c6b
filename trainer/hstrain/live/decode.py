"""Decode with a drafter, and with the target alone as the reference for text and speed.

A step starts with the anchor, a known token that the target has not read. The drafter proposes the B - 1 tokens after
it, from the context of all rows before it. The target reads the anchor and the draft in one pass, which gives the token
that it would have written after each of them. The leading tokens on which both agree are kept, and the target's own
next token is the new anchor. So a step gives streak + 1 tokens, at least one, for one pass of the target. The kept rows
become context.

A tree (``tree_size``) holds several continuations at once. After each node the target chooses a token, the most likely
one or a sampled one, and decoding follows these choices down the tree as far as it contains them.

Shapes: T rows of context, B block size, V vocabulary, L taps, H width.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from hscache.store.head import TargetHead
from hstrain.drafter.attention import Blocks
from hstrain.drafter.model import Drafter, KeyValue, block_inputs
from hstrain.live.sampling import accept_drafted, distribution, draw
from hstrain.live.target import LiveTarget, Rows, Sampling
from hstrain.score.ddtree import best_first
from hstrain.score.walk import check_finite


@dataclass(frozen=True)
class Step:
    """One step with a drafter.

    Attributes:
        anchor: Position of the anchor in prompt and completion.
        streak: Drafted tokens that were kept, without those after the completion's end.
        accepted: Tokens that the step gave: ``min(streak + 1, remaining tokens)``.
    """

    anchor: int
    streak: int
    accepted: int


@dataclass
class Decoded:
    """A completion and the steps that made it.

    Attributes:
        ids: Its tokens, with the end token.
        top_ids: The target's two most likely tokens at each of these positions.
        top_logits: Their logits.
        steps: Steps with a drafter; empty without one. The first token comes from the prompt's pass, not from a step.
        finish_reason: ``stop`` after an end token, else ``length``.
        prefill_s: Seconds for the prompt, with the drafter's context of it.
        decode_s: Seconds for all tokens except the first.
        step_s: Seconds of the steps by part: ``draft``, the drafter's pass; ``verify``, the target's pass; ``keep``,
            rolling back the target's states and adding the kept rows to the drafter's context. On a GPU, work that
            ``keep`` starts may end during the next ``draft``.
    """

    ids: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logits: list[list[float]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"
    prefill_s: float = 0.0
    decode_s: float = 0.0
    step_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "verify", "keep"), 0.0))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to a part of the steps."""
        started = time.perf_counter()
        yield
        self.step_s[part] += time.perf_counter() - started


class Draft:
    """A drafter with the context of one text, as keys and values that grow with the text.

    Args:
        drafter: The drafter, on the target's device.
        head: Embedding and head of the target, from the store that the drafter was fitted from.
        device: The target's device.
    """

    def __init__(self, drafter: Drafter, head: TargetHead, device: torch.device) -> None:
        self.block_size = drafter.config.block_size
        self.tokens = self.block_size - 1
        """Drafted tokens that a step verifies: the first ones of the block, which is always drafted whole."""
        self.drafter = drafter.eval()
        # converted once: TargetHead would convert it for every block
        self.head = replace(head, embed=head.embed.to(device), lm_head=head.lm_head.to(device, torch.float32))
        """On the device, in float32."""
        self._context: list[KeyValue] = []
        self._device = device
        self.length = 0
        """Rows of context."""

    def begin(self) -> None:
        """Drop the context, for a new text."""
        self._context, self.length = [], 0

    def extend(self, states_TLH: Tensor) -> None:
        """Append the target's tapped states of the next tokens, rounded to bfloat16 as in a store."""
        rows = len(states_TLH)
        positions_T = torch.arange(self.length, self.length + rows, device=self._device)
        new = self.drafter.context(states_TLH.to(torch.bfloat16), positions_T)
        old = self._context or [(k[:0], v[:0]) for k, v in new]
        self._context = [(torch.cat((a[0], b[0])), torch.cat((a[1], b[1]))) for a, b in zip(old, new, strict=True)]
        self.length += rows

    def propose(self, anchor: int) -> Tensor:
        """Return the logits of ``tokens`` tokens after the anchor, float32 [n, V]; the anchor follows the context.

        The block stays as wide as in training: the slots of a full layer see one another, so a narrower block would
        draft other tokens.
        """
        at, none = torch.tensor([self.length], device=self._device), torch.zeros(1, dtype=torch.long)
        blocks = Blocks(at, none.to(self._device), at, self.block_size, self.length)
        inputs_BH = block_inputs(torch.tensor([anchor], device=self._device), self.head.embed, self.drafter.config)
        return self.head.logits(self.drafter.draft(inputs_BH, blocks, self._context)[1 : 1 + self.tokens])


class _Choice:
    """How tokens are chosen: the most likely ones, or random ones from a seed."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.greedy, self._sampling = sampling.temperature <= 0, sampling
        seed = sampling.seed
        if not -(1 << 63) <= seed < 1 << 64:  # a prompt's seed is a multiple of the user's, so it may be too large
            # a digest, not a remainder: torch's CPU generator uses only the lower half of the bits
            seed = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big") >> 1
        self.generator = torch.Generator(device).manual_seed(seed)

    def distribution(self, logits_nV: Tensor) -> Tensor:
        return distribution(logits_nV, self._sampling.temperature, self._sampling.top_p)

    def tokens(self, logits_nV: Tensor) -> list[int]:
        if self.greedy:
            return logits_nV.argmax(-1).tolist()
        return draw(self.distribution(logits_nV), self.generator).tolist()


def decode(
    target: LiveTarget,
    prompt: Sequence[int],
    sampling: Sampling,
    draft: Draft | None = None,
    tree_size: int | None = None,
) -> Decoded:
    """Complete a prompt.

    Args:
        target: The target.
        prompt: Token ids.
        sampling: How tokens are chosen, and how many.
        draft: The drafter; None to decode token by token.
        tree_size: Nodes of a draft tree; None to verify the most likely (or the sampled) chain.

    Raises:
        EnvironmentFault: ``target-rollback``; ``not-finite`` for NaN or infinities in states or logits.
    """
    choice, out, started = _Choice(sampling, target.device), Decoded(), time.perf_counter()
    rows = _finite(target.prefill(prompt))
    if draft is not None:
        draft.begin()
        draft.extend(rows.states)
    _emit(target, sampling, out, choice.tokens(rows.logits), rows.logits)
    out.prefill_s = time.perf_counter() - started
    started = time.perf_counter()
    while len(out.ids) < sampling.max_new_tokens and out.finish_reason != "stop":
        anchor, position = out.ids[-1], len(prompt) + len(out.ids) - 1
        if draft is None:
            rows = _finite(target.append([anchor]))
            _emit(target, sampling, out, choice.tokens(rows.logits), rows.logits)
            continue
        if tree_size is None:
            tokens, rows = _chain_step(target, draft, choice, out, anchor)
        else:
            tokens, rows = _tree_step(target, draft, choice, out, anchor, tree_size)
        given = _emit(target, sampling, out, tokens, rows.logits)
        out.steps.append(Step(position, min(len(tokens) - 1, given), given))
    out.decode_s = time.perf_counter() - started
    return out


def _finite(rows: Rows) -> Rows:
    check_finite("the target", rows.logits, rows.states)
    return rows


def _proposed(draft: Draft, anchor: int) -> Tensor:
    logits_kV = draft.propose(anchor)
    check_finite("the drafter", logits_kV)
    return logits_kV


def _emit(target: LiveTarget, sampling: Sampling, out: Decoded, tokens: list[int], logits_nV: Tensor) -> int:
    """Append tokens up to the text's end, with the two best logits at each of them; return how many were appended."""
    tokens = tokens[: sampling.max_new_tokens - len(out.ids)]
    end = next((i for i, token in enumerate(tokens) if token in target.eos_ids), None)
    if end is not None:
        tokens, out.finish_reason = tokens[: end + 1], "stop"
    best = logits_nV[: len(tokens)].topk(2, -1)
    out.ids += tokens
    out.top_ids += best.indices.tolist()
    out.top_logits += best.values.tolist()
    return len(tokens)


def _chain_step(target: LiveTarget, draft: Draft, choice: _Choice, out: Decoded, anchor: int) -> tuple[list[int], Rows]:
    """Return the accepted tokens and the token after them, with the target's kept rows."""
    with out.timed("draft"):
        logits_kV = _proposed(draft, anchor)
        q_kV = None if choice.greedy else choice.distribution(logits_kV)
        drafted_k = logits_kV.argmax(-1) if q_kV is None else draw(q_kV, choice.generator)
        drafted = drafted_k.tolist()
    with out.timed("verify"):
        rows = _finite(target.verify([anchor, *drafted]))
        if q_kV is None:
            wanted = choice.tokens(rows.logits)
            streak = next((i for i, (a, b) in enumerate(zip(drafted, wanted, strict=False)) if a != b), len(drafted))
            bonus = wanted[streak]
        else:
            streak, bonus = accept_drafted(choice.distribution(rows.logits), q_kV, drafted_k, choice.generator)
    with out.timed("keep"):
        return [*drafted[:streak], bonus], _keep(target, draft, rows, range(streak + 1))


def _tree_step(
    target: LiveTarget, draft: Draft, choice: _Choice, out: Decoded, anchor: int, size: int
) -> tuple[list[int], Rows]:
    """Return the tokens of the path that the target's own choices take through the tree, and the token that leaves it.

    A token is chosen after every node, although only those on one path are used: the random numbers of the rows are
    independent, so each choice follows the target's distribution, whatever the draft was.
    """
    with out.timed("draft"):
        logprobs_kV = _proposed(draft, anchor).log_softmax(-1)
        best = logprobs_kV.topk(min(size, logprobs_kV.shape[-1]), -1)
        tree = best_first(best.indices.cpu(), best.values.cpu(), size)
    with out.timed("verify"):
        rows = _finite(target.verify([anchor, *tree.tokens.tolist()], [-1, *(tree.parents + 1).tolist()]))
        wanted = choice.tokens(rows.logits)
    nodes = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    # row 0 is the anchor, and row i + 1 is node i
    child = {(parent + 1, token): row for row, (parent, token) in enumerate(nodes, 1)}
    kept = [0]
    while (row := child.get((kept[-1], wanted[kept[-1]]))) is not None:
        kept.append(row)
    with out.timed("keep"):
        return [wanted[row] for row in kept], _keep(target, draft, rows, kept)


def _keep(target: LiveTarget, draft: Draft, rows: Rows, kept: Sequence[int]) -> Rows:
    target.accept(kept)
    where = torch.tensor(list(kept), device=rows.states.device)
    rows = Rows(rows.logits[where], rows.states[where])
    draft.extend(rows.states)
    return rows
