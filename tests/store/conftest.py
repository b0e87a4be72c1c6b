"""The little store that the tests of the reader read, and a copy to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.made.once import once
from tests.made.stores import Little, make_store


@pytest.fixture(scope="session")
def little(tmp_path_factory: pytest.TempPathFactory) -> Little:
    """A store of which one sample was rejected."""
    return once(tmp_path_factory, "rejected", lambda folder: make_store(folder / "store", reject=["s3"]))


@pytest.fixture
def copied(little: Little, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    shutil.copytree(little.path, tmp_path / "store")
    return tmp_path / "store"
