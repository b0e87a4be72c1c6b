"""Builders of one store share its shards, wait for each other, and end with what one of them would have made."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import contents, one_target, small_manifest

from hscache.audit.verify import verify
from hscache.build import claim
from hscache.build.claim import ShardClaims
from hscache.build.convert import Change, convert
from hscache.build.run import build
from hscache.console import Interrupted
from hscache.errors import ConflictError
from hscache.manifest import BuildManifest, to_toml
from hscache.model.capture import Capturer
from hscache.store.index import committed_shards, load_index, read_shard
from hscache.store.layout import StorePaths, canonical_json, group_metadata

pytestmark = pytest.mark.usefixtures("no_disk", "target")


@dataclass(frozen=True)
class Whole:
    """A store of three shards, whole."""

    manifest: BuildManifest
    store: Path

    def begun(self, folder: Path) -> Path:
        """Return a copy that has no shard yet."""
        shutil.copytree(self.store, folder)
        shutil.rmtree(folder / "shards")
        (folder / "index.parquet").unlink()
        return folder


@pytest.fixture(scope="module")
def target() -> Any:
    with one_target():
        yield


@pytest.fixture(scope="module")
def whole(target: None, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    made = Whole(small_manifest(folder), folder / "store")
    assert build(made.manifest, made.store, device="cpu").built == 3
    return made


def when_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let something happen when a build first waits; it may not wait much longer."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert len(waits) < 5
        if len(waits) == 1:
            act()

    monkeypatch.setattr(claim.time, "sleep", sleep)


def give(whole: Whole, store: Path, shard: int, **kernels: str) -> None:
    """Put a shard into place as another builder would, perhaps with another record of its kernels."""
    there, here = StorePaths(whole.store).shard(shard), StorePaths(store).shard(shard)
    shutil.copytree(there, store / "staging/given")
    body = read_shard(there, whole=True)
    body["provenance"]["kernels"] |= kernels
    (store / "staging/given/zarr.json").write_bytes(canonical_json(group_metadata(body)))
    here.parent.mkdir(exist_ok=True)
    (store / "staging/given").rename(here)


def test_a_shard_that_a_builder_was_at_is_built_when_that_one_has_ended(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = whole.begun(tmp_path / "store")
    other = ShardClaims(StorePaths(store).manifest)
    assert other.take(0)
    others: list[list[int]] = []

    def end() -> None:
        others.append(committed_shards(store))
        other.__exit__(None, None, None)

    when_waiting(monkeypatch, end)
    assert build(whole.manifest, store, device="cpu").built == 3
    assert others == [[1, 2]], "whoever waits has nothing of its own left to do"
    assert "waiting for other processes that are writing 1 shard of this store" in capsys.readouterr().err
    assert contents(store) == contents(whole.store)
    assert load_index(store).equals(load_index(whole.store))
    assert list((store / "staging").iterdir()) == []


def test_what_another_builder_makes_is_not_made_again(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = whole.begun(tmp_path / "store")
    with ShardClaims(StorePaths(store).manifest) as other:
        assert other.take(1)
        when_waiting(monkeypatch, lambda: give(whole, store, 1))
        assert build(whole.manifest, store, device="cpu").built == 2
    assert "3/3 shards" in capsys.readouterr().err
    assert contents(store) == contents(whole.store)
    assert verify(store).ok


@pytest.mark.parametrize("kernels", [{"planned_id": "another", "path_id": "another"}, {"path_id": "another"}])
@pytest.mark.parametrize("early", [True, False])
def test_builders_with_other_kernels_do_not_go_on_beside_each_other(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: dict[str, str], early: bool
) -> None:
    store = whole.begun(tmp_path / "store")
    with ShardClaims(StorePaths(store).manifest) as other:
        assert other.take(0)
        if early:  # while we are at the second shard
            start = Capturer.start

            def starting(self: Capturer, rows: Any) -> Any:
                if not StorePaths(store).shard(0).exists():
                    give(whole, store, 0, **kernels)
                return start(self, rows)

            monkeypatch.setattr(Capturer, "start", starting)
        else:
            when_waiting(monkeypatch, lambda: give(whole, store, 0, **kernels))
        with pytest.raises(ConflictError) as caught:
            build(whole.manifest, store, device="cpu")
    assert caught.value.code == "store-other-kernels"
    assert committed_shards(store) == ([0, 1] if early else [0, 1, 2])


def test_a_builder_that_waits_can_be_stopped(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = whole.begun(tmp_path / "store")
    with ShardClaims(StorePaths(store).manifest) as other:
        assert other.take(2)
        when_waiting(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted):
            build(whole.manifest, store, device="cpu")
    assert committed_shards(store) == [0, 1]


def test_a_claim_is_one_builders_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(b"{}")
    with ShardClaims(path) as one, ShardClaims(path) as two:
        assert one.take(3)
        assert one.take(3)
        assert not two.take(3)
        assert two.take(10**6)
        assert not one.take(10**6)
        path.read_bytes()  # POSIX locks of a process end when it closes the file anywhere
        assert not two.take(3)
    script = "import sys, hscache.build.claim as c; from pathlib import Path; o = c.ShardClaims(Path(sys.argv[1]));"
    with subprocess.Popen(
        [sys.executable, "-c", script + "print(o.take(3), flush=True); sys.stdin.read()", str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other, ShardClaims(path) as one:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        assert not one.take(3)
        other.kill()
        other.wait()
        assert one.take(3)
    assert path.read_bytes() == b"{}"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EINVAL, errno.EOPNOTSUPP, errno.EACCES])
def test_without_locks_a_builder_makes_what_it_needs(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def none(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(claim.fcntl, "fcntl", none)
    if number in (errno.ENOLCK, errno.EOPNOTSUPP):
        monkeypatch.setattr(claim.fcntl, "flock", none)
    store = whole.begun(tmp_path / "store")
    assert build(whole.manifest, store, device="cpu").built == 3
    assert contents(store) == contents(whole.store)
    assert capsys.readouterr().err.count("its file system has no file locks") == 1


def test_conversions_share_shards_too(whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, store = tmp_path / "alone", tmp_path / "store"
    assert convert(whole.store, alone, Change("zstd")).built == 3
    Whole(whole.manifest, alone).begun(store)
    other = ShardClaims(StorePaths(store).manifest)
    assert other.take(0)
    assert other.take(1)

    def end() -> None:
        give(Whole(whole.manifest, alone), store, 1)
        other.__exit__(None, None, None)

    when_waiting(monkeypatch, end)
    assert convert(whole.store, store, Change("zstd")).built == 2
    assert contents(store) == contents(alone)
    assert verify(store).ok


@pytest.mark.thorough
def test_whoever_is_left_makes_what_a_killed_builder_was_at(tmp_path: Path) -> None:
    manifest, store = small_manifest(tmp_path, rows=24), tmp_path / "store"
    (tmp_path / "manifest.toml").write_text(to_toml(manifest))
    command = [sys.executable, "-c", "from hscache.cli import main; main()", "build", str(tmp_path / "manifest.toml")]
    killed, left = (
        subprocess.Popen([*command, "--out", str(store), "--device", "cpu"], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    )
    while len(committed_shards(store)) < 3 and left.poll() is None:
        time.sleep(0.002)
    killed.kill()
    assert left.wait(timeout=200) == 0, left.communicate()[1]
    killed.communicate()
    left.communicate()
    build(manifest, tmp_path / "alone", device="cpu")
    assert contents(store) == contents(tmp_path / "alone")
    assert build(manifest, store, device="cpu").built == 0  # and sweeps what the dead one left
    assert list((store / "staging").iterdir()) == []
    assert verify(store).ok
