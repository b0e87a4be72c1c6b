"""Files that survive: published once, staged apart, swept only when their owner is dead."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from hscache.store import durable
from hscache.store.durable import Staging, publish_directory, replace_file, write_file

Arrays = dict[str, NDArray[Any]]


def test_a_published_directory_is_renamed_once_and_never_over_another(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_file(tmp_path / name / "who", name.encode())
    assert publish_directory(tmp_path / "first", tmp_path / "there") is True
    assert publish_directory(tmp_path / "second", tmp_path / "there") is False
    assert (tmp_path / "there" / "who").read_text() == "first"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]


def test_publishing_makes_and_syncs_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable, "fsync_directory", synced.append)
    (tmp_path / "source").mkdir()
    assert publish_directory(tmp_path / "source", tmp_path / "parent" / "there") is True
    assert synced == [tmp_path / "source", tmp_path, tmp_path / "parent"]


def test_publishing_where_no_directory_can_be_is_an_error_that_keeps_the_source(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with pytest.raises(OSError, match="No such file"):
        publish_directory(tmp_path / "source", tmp_path / "no" / "parent" / "there")
    assert (tmp_path / "source").is_dir()


def test_writing_a_file_never_overwrites_and_replacing_does(tmp_path: Path) -> None:
    write_file(tmp_path / "f", b"old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "f", b"new")
    (tmp_path / "staging").mkdir()
    replace_file(tmp_path / "f", b"new", tmp_path / "staging")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert not list((tmp_path / "staging").iterdir())


def test_staging_removes_itself_after_success_and_after_an_exception(tmp_path: Path) -> None:
    with Staging(tmp_path / "staging") as staging:
        (staging.path / "work").mkdir()
        assert len(list((tmp_path / "staging").iterdir())) == 2
    assert not list((tmp_path / "staging").iterdir())
    with suppress(KeyError), Staging(tmp_path / "staging") as staging:
        (staging.path / "work").write_bytes(b"x")
        raise KeyError
    assert not list((tmp_path / "staging").iterdir())


HOLD = """
import pathlib, sys
from hscache.store.durable import Staging
staging = Staging(pathlib.Path(sys.argv[1]))
(staging.path / "work").write_bytes(b"half")
print(staging.path.name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield another process that holds a staging directory, and that directory."""
    root = tmp_path / "staging"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, root / process.stdout.readline().strip()
    process.kill()
    process.communicate()


def test_what_a_living_process_holds_is_left_and_what_a_killed_one_left_is_swept(
    holder: tuple[subprocess.Popen[str], Path],
) -> None:
    process, theirs = holder
    assert (theirs / "work").exists()
    with Staging(theirs.parent):
        assert (theirs / "work").exists()
    assert len(list(theirs.parent.iterdir())) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (theirs / "work").exists()
    with Staging(theirs.parent) as ours:
        assert not theirs.exists()
        assert ours.path.exists()
    assert not list(theirs.parent.iterdir())


def test_what_has_no_lock_is_swept(tmp_path: Path) -> None:
    root = tmp_path / "staging"
    (root / "orphan" / "deep").mkdir(parents=True)
    (root / "file").write_bytes(b"x")
    (root / "dead.lock").write_bytes(b"")
    with Staging(root):
        assert len(list(root.iterdir())) == 2
    assert not list(root.iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_work_goes_on_and_nothing_of_others_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    root = tmp_path / "staging"
    (root / "theirs").mkdir(parents=True)
    (root / "theirs.lock").write_bytes(b"")
    monkeypatch.setattr(durable.fcntl, "flock", refuse)
    for _ in range(2):
        with Staging(root) as staging:
            assert staging.path.is_dir()
    assert sorted(path.name for path in root.iterdir()) == ["theirs", "theirs.lock"]
    assert capsys.readouterr().err.count(f"{tmp_path}: its file system has no file locks") == 1
    refused = OSError(errno.EIO, os.strerror(errno.EIO))
    monkeypatch.setattr(durable.fcntl, "flock", lambda *_: (_ for _ in ()).throw(refused))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        Staging(root)


def test_a_lock_file_that_a_sweep_took_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    root, real = tmp_path / "staging", fcntl.flock
    seen: list[int] = []

    def flock(fd: int, how: int) -> None:
        if not seen:  # another process sweeps between the making of the file and its locking
            seen.append(fd)
            for lock in root.glob("*.lock"):
                lock.unlink()
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with Staging(root) as staging:
        monkeypatch.undo()
        with Staging(root):
            assert staging.path.is_dir()
