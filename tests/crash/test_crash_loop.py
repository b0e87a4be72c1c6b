"""A sample of ``tools/faults/crash_loop.py``, and that it sees what it should."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_loop import Loop, summary
from faults import interpose, one_target, small_manifest

from hscache.build.run import build
from hscache.store.layout import StorePaths


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    with one_target():
        yield Loop(tmp_path_factory.mktemp("crash") / "loop", rows=6, seed=1)


def test_builds_killed_at_random_moments_end_as_if_nothing_had_happened(loop: Loop) -> None:
    result = summary(list(loop.random_kills(6, math.inf)))
    assert result["kills_landed"] + result["kills_too_late"] == 6
    assert result["kills_landed"] > 0
    assert [result[what] for what in ("lost", "wrong", "litter")] == [0, 0, 0], result["bad"]


def test_builds_killed_at_file_operations_end_as_if_nothing_had_happened(loop: Loop) -> None:
    every = range(1, len(loop.points) + 1, max(1, len(loop.points) // 5))
    result = summary(list(loop.kills_at_points(every, math.inf)))
    assert result["kills_landed"] == len(every)
    assert [result[what] for what in ("lost", "wrong", "litter")] == [0, 0, 0], result["bad"]
    assert {name.split()[0] for name in loop.points} == {"link", "fsync", "writev", "rename", "replace"}


def test_the_files_of_one_shard_only_are_begun_at_any_time(tmp_path: Path) -> None:
    begun: list[int] = []

    def count(*_: object) -> None:
        begun.append(len(list(StorePaths(tmp_path / "store").staging.glob("*/*/input_ids"))))

    with one_target(), interpose(count, lambda *_: None):
        build(small_manifest(tmp_path), tmp_path / "store")
    assert set(begun) == {0, 1}


def test_damage_and_litter_are_told(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Loop._finish

    def harm(loop: Loop, store: Path, outcome: object) -> None:
        (store / "litter").write_text("x")
        finish(loop, store, outcome)  # type: ignore[arg-type]

    monkeypatch.setattr(Loop, "_finish", harm)
    (outcome,) = loop.kills_at_points(range(len(loop.points), len(loop.points) + 1), math.inf)
    assert outcome.litter == ["litter"]
    assert outcome.wrong == ["file-extra: litter: no record names it; remove it"]
