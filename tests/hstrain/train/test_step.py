"""A step is the same however it is divided: into packs, groups of queries, or layers that are computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hstrain.drafter import attention as masks
from hstrain.drafter.losses import Kind, Weights
from hstrain.manifest import TrainManifest
from hstrain.train.step import Trainer

from tests.made.ranks import ALONE, UNCLIPPED, first_step, same_step
from tests.made.stores import Little
from tests.made.trainers import train_manifest

pytestmark = pytest.mark.thorough


def manifest(**sections: dict[str, Any]) -> TrainManifest:
    # the calibrated start looks at the first pack, and so depends on what that is
    return train_manifest(**{**UNCLIPPED, "drafter": {"logit_std": 0}, **sections})


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("ce", "exp"), ("ce", "dpace"), ("kl-topk", "none"), ("kl-exact", "exp"), ("tv", "exp"), ("ce-argmax", "exp")],
)
def test_packs_of_many_samples_are_those_samples_alone(little: Little, kind: Kind, weights: Weights) -> None:
    loss = {"kind": kind, "weights": weights}
    whole, fourths, alone = (
        first_step(manifest(loss=loss, data={"pack_tokens": tokens, "packs_per_step": 99}), little.path, ALONE)
        for tokens in (9999, 80, 2)
    )
    assert [len(packs["samples"]) for packs in (whole, fourths, alone)] == [1, 4, 9]
    assert sorted(i for pack in whole["samples"] for i in pack) == sorted(i for pack in alone["samples"] for i in pack)
    same_step(whole, alone)
    same_step(whole, fourths)


def test_a_mean_of_means_would_be_noticed(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: each pack's loss is divided by its own weight, as accumulation is often written."""
    loss_of = Trainer.loss

    def planted(self: Trainer, pack: Any, at: int) -> Any:
        result = loss_of(self, pack, at)
        object.__setattr__(result, "loss_sum", result.loss_sum / result.weight_sum.clamp_min(1e-9))
        object.__setattr__(result, "weight_sum", torch.ones(()))
        return result

    monkeypatch.setattr(Trainer, "loss", planted)
    whole, fourths = (
        first_step(manifest(data={"pack_tokens": tokens, "packs_per_step": 99}), little.path, ALONE)
        for tokens in (9999, 80)
    )
    with pytest.raises(AssertionError):
        same_step(whole, fourths)


@pytest.mark.parametrize("queries", [1, 12, 10**6])
def test_groups_of_queries_change_nothing(little: Little, monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    one = manifest(data={"pack_tokens": 200})
    before = first_step(one, little.path, ALONE)
    monkeypatch.setattr(masks, "GROUP_QUERIES", queries)
    same_step(first_step(one, little.path, ALONE), before)


def test_computing_layers_again_changes_nothing(little: Little) -> None:
    plain, again = (
        first_step(manifest(data={"pack_tokens": 200}, run={"gradient_checkpointing": on}), little.path, ALONE)
        for on in (False, True)
    )
    same_step(again, plain, rel=1e-7)


def test_bf16_products_give_nearly_the_same_step(little: Little) -> None:
    exact, rough = (
        first_step(manifest(data={"pack_tokens": 200}, run={"precision": name}), little.path, ALONE)
        for name in ("fp32", "bf16")
    )
    assert rough["record"]["loss"] == pytest.approx(exact["record"]["loss"], rel=0.02)
    assert all(grad.dtype == torch.float32 for grad in rough["grads"].values())
    assert all(weight.dtype == torch.float32 for weight in rough["weights"].values())
    for name, grad in exact["grads"].items():
        assert (rough["grads"][name] - grad).norm() < 0.1 * grad.norm() + 1e-6, name
