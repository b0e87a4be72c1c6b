"""Put the packages of the ``fla`` tests aside: ``python tools/bench/fla_env.py [FLA_VERSION ...]``.

fla and Triton must not be in the developers' environment: transformers binds whatever it finds at import, and the
default test run is about the torch path. They are installed without their dependencies (fla would pull a CUDA build of
torch) into ``~/.cache/hscache/``, once; a subprocess gets the directory through PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRITON = "3.7.1"
NEW = "0.6.0"
OLD = "0.4.2"
"""The last fla whose delta rule misreads grouped value heads under transformers >= 5.23."""
_CACHE = Path("~/.cache/hscache")


def directory(fla: str = NEW) -> Path:
    """Return where the packages for this version of fla are, or would be."""
    return _CACHE.expanduser() / f"fla-env-{fla}-triton-{TRITON}"


def is_ready(fla: str = NEW) -> bool:
    """Return whether :func:`install` has finished for this version."""
    return directory(fla).is_dir()


def install(fla: str = NEW) -> Path:
    """Install the packages unless they are there, and return their directory."""
    packages = [f"triton=={TRITON}", f"fla-core=={fla}", f"flash-linear-attention=={fla}", "einops"]
    return install_packages(directory(fla), packages)


def install_packages(target: Path, packages: list[str]) -> Path:
    """Install packages, without what they depend on, into a directory of their own unless it is there."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # a directory that exists is complete: fill another one and rename it
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        staged = Path(scratch) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(staged), *packages], check=True)
        staged.rename(target)
    return target


def environment(fla: str = NEW) -> dict[str, str]:
    """Return environment variables for a subprocess that shall see these packages and interpret their kernels."""
    return sees(directory(fla)) | {"TRITON_INTERPRET": "1"}


def sees(packages: Path) -> dict[str, str]:
    """Return environment variables for a subprocess that shall see the packages in a directory, tools and sources."""
    root = Path(__file__).resolve().parents[2]
    tools = (root / "tools" / name for name in ("bench", "demo", "targets", "faults"))
    path = map(str, (packages, *tools, root, root / "trainer"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="*", default=[NEW, OLD], help=f"of fla; {NEW} and {OLD} by default")
    versions = parser.parse_args().version
    for version in versions:
        print(install(version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
