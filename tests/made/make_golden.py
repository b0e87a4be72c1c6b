"""Make the golden store of a format version: ``python -m tests.made.make_golden``, once, when it is released.

``tests/data/golden-v1`` is never made again: it stands for the stores that users have, and a reader that no longer
gives its recorded values has broken theirs. A new version of the format gets a folder of its own beside it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hscache
from hscache.store.layout import FORMAT_VERSION
from tests.made import stores

GOLDEN = Path(__file__).parents[1] / "data" / f"golden-v{FORMAT_VERSION}"
CODECS = ("raw", "zstd", "int8", "int4")
REJECTED = "s3"
_HIDDEN = 64  # a whole block of the lossy codecs' rotation


def digests(store: Path) -> dict[str, dict[str, str]]:
    """Return sample id -> array -> type, shape and sha256 of its values as read, the states decoded to bf16 bits."""
    out, opened = {}, hscache.open(store)
    for i in range(len(opened)):
        sample = opened.sample(i, kind="bits", verify=True)
        arrays: dict[str, NDArray[np.generic]] = {
            name: getattr(sample, name) for name in ("input_ids", "loss_mask", "hidden_states", "final_state")
        }
        if sample.logits is not None:
            parts = ("positions", "ids", "logprobs", "lse")
            arrays |= {f"logits.{name}": getattr(sample.logits, name) for name in parts}
        out[sample.sample_id] = {
            name: f"{array.dtype} {list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"
            for name, array in arrays.items()
        }
    return out


def main() -> None:
    if GOLDEN.exists():
        sys.exit(f"{GOLDEN} exists, and a golden store is never made again")
    GOLDEN.mkdir()
    stores.HIDDEN = _HIDDEN
    for codec in CODECS:
        # one store of two shards, one without logits; one sample rejected by the plan, one by capture
        manifest = stores.little_manifest(
            store={"codec": codec, "shard_bytes": 8_000 if codec == "raw" else 100_000},
            logits={"topk": 0 if codec == "int4" else stores.TOPK},
        )
        stores.make_store(GOLDEN / codec, stores.corpus_rows((5, 9, 1, 4, 7)), manifest=manifest, reject=[REJECTED])
        (GOLDEN / codec / "staging").rmdir()
    recorded = {codec: digests(GOLDEN / codec) for codec in CODECS}
    (GOLDEN / "digests.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
