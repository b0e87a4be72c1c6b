"""The oracles, other projects' packages, imported into this process and only when these tests are asked for.

``python tools/oracle_env.py`` installs them once; then ``python -m pytest -m oracle``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import oracle_env
import pytest
import tiny_targets


@pytest.fixture(scope="session", autouse=True)
def _oracles() -> None:
    if not oracle_env.is_ready():
        pytest.skip("the oracles are not installed: python tools/oracle_env.py")
    oracle_env.import_oracles()


@pytest.fixture(scope="session")
def dflash(_oracles: None) -> Any:
    """``dflash.model``, the reference of the DFlash authors."""
    with warnings.catch_warnings(action="ignore"):
        import dflash.model
    return dflash.model


@pytest.fixture(scope="session")
def speculators(_oracles: None) -> Any:
    """The package speculators, silent."""
    with warnings.catch_warnings(action="ignore"):
        import speculators
        from loguru import logger
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    return speculators


@pytest.fixture(scope="session")
def tensorstore(_oracles: None) -> Any:
    """The package tensorstore."""
    import tensorstore

    return tensorstore


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense target on disk, as wide as the drafters of tests/drafters.py."""
    return tiny_targets.save("qwen3", tmp_path_factory.mktemp("target"))
