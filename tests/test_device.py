"""Where things are computed."""

from __future__ import annotations

import pytest
import torch

from hscache.device import pick_device
from trainer.parallel import World


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with four; return what torch was told to make its current one."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("name", "index"), [("LOCAL_RANK", 3), ("SLURM_LOCALID", 2), ("SLURM_LOCALID", 6)])
def test_each_process_on_a_machine_gets_its_own(
    four_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, name: str, index: int
) -> None:
    monkeypatch.setenv(name, str(index))
    assert pick_device() == torch.device("cuda", index % 4)
    assert World.join().device == torch.device("cuda", index % 4)
    assert four_gpus == [torch.device("cuda", index % 4)]
    assert pick_device("cpu") == torch.device("cpu")


def test_a_process_alone_takes_the_current_one(four_gpus: list[torch.device]) -> None:
    assert pick_device() == torch.device("cuda")
    assert World.join().device == torch.device("cuda")
    assert not four_gpus, "torch refuses to make a device without a number the current one"


def test_without_cuda_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device() == torch.device("cpu")
