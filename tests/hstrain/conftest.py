"""The little store that most tests of training read."""

from __future__ import annotations

import pytest

from tests.made.once import once
from tests.made.stores import Little
from tests.made.trainers import training_store


@pytest.fixture(scope="session")
def little(tmp_path_factory: pytest.TempPathFactory) -> Little:
    """A store whose samples are long enough to train on."""
    return once(tmp_path_factory, "little", lambda folder: training_store(folder / "store"))
