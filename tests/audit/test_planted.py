"""Planted faults, each of which has ruined somebody's drafter: which check finds it, and when.

Every fault is planted into a build of the trained hybrid target; the table at the end of the test output lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from planted import loader, shifted, unit

import hscache
from hscache.audit import compare
from hscache.audit.verify import verify
from hscache.build.run import build
from hscache.manifest import parse_manifest
from hscache.model import capture, loading
from hscache.model.loading import LoadedTarget
from tests.conftest import DATA, TINY_HYBRID

TAPS = (1, 2, 4, 5, 7)
Patch = Callable[[pytest.MonkeyPatch], None]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real completions, all cut to the same shape: the last 100 tokens, 60 of them supervised."""
    rows = pq.read_table(DATA / "tiny-hybrid-completions.parquet").to_pylist()
    for row in rows:
        row["input_ids"], row["loss_mask"] = row["input_ids"][-100:], [0] * 40 + [1] * 60
    out = tmp_path_factory.mktemp("planted") / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out


def manifest(corpus: Path) -> Any:
    raw = {
        "target": {"path": str(TINY_HYBRID), "dtype": "float32"},
        "states": {"taps": list(TAPS)},
        "corpus": {"path": str(corpus)},
        "limits": {"batch_tokens": 800},
        "store": {"shard_bytes": "3MiB"},
    }
    return parse_manifest(raw, "test")


def change_target(patch: pytest.MonkeyPatch, change: Callable[[LoadedTarget], LoadedTarget]) -> None:
    patch.setattr(loading, "load_target", loader(change))


def change_states(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], tap: int = 4) -> None:
    """Let a block hand on changed states to its hook and to the layers behind it."""

    def planted(target: LoadedTarget) -> LoadedTarget:
        target.layers[tap].register_forward_hook(lambda _module, _args, output: change(output))
        return target

    change_target(patch, planted)


def change_sample(patch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Change what capture hands to the writer."""
    samples = capture.Pending.samples
    patch.setattr(capture.Pending, "samples", lambda self, **kw: change(list(samples(self, **kw))))


def renormed(norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Patch:
    """Store another final state than the one that the logits were computed from."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        weight: list[torch.Tensor] = []

        def keep(target: LoadedTarget) -> LoadedTarget:
            weight.append(target.norm.weight.detach())  # type: ignore[union-attr,arg-type]
            return target

        def change(samples: list[Any]) -> list[Any]:
            for sample in samples:
                last = torch.from_numpy(sample.arrays["hidden_states"][:, -1].view(np.int16)).view(torch.bfloat16)
                state = norm(last.float(), weight[0]).bfloat16()
                sample.arrays["final_state"] = state.view(torch.int16).numpy().view(np.uint16)
            return samples

        change_target(patch, keep)
        change_sample(patch, change)

    return plant


def swap_equal_lengths(patch: pytest.MonkeyPatch) -> None:
    """Exchange all that was computed for the first two samples of each batch, before any digest is taken."""

    def change(samples: list[Any]) -> list[Any]:
        if len(samples) < 2:
            return samples
        first, second = samples[:2]
        for name in first.arrays:
            if name not in ("input_ids", "loss_mask"):
                first.arrays[name], second.arrays[name] = second.arrays[name], first.arrays[name]
        stats = first.stats, second.stats
        return [
            dataclasses.replace(first, stats=stats[1]), dataclasses.replace(second, stats=stats[0]), *samples[2:]
        ]  # fmt: skip

    change_sample(patch, change)


def at(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x.index_put((torch.tensor(0), torch.tensor(3), torch.tensor(7)), torch.tensor(value))


def constant_row(x: torch.Tensor) -> torch.Tensor:
    return x.index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(0.5))


def short_states(patch: pytest.MonkeyPatch) -> None:
    """A tap returns one row less than there are ids, as a prefix cache does."""

    def planted(target: LoadedTarget) -> LoadedTarget:
        block = target.layers[4]
        register = block.register_forward_hook

        def tapped(hook: Any, **kw: Any) -> Any:
            return register(lambda m, a, out: hook(m, a, out[:, :-1]) and None, **kw)

        block.register_forward_hook = tapped  # type: ignore[method-assign,assignment]
        return target

    change_target(patch, planted)


BEFORE_COMMIT: dict[str, tuple[str, Patch]] = {
    "one zero tap": ("zero-tap", lambda p: change_states(p, torch.zeros_like, tap=7)),
    "one constant row": ("constant-row", lambda p: change_states(p, constant_row)),
    "one inf": ("non-finite", lambda p: change_states(p, at(float("inf")))),
    "one NaN": ("non-finite", lambda p: change_states(p, at(float("nan")))),
    "states shorter than ids": ("length-mismatch", short_states),
    "every token the same state": ("constant-tap", lambda p: change_states(p, lambda x: x[:, 4:5].expand_as(x), tap=7)),
}
BY_VERIFY: dict[str, tuple[str, Patch]] = {
    "tap off by one": ("recompute-differs", lambda p: change_target(p, shifted(-1))),
    "two equal-length samples swapped": ("recompute-differs", swap_equal_lengths),
    "final state without norm": ("head-mismatch", renormed(lambda x, w: x)),
    "norm w for 1+w": ("head-mismatch", renormed(lambda x, w: unit(x) * w)),
}


@pytest.mark.parametrize("fault", BEFORE_COMMIT)
def test_found_before_commit(
    fault: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    reason, plant = BEFORE_COMMIT[fault]
    plant(monkeypatch)
    report = build(manifest(corpus), tmp_path / "store")
    assert report.rejected.get(reason, 0) > 0
    assert set(report.rejected) <= {reason, "non-finite"}, "what follows from one fault has that fault's name"
    assert verify(tmp_path / "store").ok, "nothing broken was stored"
    record_property("planted", (fault, reason, f"before commit, {report.rejected[reason]} samples rejected"))


@pytest.mark.parametrize("fault", BY_VERIFY)
def test_found_by_verify(
    fault: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    code, plant = BY_VERIFY[fault]
    with monkeypatch.context() as patch:
        plant(patch)
        assert build(manifest(corpus), tmp_path / "store").samples == 32
    codes = {finding.code for finding in verify(tmp_path / "store").findings}
    if code == "recompute-differs":
        assert not codes, "every checksum agrees: only the target itself can tell"
        store = hscache.open(tmp_path / "store")
        assert compare.fault(compare.recompute(store, len(store)))
        record_property("planted", (fault, code, "verify --recompute"))
    else:
        assert code in codes
        record_property("planted", (fault, code, "verify --level full"))


def test_without_a_fault_nothing_is_found(corpus: Path, tmp_path: Path) -> None:
    assert build(manifest(corpus), tmp_path / "store").rejected == {}
    assert verify(tmp_path / "store").ok
    store = hscache.open(tmp_path / "store")
    again = compare.recompute(store, 8)
    assert compare.fault(again) == ""
    # the delta rule's batched products may round a lone sample's last bit otherwise
    assert min(tap.equal for tap in again.taps) > 0.9999
