"""Our export in the DFlash authors' own package: the same states, and speculative decoding that the cache foretells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_targets
import torch
from compare_walks import open_peer
from dflash_peer import generate
from hstrain.data.anchors import slot_tokens
from hstrain.drafter.attention import Blocks
from hstrain.drafter.losses import Head, SlotTargets, head_loss
from hstrain.drafter.model import Drafter, block_inputs, initialise
from hstrain.exchange.export import export_drafter
from hstrain.exchange.importer import read_checkpoint
from hstrain.live.decode import Draft, decode
from hstrain.live.target import Sampling, open_target
from torch import Tensor

from hscache.store.head import TargetHead
from tests.made import drafters
from tests.made.live import head_of

pytestmark = pytest.mark.oracle
FACTS = {"target": "some/target"}
ANCHORS = (0, 1, 2, 7, 10, 11, 12, 13, 30, 47)
"""Positions around the window of 11 tokens and around its reach inside a block of 8."""


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


def ours(
    drafter: Drafter, states_TLH: Tensor, ids_T: Tensor, head: TargetHead, anchors: list[int], block_size: int = 8
) -> Tensor:
    """Return our [N, B, H]: all blocks in one pass over all rows, as in training."""
    inputs = block_inputs(ids_T[anchors], head.embed, replace(drafter.config, block_size=block_size))
    at = torch.tensor(anchors)
    blocks = Blocks(at, torch.zeros_like(at), at, block_size, len(states_TLH))
    hidden = drafter(states_TLH, torch.arange(len(states_TLH)), inputs, blocks)
    return hidden.unflatten(0, (len(anchors), -1))


@pytest.mark.parametrize(("rope_theta", "yarn"), [(10000.0, None), (1e7, None), (10000.0, (4.0, 32))])
@pytest.mark.parametrize("kind", drafters.KINDS)
def test_dflash_computes_the_same_blocks(
    dflash: Any, tmp_path: Path, kind: str, rope_theta: float, yarn: tuple[float, int] | None
) -> None:
    drafter, head = drafters.drafter(kind, rope_theta=rope_theta), drafters.head()
    export_drafter("zlab", drafter, head, tmp_path / "out", provenance=FACTS, dtype="float32", yarn=yarn)
    drafter, _ = read_checkpoint(tmp_path / "out", head)
    theirs = dflash.DFlashDraftModel.from_pretrained(tmp_path / "out").eval()
    assert theirs.dtype == torch.float32
    assert (theirs.target_layer_ids, theirs.block_size, theirs.mask_token_id) == ([0, 1, 2], 8, 7)
    made = torch.Generator().manual_seed(3)
    states_TLH = torch.randn(48, 3, 64, generator=made)
    ids_T = torch.randint(0, 512, (48,), generator=made)
    lm_head = torch.nn.Linear(64, 512, bias=False)
    with torch.no_grad():
        lm_head.weight.copy_(head.lm_head)
        hidden_NBH = ours(drafter, states_TLH, ids_T, head, list(ANCHORS))
        for got_BH, anchor in zip(hidden_NBH, ANCHORS, strict=True):
            expected = theirs(
                position_ids=torch.arange(anchor + 8)[None],
                noise_embedding=block_inputs(ids_T[[anchor]], head.embed, drafter.config)[None],
                target_hidden=states_TLH[:anchor].flatten(1)[None],
            )
            assert relative(got_BH, expected[0]) <= 1e-5, anchor
            assert relative(head.logits(got_BH), theirs.compute_logits(expected, lm_head)[0]) <= 1e-5, anchor


@pytest.mark.parametrize("scale", [1.0, 6.9375])
def test_dflash_multiplies_the_rows_of_the_embedding_as_we_do(dflash: Any, tmp_path: Path, scale: float) -> None:
    """Its target multiplies too, as Gemma's embedding does: dflash takes the raw rows, and the factor of our export."""
    drafter, head = drafters.drafter(embed_scale=scale), drafters.head()
    export_drafter("zlab", drafter, head, tmp_path / "out", provenance=FACTS, dtype="float32")
    theirs = dflash.DFlashDraftModel.from_pretrained(tmp_path / "out")

    class Scaled(torch.nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * scale

    target = SimpleNamespace(get_input_embeddings=lambda: Scaled.from_pretrained(head.embed))
    ids = torch.tensor([5, 300])
    found = dflash._draft_value(theirs.config, "input_embedding_scale", 1.0)
    ours = block_inputs(ids, head.embed, drafter.config)[:: drafter.config.block_size]
    assert torch.equal(dflash._raw_input_embeddings(target, ids, float(found)), ours)
    assert torch.equal(target.get_input_embeddings()(ids), ours)


def test_the_window_matters_in_these_tests() -> None:
    """Without it, or one token wider, the blocks compared above would be others."""
    head, made = drafters.head(), torch.Generator().manual_seed(3)
    states_TLH, ids_T = torch.randn(48, 3, 64, generator=made), torch.randint(0, 512, (48,), generator=made)
    for kind in ("sliding", "mixed"):
        right = ours(drafters.drafter(kind), states_TLH, ids_T, head, list(ANCHORS))
        for window in (10, 12, 1000):
            wrong = drafters.drafter(kind, sliding_window=window)
            assert relative(ours(wrong, states_TLH, ids_T, head, list(ANCHORS)), right) > 1e-2


@pytest.mark.parametrize(("scale", "softcap"), [(0.25, None), (1.0, 5.0)])
def test_dflash_makes_logits_as_the_target_does(dflash: Any, tmp_path: Path, scale: float, softcap: Any) -> None:
    head = drafters.head(scale=scale, softcap=softcap)
    export_drafter("zlab", drafters.drafter(), head, tmp_path / "out", provenance=FACTS, dtype="float32")
    theirs = dflash.DFlashDraftModel.from_pretrained(tmp_path / "out")
    lm_head, hidden = torch.nn.Linear(64, 512, bias=False), torch.randn(5, 64)
    with torch.no_grad():
        lm_head.weight.copy_(head.lm_head)
        assert relative(head.logits(hidden), theirs.compute_logits(hidden, lm_head)) <= 1e-5


def test_a_checkpoint_that_dflash_wrote_is_read(dflash: Any, tmp_path: Path) -> None:
    drafter, head = drafters.drafter("mixed"), drafters.head()
    export_drafter("zlab", drafter, head, tmp_path / "ours", provenance=FACTS, dtype="float32")
    theirs = dflash.DFlashDraftModel.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    read, _ = read_checkpoint(tmp_path / "theirs", head)
    assert read.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(read.state_dict()[name], tensor), name


def learn(drafter: Drafter, states_TLH: Tensor, ids_T: Tensor, head: TargetHead, prompt: int, steps: int) -> None:
    """Teach a drafter one continuation, so that some of its blocks are accepted."""
    mask = np.zeros(len(ids_T), np.uint8)
    mask[prompt:] = 1
    anchors = np.arange(prompt, len(ids_T) - 1)
    tokens = torch.from_numpy(slot_tokens(ids_T.numpy().astype(np.int32), mask, anchors, drafter.config.block_size))
    targets = SlotTargets(tokens, torch.zeros_like(tokens))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(steps):
        hidden = ours(drafter, states_TLH, ids_T, head, anchors.tolist())
        found = head_loss(hidden[:, 1:], Head(head, "cpu", torch.float32), targets, kind="ce", weights="exp", gamma=4.0)
        optimizer.zero_grad()
        (found.loss_sum / found.weight_sum).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_dflash_decodes_with_our_export_as_the_cache_foretells(dflash: Any, tmp_path: Path, kind: str) -> None:
    """Its text is the target's own greedy text, and its acceptance lengths are those of the walk over stored states.

    One thing differs from our walk: towards ``max_new_tokens`` dflash shortens its blocks, and where layers look both
    ways a shorter block drafts other tokens. So the walk here shortens them too.
    """
    target, prompt = tiny_targets.qwen3(), 9
    ids = torch.randint(0, 512, (1, prompt), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        text_T = target.generate(ids, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        states = target(text_T[None], output_hidden_states=True).hidden_states
    states_TLH = torch.stack([states[tap + 1][0] for tap in (0, 1, 2)], 1)
    facts = drafters.head().facts
    head = TargetHead(
        target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach(), torch.ones(64), facts
    )
    drafter = drafters.drafter(kind)
    learn(drafter, states_TLH, text_T, head, prompt, steps=30)
    export_drafter("zlab", drafter, head, tmp_path / "out", provenance=FACTS, dtype="float32")
    found = generate(dflash, tmp_path / "out", target, ids, max_new_tokens=60)
    assert torch.equal(found.output_ids[0], text_T)

    end, at, walk = len(text_T) - 1, prompt, []
    while at < end:
        with torch.no_grad():
            hidden = ours(drafter, states_TLH, text_T, head, [at], min(8, end - at + 1))[0, 1:]
        drafted, true = head.logits(hidden).argmax(-1), text_T[at + 1 : at + 8]
        streak = int((drafted[: len(true)] == true).int().cumprod(0).sum())
        walk.append(min(streak + 1, end - at))
        at += walk[-1]
    assert found.acceptance_lengths == walk
    assert 1.2 < np.mean(walk) < 7  # neither nothing nor everything is accepted


def test_dflash_decodes_smollm2_step_by_step_as_we_do(dflash: Any, tmp_path: Path, smollm2: Path, corpus: Path) -> None:
    """On a real target, with a drafter that learnt something of one completion of it."""
    row = min(pq.read_table(corpus).to_pylist(), key=lambda row: len(row["input_ids"]))
    ids, first = row["input_ids"], row["loss_mask"].index(1)
    shape = {"hidden_size": 576, "vocab_size": 49152, "num_target_layers": 30}
    drafter = Drafter(drafters.config("mixed", **shape, taps=(1, 14, 27), mask_token_id=3))
    initialise(drafter, 0)
    with open_target(str(smollm2), (1, 14, 27), dtype="float32", device="cpu") as (live, _):
        states_TLH, head = live.prefill(ids).states, head_of(live)
        with torch.inference_mode(mode=False), torch.enable_grad():
            learn(drafter, states_TLH.clone(), torch.tensor(ids), head, first, steps=12)
        whole = Sampling(max_new_tokens=len(ids) - first)
        plain, drafted = (decode(live, ids[:first], whole, d) for d in (None, Draft(drafter, head, live.device)))
        peer = open_peer(drafter, head, live, tmp_path / "export")
        steps = [step.accepted for step in drafted.steps]
        assert drafted.ids == plain.ids
        assert peer(ids[:first], len(drafted.ids)) == steps
    assert {1, 2} <= set(steps), "some drafts are accepted, some are not"
