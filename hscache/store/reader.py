"""Read samples back: ``hscache.open(path)``, then by number or id.

::

    store = hscache.open("runs/demo/store")
    sample = store[0]                                 # torch tensors, states in bfloat16
    sample.hidden_states.shape                        # [tokens, taps, hidden]
    store.sample(0, start=0, stop=64, taps=[8, 20])   # a token range of two taps

Reading goes through zarr-python. What it would pass over in silence is checked here: a shard's record against its
digest and its files against their recorded sizes when the shard is first touched, and, with ``verify=True``, each
sample's bytes against its digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow.compute as pc
import xxhash
import zarr
from numpy.typing import NDArray

from hscache.errors import InputError, IntegrityError
from hscache.store.index import committed_shards, load_index, read_manifest, read_shard
from hscache.store.layout import ArraySpec, StorePaths, array_specs, scales_name, shard_name
from hscache.store.lossy import decode_bits

if TYPE_CHECKING:
    import torch

Kind = Literal["torch", "numpy", "bits"]


@dataclass(frozen=True)
class TopLogits:
    """The target's distribution for S supervised tokens.

    Attributes:
        positions: int64 [S], the token that row r predicted, counted from the returned range's start; the state that
            predicted it is the one before.
        ids: int32 [S, k], most likely first.
        logprobs: float16 [S, k], log-probabilities under the full softmax (they do not sum to one).
        lse: float32 [S], logsumexp of the full logits: ``logit = logprob + lse``.
    """

    positions: Any
    ids: Any
    logprobs: Any
    lse: Any


@dataclass(frozen=True)
class Sample:
    """One sample, or a token range of it.

    Attributes:
        sample_id: The corpus's id.
        tag: The corpus's tag, if it had any.
        input_ids: int32 [n].
        loss_mask: uint8 [n], 1 where the token is supervised.
        hidden_states: bf16 [n, taps, H]; row t is the output of the tapped blocks at token t.
        final_state: bf16 [n, H] after the final norm, or None.
        logits: Top-k distribution of the supervised tokens in the range, or None.
    """

    sample_id: str
    tag: str | None
    input_ids: Any
    loss_mask: Any
    hidden_states: Any
    final_state: Any | None
    logits: TopLogits | None


class Store:
    """A store opened for reading; samples are numbered in corpus order, rejected ones left out.

    Args:
        path: Store directory.

    Raises:
        InputError: ``not-a-store``.
        FormatError: ``format-version``.
        IntegrityError: ``store-damaged``.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._paths = StorePaths(self.path)
        self.manifest = read_manifest(self.path)
        index = load_index(self.path)
        rows = index.filter(pc.equal(index["status"], "ok"))
        self.sample_ids: list[str] = rows["sample_id"].to_pylist()
        self.tags: list[str | None] = rows["tag"].to_pylist()
        self.digests: list[str] = rows["digest"].to_pylist()
        self._columns = {
            name: rows[name].to_numpy() for name in ("shard", "start", "n_tokens", "loss_start", "n_loss", "corpus_row")
        }
        self._groups: dict[int, zarr.Group] = {}

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, i: int) -> Sample:
        return self.sample(i)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(i) for i in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_groups": {}}

    @cached_property
    def taps(self) -> list[int]:
        """0-based decoder blocks, in the order of the tap axis."""
        return list(self.manifest["manifest"]["states"]["taps"])

    @cached_property
    def specs(self) -> dict[str, ArraySpec]:
        """The arrays of this store."""
        return {spec.name: spec for spec in specs_of(self.manifest)}

    @property
    def n_tokens(self) -> NDArray[np.int64]:
        """int64 [len]: tokens of each sample."""
        return self._columns["n_tokens"]  # type: ignore[no-any-return]

    @property
    def n_loss(self) -> NDArray[np.int64]:
        """int64 [len]: supervised tokens of each sample."""
        return self._columns["n_loss"]  # type: ignore[no-any-return]

    @property
    def complete(self) -> bool:
        """Whether every planned shard is committed."""
        return len(committed_shards(self.path)) == int(self.manifest["plan"]["shards"])

    def index_of(self, sample_id: str) -> int:
        """Return the number of a sample.

        Raises:
            InputError: ``sample-unknown``.
        """
        try:
            return self._by_id[sample_id]
        except KeyError:
            raise InputError(
                "sample-unknown", f"{self.path}: no sample {sample_id!r} (rejected, not built yet, or never there)"
            ) from None

    def sample(
        self,
        i: int,
        *,
        start: int = 0,
        stop: int | None = None,
        taps: Sequence[int] | None = None,
        kind: Kind = "torch",
        verify: bool = False,
    ) -> Sample:
        """Read one sample.

        Args:
            i: Number of the sample, 0-based; negative counts from the end.
            start: First token.
            stop: End of the token range; None for the sample's end.
            taps: Decoder blocks to return, in this order; None for all.
            kind: ``torch`` (states bfloat16), ``numpy`` (states float32), or ``bits`` (states as bf16 bits, uint16).
            verify: Check the sample's bytes against its digest; reads the whole sample.

        Raises:
            InputError: ``sample-unknown``, ``sample-range``, ``array-absent`` (a tap that is not stored).
            IntegrityError: ``store-damaged``, ``sample-digest``.
        """
        if not -len(self) <= i < len(self):
            raise InputError("sample-unknown", f"{self.path}: sample {i}; the store has {len(self)}")
        i %= len(self)
        n = int(self._columns["n_tokens"][i])
        stop = n if stop is None else stop
        if not 0 <= start < stop <= n:
            raise InputError("sample-range", f"tokens {start}:{stop} of sample {i}, which has {n}")
        picks = [self._tap_index(tap) for tap in taps] if taps is not None else None
        if verify:
            self.check_digest(i)
        first = int(self._columns["start"][i])
        rows = slice(first + start, first + stop)
        return Sample(
            sample_id=self.sample_ids[i],
            tag=self.tags[i],
            input_ids=_give(self._read(i, "input_ids", rows), "input_ids", kind),
            loss_mask=_give(self._read(i, "loss_mask", rows), "loss_mask", kind),
            hidden_states=_give(self._states(i, "hidden_states", rows, picks), "hidden_states", kind),
            final_state=_give(self._states(i, "final_state", rows, None), "final_state", kind)
            if "final_state" in self.specs
            else None,
            logits=self._logits(i, start, stop, kind) if "logit_ids" in self.specs else None,
        )

    def check_digest(self, i: int) -> None:
        """Compare all bytes of a sample with the digest taken when it was captured.

        Raises:
            IntegrityError: ``sample-digest``, or ``store-damaged``.
        """
        self.stored(i)

    def stored(self, i: int) -> dict[str, NDArray[Any]]:
        """Return all arrays of a sample as its shard holds them, checked against its digest.

        Raises:
            IntegrityError: ``sample-digest``, or ``store-damaged``.
        """
        digest, arrays = xxhash.xxh3_128(), {}
        for spec in self.specs.values():
            key, count = ("start", "n_tokens") if spec.axis == "tokens" else ("loss_start", "n_loss")
            first = int(self._columns[key][i])
            rows = self._read(i, spec.name, slice(first, first + int(self._columns[count][i])))
            arrays[spec.name] = np.ascontiguousarray(rows)
            digest.update(arrays[spec.name].data.cast("B"))
        if digest.hexdigest() != self.digests[i]:
            shard = shard_name(int(self._columns["shard"][i]))
            raise IntegrityError(
                "sample-digest",
                f"{shard}: sample {self.sample_ids[i]!r} differs from its digest",
                hint=f"hscache verify {self.path} --level full",
            )
        return arrays

    def _logits(self, i: int, start: int, stop: int, kind: Kind) -> TopLogits:
        first = int(self._columns["start"][i])
        mask = self._read(i, "loss_mask", slice(first, first + stop)).copy()
        mask[0] = 0  # nothing precedes token 0
        positions = np.flatnonzero(mask)
        skipped = int(np.searchsorted(positions, start))
        row = int(self._columns["loss_start"][i])
        rows = slice(row + skipped, row + len(positions))
        ids, logprobs, lse = (
            _give(self._read(i, name, rows), name, kind) for name in ("logit_ids", "logit_logprobs", "logit_lse")
        )
        return TopLogits(_give(positions[skipped:] - start, "positions", kind), ids, logprobs, lse)

    @cached_property
    def _by_id(self) -> dict[str, int]:
        return {sample_id: i for i, sample_id in enumerate(self.sample_ids)}

    def _tap_index(self, tap: int) -> int:
        if tap not in self.taps:
            raise InputError("array-absent", f"{self.path}: no tap {tap}; stored are {self.taps}")
        return self.taps.index(tap)

    def _states(self, i: int, name: str, rows: slice, picks: list[int] | None) -> NDArray[np.uint16]:
        """Return rows of a state array as bf16 bits, decoded where the codec is lossy."""
        scheme = self.specs[name].scheme
        parts = [self._read(i, part, rows) for part in (name, *([scales_name(name)] if scheme else []))]
        if picks is not None:
            parts = [part[:, picks] for part in parts]
        return parts[0] if scheme is None else decode_bits(parts[0], parts[1], scheme)

    def _read(self, i: int, name: str, rows: slice) -> NDArray[Any]:
        array = self._group(int(self._columns["shard"][i]))[name]
        try:
            return np.asarray(array[rows])
        except ValueError as error:  # zarr's checksum failure
            where = f"{shard_name(int(self._columns['shard'][i]))}/{name}"
            raise IntegrityError(
                "store-damaged", f"{where}: {error}", hint=f"hscache verify {self.path} --level full"
            ) from error

    def _group(self, shard: int) -> zarr.Group:
        if shard not in self._groups:
            path = self._paths.shard(shard)
            check_files(path, read_shard(path))
            self._groups[shard] = zarr.open_group(str(path), mode="r")
        return self._groups[shard]


def open_store(path: Path | str) -> Store:
    """Open a store for reading; exported as ``hscache.open``."""
    return Store(path)


def specs_of(document: dict[str, Any]) -> list[ArraySpec]:
    """Return the arrays of a store from its ``manifest.json``."""
    manifest = document["manifest"]
    return array_specs(
        n_taps=len(manifest["states"]["taps"]),
        hidden_size=document["target"]["shape"]["hidden_size"],
        final_state=manifest["states"]["final_state"],
        topk=manifest["logits"]["topk"],
        chunk_tokens=manifest["store"]["chunk_tokens"],
        codec=manifest["store"]["codec"],
    )


def decoded(values: dict[str, NDArray[Any]], specs: Iterable[ArraySpec]) -> dict[str, NDArray[Any]]:
    """Return the states of a lossy store's rows.

    Args:
        values: Array name -> rows as stored.
        specs: The arrays of the store.

    Returns:
        ``hidden_states`` and ``final_state`` as bf16 bits, uint16; nothing for a store that is not lossy.
    """
    return {
        spec.name: decode_bits(values[spec.name], values[scales_name(spec.name)], spec.scheme)
        for spec in specs
        if spec.scheme is not None and scales_name(spec.name) in values
    }


def check_files(path: Path, body: dict[str, Any]) -> None:
    """Compare a shard's files with the record: sizes of all, since Zarr reads a missing file as fill value without an
    error, and contents of the arrays' metadata, since a reader believes whatever shape and codec stand there.

    Raises:
        IntegrityError: ``store-damaged``, naming the first file.
    """
    for name, entry in body["files"].items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            found = -1
        if found != entry["bytes"]:
            seen = "missing" if found < 0 else f"{found} bytes"
            raise IntegrityError(
                "store-damaged",
                f"{path.name}/{name}: {seen}, expected {entry['bytes']} bytes",
                hint="hscache verify STORE --level full",
            )
        if name.endswith("zarr.json") and xxhash.xxh3_128_hexdigest((path / name).read_bytes()) != entry["xxh3_128"]:
            raise IntegrityError(
                "store-damaged",
                f"{path.name}/{name}: differs from its digest",
                hint="hscache verify STORE --level full",
            )


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the numbers that bf16 bit patterns stand for: a bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_torch(rows: NDArray[Any], name: str) -> torch.Tensor:
    """Return stored rows as a tensor that shares their memory; state arrays become bfloat16."""
    import torch

    tensor = torch.from_numpy(np.require(rows, requirements=["C", "W"]))
    return tensor.view(torch.bfloat16) if name in ("hidden_states", "final_state") else tensor


def _give(rows: NDArray[Any], name: str, kind: Kind) -> Any:
    if kind == "torch":
        return as_torch(rows, name)
    if kind == "numpy" and name in ("hidden_states", "final_state"):
        return bf16_to_float32(rows)
    return rows
