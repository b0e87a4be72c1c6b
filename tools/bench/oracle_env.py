"""Put other projects' packages into a directory of their own: ``python tools/bench/oracle_env.py``.

``tests/oracle`` holds our exports, masks and losses against dflash, the DFlash authors' reference, and speculators, and
our stores against tensorstore; ``tools/bench/bench_trainer.py`` and ``tools/bench/bench_store.py`` our speed. They are
installed without their dependencies (they pin other versions of transformers and pull gigabytes), with those that an
import needs and this environment has not, into ``~/.cache/hscache/``, once. Of vLLM, which does not run without CUDA,
only the two files of Python are kept that decide which layers of a drafter are causal.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
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
VLLM = "0.34.0"
VLLM_FILES = ("vllm/transformers_utils/configs/speculators/algos.py", "vllm/model_executor/models/qwen3_dflash.py")
"""Of its wheel."""


def directory() -> Path:
    """Return where the packages are, or would be."""
    return Path("~/.cache/hscache/oracles-dflash-0.1.0-speculators-0.9.0-tensorstore-0.1.86").expanduser()


def is_ready() -> bool:
    """Return whether :func:`install` has finished."""
    return directory().is_dir() and vllm_directory().is_dir()


def install() -> Path:
    """Install the packages and vLLM's files unless they are there, and return the packages' directory."""
    install_vllm_files()
    return install_packages(directory(), list(PACKAGES))


def vllm_directory() -> Path:
    """Return where :data:`VLLM_FILES` are, or would be."""
    return Path(f"~/.cache/hscache/vllm-{VLLM}").expanduser()


def install_vllm_files() -> Path:
    """Take :data:`VLLM_FILES` out of vLLM's wheel (some 240 MB) unless they are there, and return their directory."""
    target = vllm_directory()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # a directory that exists is complete: fill another one and rename it
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
        # the files are the same on every platform, but there are wheels for few
        which = ["--no-deps", "--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64", f"vllm=={VLLM}"]
        subprocess.run([*pip, "--dest", scratch, *which], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        staged = Path(scratch) / "files"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(staged, VLLM_FILES)
        staged.rename(target)
    return target


def environment() -> dict[str, str]:
    """Return environment variables for a subprocess that shall see these packages."""
    return sees(directory())


def import_oracles() -> None:
    """Let this process import the packages: behind everything else, so that they replace nothing of the environment's.

    Raises:
        ImportError: When they are not installed.
    """
    if not is_ready():
        raise ImportError("the oracles are not installed: python tools/bench/oracle_env.py")
    if str(directory()) not in sys.path:
        sys.path.append(str(directory()))


if __name__ == "__main__":
    print(install())
