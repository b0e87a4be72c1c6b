"""llama.cpp's own server on loopback, only when these tests are asked for.

``python tools/bench/llama_cpp_env.py`` builds it once; then ``python -m pytest -m engines``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import llama_cpp_env
import pyarrow.parquet as pq
import pytest
from demo_assets import PROMPTS
from hstrain.train.fit import fit

from hscache.build.run import build
from tests.conftest import smollm2_manifest
from tests.made.once import once
from tests.made.trainers import train_manifest

SLOTS = 4
LEARNT = ("humaneval/2", "mtbench/94", "mtbench/104")
"""The prompts whose completions the drafters learn by heart; all three completions end within 96 tokens."""
STEPS = 20
"""Enough that most drafted tokens are accepted, but not all."""


@pytest.fixture(scope="session", autouse=True)
def _engine() -> None:
    if not llama_cpp_env.is_ready():
        pytest.skip("llama.cpp's server is not built: python tools/bench/llama_cpp_env.py")


@pytest.fixture(scope="session")
def gguf(_engine: None, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 in float32, kept beside the server until the weights of the tests' asset change."""

    def make(folder: Path) -> Path:
        with (smollm2 / "model.safetensors").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = llama_cpp_env.directory() / f"{smollm2.name}-{digest[:16]}.gguf"
        return path if path.exists() else llama_cpp_env.convert(smollm2, path)

    return once(tmp_path_factory, "gguf", make)


@pytest.fixture(scope="session")
def endpoint(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of SmolLM2 that decodes several prompts at once."""
    log = tmp_path_factory.mktemp("server") / "log"
    with llama_cpp_env.serving(gguf, log, slots=SLOTS) as url:
        yield url


@pytest.fixture(scope="session")
def prompts() -> list[Path]:
    """The project's prompts."""
    if not all(path.exists() for path in PROMPTS.values()):
        pytest.fail("the prompts are missing; run: make assets")
    return list(PROMPTS.values())


@pytest.fixture(scope="session")
def learnt_prompts(prompts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts of :data:`LEARNT`, and one that no drafter has seen."""
    rows = {
        row["id"]: row for path in prompts for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
    }
    chosen = tmp_path_factory.mktemp("prompts") / "learnt.jsonl"
    lines = [json.dumps(rows[name]) for name in (*LEARNT, "mtbench/81")]
    chosen.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return chosen


@pytest.fixture(scope="session")
def store(corpus: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of SmolLM2's own completions of :data:`LEARNT`."""

    def make(folder: Path) -> Path:
        table = pq.read_table(corpus)
        wanted = [name in LEARNT for name in table["sample_id"].to_pylist()]
        pq.write_table(table.filter(wanted), folder / "corpus.parquet")
        build(smollm2_manifest(folder / "corpus.parquet"), folder / "store", device="cpu")
        return folder / "store"

    return once(tmp_path_factory, "learnt", make)


def overfit(store: Path, run: Path, layer_types: list[str]) -> Path:
    """Fit a small drafter until it knows much of the store by heart; half a minute."""
    shape = {
        "layer_types": layer_types,
        "intermediate_size": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "block_size": 8,
        "mask_token_id": 3,
        "sliding_window": 32 if "sliding_attention" in layer_types else None,
        "logit_std": 1.0,
    }
    manifest = train_manifest(
        drafter=shape,
        data={"validation": 0.0, "max_tokens": 256, "pack_tokens": 640, "anchors": 24},
        optim={"name": "muon", "lr": 8e-3, "epochs": STEPS, "max_steps": STEPS},
        run={"log_every": 10, "checkpoint_every": STEPS},
    )
    fit(manifest, store, run, device="cpu")
    return run
