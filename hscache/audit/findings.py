"""What ``verify`` can find, and its report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

FINDINGS: dict[str, str] = {
    "plan-damaged": "plan.parquet is unreadable or not the plan of the manifest",
    "shard-missing": "a planned shard does not exist",
    "shard-extra": "a shard is not in the plan",
    "shard-record": "a shard's zarr.json is unreadable or differs from its digest",
    "shard-foreign": "a shard was built for another manifest",
    "shard-samples": "a shard's sample table differs from the plan",
    "file-missing": "a file of a shard does not exist",
    "file-size": "a file of a shard has another size than recorded",
    "file-extra": "no record names a file or folder",
    "file-content": "a file of a shard differs from its digest",
    "array-unreadable": "an array cannot be read, or zarr-python reads other values than our reader",
    "sample-digest": "a sample's bytes differ from its digest",
    "sample-ids": "a token id is outside the vocabulary",
    "sample-mask": "a loss mask has values other than 0 and 1, or another count than recorded",
    "sample-states": "a sample fails the health battery",
    "statistics-record": "a shard's statistics differ from its record",
    "statistics-outlier": "a shard's states are of another magnitude than the store's",
    "index-stale": "index.parquet is missing, unreadable or differs from the shards",
    "kernels-mixed": "shards were computed by different kernel paths without --accept-path",
    "target-damaged": "a file of target/ is missing or altered",
    "head-mismatch": "lm_head(final state) does not give the stored top-k",
    "codec-error": "a shard's record lacks the error of its lossy codec, or it is beyond what the codec promises",
    "recompute-differs": "the target gives other states for a sample than are stored (--recompute)",
    "kernels-differ": "two kernel paths give different states (--kernels)",
    "stores-differ": "two stores hold different states for the same samples (--against)",
}
"""What ``verify`` can find: code -> meaning."""


@dataclass(frozen=True)
class Finding:
    """One fault of a store.

    Attributes:
        code: Key of :data:`FINDINGS`.
        where: Shard, file or sample.
        detail: What was found and what was expected.
        shard: Shard to rebuild, or None when the fault is not in a shard.
    """

    code: str
    where: str
    detail: str
    shard: int | None = None


@dataclass
class VerifyReport:
    """What was checked and what was found.

    Attributes:
        store: Store directory.
        level: ``quick`` or ``full``.
        findings: In the order of discovery; empty for a good store.
        shards: Planned shards.
        part: First shard that was checked and the one after the last; None for the whole store. With a part, ``ok``
            says nothing of the other shards.
        recorded: Shards of which a record says that they passed before, so that their bytes were not read again.
        samples: Samples checked.
        tokens: Their tokens.
        rejected: Samples recorded as rejected.
        head_rows: Rows of the self-check.
        head_error_nats: Mean absolute difference of log-probabilities in the self-check, or None where it cannot run.
    """

    store: str
    level: str
    findings: list[Finding] = field(default_factory=list)
    shards: int = 0
    part: tuple[int, int] | None = None
    recorded: int = 0
    samples: int = 0
    tokens: int = 0
    rejected: int = 0
    head_rows: int = 0
    head_error_nats: float | None = None

    @property
    def ok(self) -> bool:
        """Whether there are no findings."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON."""
        return {"ok": self.ok, **asdict(self)}
