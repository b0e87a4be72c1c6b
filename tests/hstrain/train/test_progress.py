"""What a run says of its own speed."""

from __future__ import annotations

import pytest
import torch
from hstrain.train import progress


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100X", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ],
)
def test_the_peak_is_that_of_the_very_device(monkeypatch: pytest.MonkeyPatch, name: str, teraflops: int | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = progress.peak_flops(torch.device("cuda"))
    assert found == (None if teraflops is None else teraflops * 1e12)
