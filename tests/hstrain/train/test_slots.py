"""What a step trains: slot k says token anchor + k, slot 0 nothing, and noise touches the context alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hstrain.data import packs as data_module
from hstrain.data.anchors import slot_tokens
from hstrain.data.packs import Pack
from hstrain.drafter.losses import BlockLoss, Head
from hstrain.train import step as step_module
from hstrain.train.parallel import World
from hstrain.train.step import Trainer

from hscache.store.head import TargetHead
from tests.made.stores import HIDDEN, TAPS, Little
from tests.made.trainers import BLOCK, packs_differ_from_store, train_manifest

CPU = World(0, 1, torch.device("cpu"))


def exact_head() -> Head:
    """A head that gives a state back as the token whose row it is."""
    rows = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(0))
    rows /= rows.norm(dim=1, keepdim=True)
    facts = {"head": {"scale": 1.0, "softcap": None}}
    return Head(TargetHead(rows, rows, torch.ones(HIDDEN), facts), "cpu", torch.float32)


def slot_k_is_token_anchor_plus_k(little: Little) -> None:
    """Hand the loss states that say token anchor + k in slot k, and look at what it makes of every slot."""
    trainer = Trainer(train_manifest(data={"anchors": 512}, loss={"weights": "none"}), little.path, CPU)
    trainer.head = exact_head()
    with trainer.stream(0) as stream:
        (pack,) = next(stream)
    hidden = torch.zeros(len(pack.anchors_N), BLOCK, HIDDEN)
    there = torch.zeros(len(pack.anchors_N), BLOCK, dtype=torch.bool)
    for n, (a, lo) in enumerate(zip(pack.anchors_N.tolist(), pack.lo_N.tolist(), strict=True)):
        whole = trainer.store[trainer.store.index_of(pack.sample_ids[sorted(set(pack.lo_N.tolist())).index(lo)])]
        for k in range(BLOCK):
            if a + k < len(whole.input_ids) and whole.loss_mask[a : a + k + 1].all():
                hidden[n, k] = 20 * trainer.head.lm_head_VH[int(whole.input_ids[a + k])]
                there[n, k] = k > 0
    hidden.requires_grad_()
    trainer.hidden = lambda pack, step: hidden  # type: ignore[method-assign]
    result = trainer.loss(pack, 0)
    assert torch.equal(result.trained_NK, there[:, 1:])
    assert torch.equal(result.correct_NK, there[:, 1:])
    result.loss_sum.backward()
    assert hidden.grad is not None
    assert hidden.grad[~there].eq(0).all(), "a slot that predicts nothing is trained"
    assert hidden.grad[there].abs().sum(-1).gt(0).all()


def test_slot_k_is_trained_to_say_token_anchor_plus_k_and_slot_0_nothing(little: Little) -> None:
    slot_k_is_token_anchor_plus_k(little)


def test_labels_shifted_by_one_are_noticed(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: slot k says token anchor + k - 1."""

    def shifted(ids: Any, mask: Any, anchors: Any, size: int) -> Any:
        return slot_tokens(ids, mask, anchors - 1, size)

    monkeypatch.setattr(data_module, "slot_tokens", shifted)
    with pytest.raises(AssertionError):
        slot_k_is_token_anchor_plus_k(little)


def test_a_trained_slot_0_is_noticed(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the loss is taken of slots 0 .. B-2, as if the drafter predicted the next token."""

    def from_slot_0(hidden: torch.Tensor, *args: Any, **options: Any) -> BlockLoss:
        whole = torch.as_strided(hidden, hidden.shape, hidden.stride(), hidden.storage_offset() - HIDDEN)
        return step_module_head_loss(whole, *args, **options)

    step_module_head_loss = step_module.head_loss
    monkeypatch.setattr(step_module, "head_loss", from_slot_0)
    with pytest.raises(AssertionError):
        slot_k_is_token_anchor_plus_k(little)


# noise


def noise_touches_the_context_alone(little: Little, monkeypatch: pytest.MonkeyPatch, noise: float = 0.1) -> None:
    """Take a step's loss with noise and compare what drafter and targets were given with the store."""
    trainer = Trainer(train_manifest(data={"noise": noise}, loss={"kind": "kl-exact"}), little.path, CPU)
    with trainer.stream(0) as stream:
        (pack,) = next(stream)
    given: dict[str, Any] = {}
    model, loss = trainer.model, step_module.head_loss

    def seen(states: torch.Tensor, *args: Any) -> torch.Tensor:
        given.setdefault("states", []).append(states.clone())
        return model(states, *args)

    def noting(hidden: torch.Tensor, head: Head, targets: Any, **options: Any) -> BlockLoss:
        given["targets"] = targets
        return loss(hidden, head, targets, **options)

    trainer.model = seen  # type: ignore[assignment]
    monkeypatch.setattr(step_module, "head_loss", noting)
    clean = pack.states_TLH.clone()
    for step in (0, 0, 1):
        trainer.loss(pack, step)
        assert packs_differ_from_store([dataclasses.replace(pack, targets=given["targets"])], trainer.store, {}) == []
    assert torch.equal(pack.states_TLH, clean)
    a, b, c = given["states"]
    assert torch.equal(a, b)  # a function of seed and step
    assert not torch.equal(a, c)
    added = (a.float() - clean.float()).square().mean((0, 2)).sqrt() / clean.float().square().mean((0, 2)).sqrt()
    assert added.tolist() == pytest.approx([noise] * len(TAPS), rel=0.2)


def test_noise_touches_the_drafters_copy_of_the_context_alone(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_touches_the_context_alone(little, monkeypatch)


def test_targets_made_from_noised_states_are_noticed(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a public run trained for days like this."""
    noisy = Trainer._noisy

    def planted(self: Trainer, pack: Pack, step: int) -> torch.Tensor:
        final = pack.targets.final_states
        assert final is not None
        final += (0.1 * torch.randn(final.shape)).to(final.dtype)
        return noisy(self, pack, step)

    monkeypatch.setattr(Trainer, "_noisy", planted)
    with pytest.raises(AssertionError, match="another token's final state"):
        noise_touches_the_context_alone(little, monkeypatch)
