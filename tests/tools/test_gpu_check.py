"""gpu_check.py without a GPU: every step runs, what cannot be compared says why, a failure is a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_check
import pytest

from hscache.errors import EnvironmentFault

REASON = "ModuleNotFoundError: No module named 'fla'"


def run(out: Path, *args: str) -> tuple[int, dict[str, Any]]:
    status = gpu_check.main(["--out", str(out), "--device", "cpu", "--samples", "1", *args])
    document: dict[str, Any] = json.loads(out.read_text())
    return status, document


def test_a_dry_run_goes_through_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run(tmp_path / "new folder" / "cpu.json")
    assert status == 0
    assert (document["ok"], document["dry_run"], document["why_no_fla"]) == (True, True, REASON)
    assert document["date"].startswith("20")
    assert document["environment"]["versions"]["torch"]
    steps = document["steps"]
    assert list(steps) == list(gpu_check.STEPS)
    assert steps["doctor"]["would_fall_back"]
    for dtype in ("float32", "bfloat16"):
        store, heads = steps[f"store {dtype}"], steps[f"heads {dtype}"]
        assert store["verify"]["ok"]
        assert store["build"]["samples"] == store["recompute"]["samples"] == 1
        assert store["skipped"] == {"--kernels torch,fla": REASON}
        assert heads["finite"]
        assert heads["config"]["linear_num_value_heads"] == 2 * heads["config"]["linear_num_key_heads"]
        assert heads["skipped"] == {
            "causal_conv1d_fn": "ModuleNotFoundError: No module named 'causal_conv1d'",
            "chunk_gated_delta_rule": REASON,
        }
    told = capsys.readouterr().err
    assert f"no GPU: a dry run; no kernel was compared: {REASON}" in told


class OutOfResources(Exception):
    """As Triton's: derived from Exception itself."""


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            EnvironmentFault("kernel-wrong-states", "4 value heads over 2 key heads"),
            "kernel-wrong-states: 4 value heads over 2 key heads",
        ),
        (OutOfResources("shared memory"), "OutOfResources: shared memory"),
    ],
)
def test_a_step_that_fails_is_written_down_and_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(_: gpu_check.Machine) -> dict[str, Any]:
        raise error

    monkeypatch.setitem(gpu_check.STEPS, "store float32", fail)
    status, document = run(tmp_path / "cpu.json", "--only", "store float32", "doctor")
    assert status == 1
    assert document["steps"]["store float32"]["error"] == told
    assert document["steps"]["doctor"]["ok"]


def test_exact_products_are_what_counts_and_a_gpu_without_fla_is_not_checked() -> None:
    good, bad = {"ok": True}, {"ok": False}
    document = {"dry_run": False, "why_no_fla": None, "steps": {"heads float32": bad, "heads bfloat16": good}}
    assert not gpu_check._ok(document)
    assert gpu_check._ok({**document, "ieee": {"heads float32": good}})
    assert not gpu_check._ok({**document, "ieee": {"heads float32": bad}})
    crashed = {"heads float32": {**bad, "error": "RuntimeError: CUDA error"}, "heads bfloat16": good}
    assert not gpu_check._ok({**document, "steps": crashed, "ieee": {"heads float32": good}})
    assert not gpu_check._ok({**document, "steps": {"doctor": good}, "why_no_fla": REASON})
