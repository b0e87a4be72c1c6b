"""Put other projects' packages into a directory of their own: ``python tools/oracle_env.py``.

``tests/oracle`` holds our exports, masks and losses against dflash, the DFlash authors' reference, and speculators, and
our stores against tensorstore; ``tools/bench_trainer.py`` and ``tools/bench_store.py`` our speed. They are
installed without their dependencies (they pin other versions of transformers and pull gigabytes), with those that an
import needs and this environment has not, into ``~/.cache/hscache/``, once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fla_env import install_packages, sees

PACKAGES = (
    "dflash==0.1.0",
    "speculators==0.9.0",
    "hs-connectors==0.9.0",
    # what importing speculators needs
    "loguru==0.7.3",
    "openai==3.57.0",
    "pydantic-settings==2.16.3",
    "python-dotenv==1.2.4",
    "sniffio==1.3.1",
    "tensorstore==0.1.86",
    "ml_dtypes==0.6.0",
)


def directory() -> Path:
    """Return where the packages are, or would be."""
    return Path("~/.cache/hscache/oracles-dflash-0.1.0-speculators-0.9.0-tensorstore-0.1.86").expanduser()


def is_ready() -> bool:
    """Return whether :func:`install` has finished."""
    return directory().is_dir()


def install() -> Path:
    """Install the packages unless they are there, and return their directory."""
    return install_packages(directory(), list(PACKAGES))


def environment() -> dict[str, str]:
    """Return environment variables for a subprocess that shall see these packages."""
    return sees(directory())


def import_oracles() -> None:
    """Let this process import the packages: behind everything else, so that they replace nothing of the environment's.

    Raises:
        ImportError: When they are not installed.
    """
    if not is_ready():
        raise ImportError("the oracles are not installed: python tools/oracle_env.py")
    if str(directory()) not in sys.path:
        sys.path.append(str(directory()))


if __name__ == "__main__":
    print(install())
