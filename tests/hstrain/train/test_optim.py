"""Muon where bfloat16 is emulated: torch's own, in float32."""

from __future__ import annotations

from typing import Any

import hstrain.train.optim
import pytest
import torch
from hstrain.manifest import OptimSpec
from hstrain.train.optim import Float32Muon, make_optimizers
from torch import nn

SHAPES = [(48, 48), (96, 32), (24, 80)]
OPTIONS: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1, "momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}


def trained(kind: type[torch.optim.Optimizer], steps: int = 4) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Return weights after a few steps on seeded gradients, and the optimizer."""
    made = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=made)) for shape in SHAPES]
    optimizer = kind(weights, **OPTIONS)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=made)
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer


def test_it_steps_as_torchs_own_does_but_for_rounding() -> None:
    ours, mine = trained(Float32Muon)
    theirs, other = trained(torch.optim.Muon)
    began, _ = trained(Float32Muon, steps=0)
    for a, b, start in zip(ours, theirs, began, strict=True):
        moved, apart = (a - start).norm(), (a - b).norm()
        assert apart < 0.03 * moved
        assert apart > 0, "the peer rounds to bfloat16: equal values would mean that it was called"
    assert mine.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    for name, state in mine.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], other.state_dict()["state"][name]["momentum_buffer"])
    mine.load_state_dict(other.state_dict())  # a run may go on under either


def test_the_update_has_the_gradients_singular_vectors_and_values_near_one() -> None:
    gradient = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(torch.zeros(40, 64))
    weight.grad = gradient
    Float32Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    update = -weight.detach().double() / (0.2 * 64**0.5)
    u, _, vh = torch.linalg.svd(gradient.double(), full_matrices=False)
    turned = u.T @ update @ vh.T
    assert turned.diagonal().min() > 0.6
    assert turned.diagonal().max() < 1.3
    assert (turned - turned.diagonal().diag()).abs().max() < 1e-4


@pytest.mark.parametrize("fast", [True, False])
def test_the_machine_decides_which_one_trains(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    monkeypatch.setattr(hstrain.train.optim, "fast_bf16", lambda kind: fast)
    first, _ = make_optimizers(nn.Linear(8, 8), OptimSpec(name="muon"))
    assert type(first) is (torch.optim.Muon if fast else Float32Muon)
