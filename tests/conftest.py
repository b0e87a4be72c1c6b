"""Fixtures on a real model: SmolLM2-135M-Instruct and completions that it wrote itself (``make assets`` fetches it)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from hscache.manifest import BuildManifest, parse_manifest
from tests.made.commands import Answer, runner
from tests.made.hybrid import Hybrid, fit_hybrid, make_hybrid, make_scored
from tests.made.once import once

# wall time on a shared machine says nothing; the same examples in every run, so that a red test stays red
settings.register_profile("hscache", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "hscache"))

DATA = Path(__file__).parent / "data"
TINY_HYBRID = Path(__file__).parent.parent / "tools" / "targets" / "tiny_hybrid"
SMOLLM2 = Path.home() / ".cache/hscache/targets/SmolLM2-135M-Instruct"


# two OpenMP threads beside anything else on two cores are many times slower than one
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a little run's or store's time would be the disk's: no power cut threatens it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge the kernels that run here as if the device were a GPU."""
    from hstrain.live import target as live_target

    from hscache.kernels import path as kernel_path
    from hscache.kernels import provenance

    for module in (provenance, live_target):
        monkeypatch.setattr(module, "is_fallback", lambda records, _: kernel_path.is_fallback(records, "cuda"))


@pytest.fixture
def hstrain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Return a function that runs ``hstrain ARGUMENTS`` in this process."""
    from hstrain.cli import main

    return runner("hstrain", main, capsys, monkeypatch)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo's target, a real model."""
    if not (SMOLLM2 / "config.json").exists():
        pytest.fail("the test target is missing; run: make assets")
    return SMOLLM2


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    """The tiny hybrid's store of its own greedy completions, and a drafter that learnt something of it."""
    return once(tmp_path_factory, "hybrid", lambda folder: make_hybrid(folder, TINY_HYBRID))


@pytest.fixture(scope="session")
def sliding_run(hybrid: Hybrid, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter like the hybrid's, but with sliding layers only: speculators' layout holds it."""

    def make(folder: Path) -> Path:
        fit_hybrid(hybrid.store, folder / "run", layer_types=["sliding_attention"] * 2)
        return folder / "run"

    return once(tmp_path_factory, "sliding", make)


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store of the tiny hybrid, and a run of which some samples were held out and which learnt something."""
    completions = DATA / "tiny-hybrid-completions.parquet"
    return once(tmp_path_factory, "scored", lambda folder: make_scored(folder, TINY_HYBRID, completions))


@pytest.fixture(scope="session")
def corpus() -> Path:
    """24 completions that SmolLM2 wrote for HumanEval and MT-Bench prompts, the shortest of the demo's."""
    return DATA / "smollm2-completions.parquet"


def smollm2_manifest(corpus: Path, **sections: dict[str, object]) -> BuildManifest:
    """A manifest for SmolLM2 with small batches and shards; sections are merged over it."""
    raw: dict[str, dict[str, object]] = {
        "target": {"path": str(SMOLLM2), "dtype": "float32"},
        "states": {"taps": [1, 8, 14, 20, 27]},
        "corpus": {"path": str(corpus)},
        "limits": {"batch_tokens": 512},
        "store": {"shard_bytes": "2MiB"},
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}
    return parse_manifest(raw, "test")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which planted fault was found by which check, as tests/test_planted.py recorded it."""
    passed = terminalreporter.getreports("passed")
    planted = [value for report in passed for name, value in report.user_properties if name == "planted"]
    if planted:
        terminalreporter.section("planted faults")
        for fault, code, when in sorted(map(tuple, planted), key=lambda row: row[2]):
            terminalreporter.write_line(f"{fault:34} {code:20} {when}")
