"""Write files that survive a kill and a power cut: write to staging, sync, rename.

A rename is atomic within one file system, so work in progress lives in ``STORE/staging/`` beside its destination. Each
process works in its own directory there and holds a lock on it. The kernel releases the lock when the process ends,
kill -9 included, so the files of a dead process can be distinguished from those that a live one is writing. On a file
system without locks nothing can tell the two apart, so such files stay.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType

from hscache.console import say
from hscache.errors import EnvironmentFault

_LOCK_SUFFIX = ".lock"
_AGAIN = "run the same command again: it resumes where it stopped"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn file system errors inside the block into errors that say how to resume.

    Args:
        root: The store being written.

    Raises:
        EnvironmentFault: ``disk-full`` or ``disk-error``.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not the file system's: other libraries raise plain OSErrors too
            raise
        where = f" ({error.filename})" if error.filename else ""
        what = f"{root}: {os.strerror(error.errno)}{where}; what is committed is whole"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EnvironmentFault("disk-full", what, hint=f"make room and {_AGAIN}") from error
        raise EnvironmentFault("disk-error", what, hint=f"fix it and {_AGAIN}") from error


def fsync_directory(path: Path) -> None:
    """Make the entries of a directory durable: a rename is only on disk once its parent is."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and sync it. The caller syncs the directory."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, destination: Path) -> None:
    """Copy a file's content and sync it. The caller syncs the directory."""
    shutil.copyfile(source, destination)
    fd = os.open(destination, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, staging: Path) -> None:
    """Write ``data`` to ``path`` so that a reader sees either the complete old file or the complete new one."""
    temporary = staging / f"{path.name}.{uuid.uuid4().hex}"
    write_file(temporary, data)
    temporary.replace(path)
    fsync_directory(path.parent)


def publish_directory(source: Path, destination: Path) -> bool:
    """Rename a fully written directory into place, durably.

    Args:
        source: Directory below the store's ``staging/``; its files are synced already.
        destination: Final path, on the same file system; its parent is made if missing.

    Returns:
        False when ``destination`` exists already (another process was first); ``source`` is then removed.
    """
    fsync_directory(source)
    if not destination.parent.exists():
        destination.parent.mkdir(exist_ok=True)
        fsync_directory(destination.parent.parent)
    try:
        source.rename(destination)
    except OSError:
        if not destination.is_dir():
            raise
        shutil.rmtree(source)
        return False
    fsync_directory(destination.parent)
    return True


def lock_file(fd: int, root: Path, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed or the process ends; say so once where the file system has no locks.

    Args:
        fd: The file.
        root: Store or run that it protects, for the message.
        wait: Wait until another process releases it.

    Returns:
        Whether the file system has locks.

    Raises:
        BlockingIOError: Another process has locked it.
        OSError: Any other fault of the disk.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        say_no_locks(root)
        return False
    return True


@cache
def say_no_locks(root: Path) -> None:
    """Say, once for each store or run, that its file system has no locks."""
    say(f"{root}: its file system has no file locks, so other processes that write there are not noticed")


class Staging:
    """This process's directory below ``STORE/staging/``; directories that dead processes left there are removed.

    Use as a context manager: the directory is removed at the end, also after an exception.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._sweep(root)
        name = uuid.uuid4().hex
        self._lock_path = root / (name + _LOCK_SUFFIX)
        # the lock is taken before the directory exists, so that no sweep can find the directory unlocked
        self._lock = _create_locked(self._lock_path)
        self.path = root / name
        self.path.mkdir()

    @staticmethod
    def _sweep(root: Path) -> None:
        entries = {entry.name: entry for entry in root.iterdir()}
        for name, entry in entries.items():
            if name.endswith(_LOCK_SUFFIX):
                Staging._sweep_if_dead(entry, root / name.removesuffix(_LOCK_SUFFIX))
            elif name + _LOCK_SUFFIX not in entries and not (root / (name + _LOCK_SUFFIX)).exists():
                _remove(entry)  # no lock file: its owner is dead, since a live process makes its lock first

    @staticmethod
    def _sweep_if_dead(lock_path: Path, directory: Path) -> None:
        try:
            fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # its owner just left
        try:
            if lock_file(fd, lock_path.parents[1]):
                _remove(directory)
                lock_path.unlink(missing_ok=True)
        except BlockingIOError:
            return  # its owner is alive
        finally:
            os.close(fd)

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _remove(self.path)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def _create_locked(path: Path) -> int:
    """Create a file and lock it; retry if a sweep removed the file between the two."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        lock_file(fd, path.parents[1], wait=True)
        try:
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # another process may be sweeping too
    else:
        path.unlink(missing_ok=True)
