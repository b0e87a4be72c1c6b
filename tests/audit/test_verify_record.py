"""verify --record: a killed run continues, and whatever a recorded shard's files show to have changed is read again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hscache.audit.verify import verify
from hscache.cli import app
from hscache.errors import ConflictError, EnvironmentFault
from hscache.store.index import committed_shards
from tests.made.stores import corpus_rows, flip, little_manifest, make_store

SHARDS = 11
KILLED = """
import os, signal, sys
from pathlib import Path
from hscache.audit import verify as module
check, last, jobs = module.check_shard, int(sys.argv[3]), int(sys.argv[4])

def killed(store, shard):
    if shard == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return check(store, shard)

module.check_shard = killed
module.verify(Path(sys.argv[1]), jobs=jobs, record=Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = corpus_rows((9, 8, 7, 11, 6, 5, 12, 8, 9, 10, 7, 6))
    manifest = little_manifest(store={"shard_bytes": 800}, limits={"batch_tokens": 12})
    root = make_store(tmp_path_factory.mktemp("record") / "store", rows, manifest=manifest).path
    assert len(committed_shards(root)) == SHARDS
    return root


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "passed.jsonl"


def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text().splitlines()]


@pytest.mark.parametrize(("last", "jobs", "fewest"), [(4, 1, 4), (8, 1, 8), (6, 2, 4)])
def test_a_killed_verification_continues_where_it_was(
    store: Path, record: Path, last: int, jobs: int, fewest: int
) -> None:
    """``fewest``: with two jobs the other one may be a shard behind."""
    plain = verify(store)
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, (store, record, last, jobs))], check=False)
    assert done.returncode == -signal.SIGKILL
    passed = {line["shard"] for line in lines(record)[1:]}
    assert fewest <= len(passed) < SHARDS
    again = verify(store, record=record)
    assert again.recorded == len(passed)
    assert {**again.to_json(), "recorded": 0} == plain.to_json()
    assert verify(store, record=record).recorded == SHARDS
    assert len(lines(record)) == 1 + SHARDS, "each shard was read once"


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def harmed(path: Path) -> None:
    """Flip a byte; the size stays, the time moves on."""
    flip(path, 9)


def harmed_with_its_time(path: Path) -> None:
    """As a tool does that sets the time back, such as rsync: the time of the inode's change still shows it."""
    before = path.stat()
    flip(path, 9)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def replaced(path: Path) -> None:
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.unlink()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("harm", [grow, harmed, harmed_with_its_time, replaced, Path.unlink])
@pytest.mark.parametrize("name", ["hidden_states/c.0.0.0", "logit_lse/c.0", "input_ids/zarr.json", "zarr.json"])
def test_damage_to_a_recorded_shard_is_found(
    store: Path, record: Path, harm: Callable[[Path], None], name: str
) -> None:
    verify(store, record=record)
    harm(store / "shards/00003.zarr" / name)
    report = verify(store, record=record)
    assert report.findings
    assert report.findings == verify(store).findings
    assert report.recorded == SHARDS - 1
    assert verify(store, record=record).findings == report.findings, "a shard with findings never passes"


def test_a_shard_with_findings_is_not_recorded_and_read_every_time(store: Path, record: Path) -> None:
    flip(store / "shards/00002.zarr/hidden_states/c.0.0.0", 9)
    for recorded in (0, SHARDS - 1):
        report = verify(store, record=record)
        assert {(finding.code, finding.shard) for finding in report.findings} >= {("file-content", 2)}
        assert report.recorded == recorded
    assert 2 not in {line["shard"] for line in lines(record)[1:]}


def test_what_does_not_need_the_bytes_is_checked_of_recorded_shards_too(store: Path, record: Path) -> None:
    verify(store, record=record)
    (store / "shards/00001.zarr/input_ids/c.1").write_bytes(b"x")
    (store / "index.parquet").unlink()
    report = verify(store, record=record)
    assert {finding.code for finding in report.findings} == {"file-extra", "index-stale"}
    assert report.recorded == SHARDS


def test_a_copy_is_read_again(store: Path, record: Path, tmp_path: Path) -> None:
    verify(store, record=record)
    shutil.copytree(store, tmp_path / "copy", copy_function=shutil.copy2)
    assert verify(tmp_path / "copy", record=record).recorded == 0


def test_another_head_is_compared_with_all_shards(store: Path, record: Path, tmp_path: Path) -> None:
    verify(store, record=record)
    path = tmp_path / "other"
    make_store(path, says={"head": {"scale": 2.0, "softcap": None}})
    shutil.rmtree(store / "target")
    shutil.copytree(path / "target", store / "target")
    report = verify(store, record=record)
    assert {finding.code for finding in report.findings} == {"head-mismatch"}
    assert report.recorded == 0


def test_without_the_targets_head_no_shard_passes(store: Path, record: Path) -> None:
    (store / "target/head.safetensors").unlink()
    verify(store, record=record)
    assert len(lines(record)) == 1


def test_again_reads_everything_and_forgets(store: Path, record: Path) -> None:
    verify(store, record=record)
    flip(store / "shards/00002.zarr/hidden_states/c.0.0.0", 9)
    report = verify(store, record=record, again=True)
    assert (report.recorded, len(lines(record))) == (0, SHARDS)


def test_a_line_that_was_cut_short_costs_its_shard_only(store: Path, record: Path) -> None:
    verify(store, jobs=1, record=record)
    whole = record.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in (last + 1, last + 40, len(whole) - 2):
        record.write_bytes(whole[:cut])
        assert verify(store, record=record).recorded == SHARDS - 1
        assert verify(store, record=record).recorded == SHARDS
    for cut in (0, 1, 20):
        record.write_bytes(whole[:cut])
        assert verify(store, record=record).recorded == 0
        assert verify(store, record=record).recorded == SHARDS


@pytest.mark.parametrize("line", [b"{}", b"[]", b"null", b'{"shard": true}', b'{"shard": 3}', b"\xff", b"[" * 100_000])
def test_lines_that_hold_anything_are_ignored(store: Path, record: Path, line: bytes) -> None:
    verify(store, jobs=1, record=record)
    text = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join([*text[:4], line, b"\n", *text[4:]]))
    assert verify(store, record=record).recorded == SHARDS


@pytest.mark.parametrize("content", [b"notes", b'{"a": 1}\n', b"{\n}", b"PAR1" * 5000, b'{"manifest": "x"}'])
def test_a_file_that_is_no_record_is_refused_and_left(store: Path, record: Path, content: bytes) -> None:
    record.write_bytes(content)
    for again in (False, True):
        with pytest.raises(ConflictError) as caught:
            verify(store, record=record, again=again)
        assert caught.value.code == "record-other"
    assert record.read_bytes() == content


def test_the_record_of_another_store_is_refused(store: Path, record: Path, tmp_path: Path) -> None:
    verify(make_store(tmp_path / "other").path, record=record)
    with pytest.raises(ConflictError):
        verify(store, record=record)


def test_a_record_that_cannot_be_written_is_an_error_of_the_environment(store: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no/such/folder"):
        with pytest.raises(EnvironmentFault) as caught:
            verify(store, record=path)
        assert caught.value.code == "disk-error"


def test_the_command_says_what_was_not_read_again(store: Path, record: Path) -> None:
    for recorded in (0, 3):
        answer = CliRunner().invoke(app, ["verify", str(store), "--shards", "0:3", "--record", str(record), "--json"])
        assert answer.exit_code == 0, answer.output
        assert json.loads(answer.stdout)["recorded"] == recorded
        assert ("the bytes of 3 shards were not read again" in answer.stderr) == bool(recorded)
    answer = CliRunner().invoke(app, ["verify", str(store), "--level", "quick", "--record", str(record)])
    assert answer.exit_code == 2
