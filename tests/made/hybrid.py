"""The trained tiny hybrid with all that the main job makes of it: prompts, greedy completions, a store, a drafter."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

TAPS = [1, 2, 4, 5, 6]
NEW_TOKENS, STEPS = 40, 8
PROMPTS = {
    "add": "def add(a, b):\n",
    "size": "import os\n\ndef size(path):\n",
    "queue": "class Queue:\n    def __init__(self):\n",
    "lines": "def read_lines(path):\n    with open(path) as file:\n",
    "point": "class Point:\n    def __repr__(self):\n",
    "main": "def main(argv=None):\n    parser = argparse.ArgumentParser()\n",
}
DRAFTER = {
    "layer_types": ["sliding_attention", "full_attention"],
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "block_size": 6,
    "mask_token_id": 1,
    "sliding_window": 16,
    "logit_std": 0,
}


@dataclass(frozen=True)
class Hybrid:
    """Where things lie.

    Attributes:
        target: Checkpoint of the target.
        prompts: JSONL.
        store: Made of the target's own greedy completions in float32, at most :data:`NEW_TOKENS` each.
        run: A drafter of that store after a few steps: some of its drafts are accepted, some are not.
    """

    target: Path
    prompts: Path
    store: Path
    run: Path


def make_hybrid(folder: Path, target: Path) -> Hybrid:
    """Make all of it; some ten seconds, most of which transformers takes to be imported."""
    from hscache.build.run import build
    from hscache.corpus.generate import Sampling, generate_corpus
    from hscache.manifest import parse_manifest

    made = Hybrid(target, folder / "prompts.jsonl", folder / "store", folder / "run")
    rows = [{"id": name, "prompt": text, "tag": text.split()[0]} for name, text in PROMPTS.items()]
    made.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    corpus = folder / "corpus.parquet"
    with patch.object(os, "fsync", lambda fd: None):
        generate_corpus([made.prompts], target, corpus, Sampling(NEW_TOKENS), dtype="float32", device="cpu")
        building = {
            "target": {"path": str(target), "dtype": "float32"},
            "states": {"taps": TAPS},
            "corpus": {"path": str(corpus)},
        }
        build(parse_manifest(building, "hybrid"), made.store, device="cpu")
    fit_hybrid(made.store, made.run)
    return made


def fit_hybrid(store: Path, run: Path, **shape: object) -> None:
    """Train a drafter of :data:`DRAFTER`'s shape, or with other values in it, for a few steps."""
    from hstrain.train.fit import fit

    from tests.made.trainers import train_manifest

    training = train_manifest(
        drafter={**DRAFTER, **shape},
        data={"validation": 0.0, "max_tokens": 256, "pack_tokens": 512, "anchors": 16},
        optim={"name": "muon", "lr": 2e-2, "epochs": STEPS, "max_steps": STEPS},
        run={"log_every": STEPS, "checkpoint_every": STEPS},
    )
    with patch.object(os, "fsync", lambda fd: None):
        fit(training, store, run, device="cpu")


def make_scored(folder: Path, target: Path, completions: Path, steps: int = 40) -> tuple[Path, Path]:
    """Make a store of the ends of the target's own completions, and a drafter with some of them held out.

    Args:
        folder: Gets all of it.
        target: Checkpoint of the target.
        completions: What it wrote.
        steps: Of training: enough that wrong states can be told from right ones by the drafter's acceptance.

    Returns:
        Store and run.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    from hstrain.train.fit import fit

    from hscache.build.run import build
    from hscache.manifest import parse_manifest
    from tests.made.trainers import train_manifest

    corpus, store, run = folder / "corpus.parquet", folder / "store", folder / "run"
    rows = pq.read_table(completions).to_pylist()
    for row in rows:
        row["input_ids"], row["loss_mask"] = row["input_ids"][-80:], [0] * 30 + [1] * 50
    pq.write_table(pa.Table.from_pylist(rows), corpus)
    building = {
        "target": {"path": str(target), "dtype": "float32"},
        "states": {"taps": TAPS},
        "corpus": {"path": str(corpus)},
    }
    training = train_manifest(
        drafter=DRAFTER,
        data={"validation": 0.15, "max_tokens": 256, "pack_tokens": 512, "anchors": 16},
        loss={"kind": "kl-topk"},
        optim={"name": "muon", "lr": 2e-2, "epochs": steps, "max_steps": steps},
        run={"log_every": steps, "checkpoint_every": steps},
    )
    with patch.object(os, "fsync", lambda fd: None):
        build(parse_manifest(building, "scored"), store, device="cpu")
        fit(training, store, run, device="cpu")
    return store, run
