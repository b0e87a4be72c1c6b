"""verify --shards: a part is checked as it is with the whole store, and its report claims nothing of the rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hscache.audit.verify import verify
from hscache.cli import app
from hscache.errors import InputError
from hscache.store.index import committed_shards
from tests.made.stores import corpus_rows, flip, little_manifest, make_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    rows = corpus_rows((9, 8, 7, 11, 6, 5, 12, 8, 9, 10, 7, 6))
    manifest = little_manifest(store={"shard_bytes": 800}, limits={"batch_tokens": 12})
    root = make_store(tmp_path / "store", rows, manifest=manifest).path
    assert len(committed_shards(root)) == 11
    return root


def damage(store: Path) -> None:
    flip(store / "shards/00002.zarr/hidden_states/c.0.0.0", 9)
    shutil.rmtree(store / "shards/00004.zarr")
    flip(store / "shards/00007.zarr/zarr.json", 100)


@pytest.mark.parametrize("shards", [slice(0, 4), slice(2, 3), slice(4, None), slice(None, 5), slice(-2, None)])
def test_a_part_has_the_findings_that_the_whole_store_has_there(store: Path, shards: slice) -> None:
    damage(store)
    numbers = range(11)[shards]
    whole, part = verify(store), verify(store, shards=shards)
    assert part.findings == [f for f in whole.findings if f.shard in numbers]
    assert part.part == (numbers.start, numbers.stop)
    assert 0 < part.samples < whole.samples


def test_parts_add_up_to_the_store(store: Path) -> None:
    whole, parts = verify(store), [verify(store, shards=s) for s in (slice(0, 3), slice(3, 4), slice(4, None))]
    for name in ("samples", "tokens", "rejected", "head_rows"):
        assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
    assert whole.part is None


def test_the_report_of_a_part_never_calls_the_store_whole(store: Path) -> None:
    (store / "index.parquet").unlink()
    damage(store)
    answer = CliRunner().invoke(app, ["verify", str(store), "--shards", "0:2", "--json"])
    assert answer.exit_code == 0, answer.output
    assert "whole and right" not in answer.stderr
    assert "no findings in a part of the store (full): shards 0:2 of 11" in answer.stderr
    assert "the other shards were not checked" in answer.stderr
    assert json.loads(answer.stdout)["part"] == [0, 2]
    answer = CliRunner().invoke(app, ["verify", str(store), "--shards", "2"])
    assert answer.exit_code == 1
    assert "shards 2:3 of 11" in answer.stderr
    assert "the other shards were not checked" in answer.stderr


@pytest.mark.parametrize("text", ["11", "11:", "3:3", "5:2", "-12"])
def test_a_range_without_shards_is_refused(store: Path, text: str) -> None:
    answer = CliRunner().invoke(app, ["verify", str(store), f"--shards={text}"])
    assert isinstance(answer.exception, InputError)
    assert answer.exception.code == "shard-unknown"
    assert text in answer.exception.message


@pytest.mark.parametrize("text", ["x", "1:2:3", "1-3", "", ":x"])
def test_what_is_no_range_is_a_wrong_argument(store: Path, text: str) -> None:
    answer = CliRunner().invoke(app, ["verify", str(store), f"--shards={text}"])
    assert answer.exit_code == 2
    assert "expected a number or A:B" in answer.stderr
