"""Read samples back: ``hscache.open(path)``, then by number or id.

::

    store = hscache.open("runs/demo/store")
    sample = store[0]                                 # torch tensors, states in bfloat16
    sample.hidden_states.shape                        # [tokens, taps, hidden]
    store.sample(0, start=0, stop=64, taps=[8, 20])   # a token range of two taps

    memory = store.buffers()                          # once; a fresh 50 MB per sample costs more than the reading
    sample = store.sample(0, out=memory)              # views of that memory, until the next one is read into it

Rows come straight from the shard files (:mod:`hscache.store.direct`); a few threads of this process decode packed
chunks, and zarr-python reads the arrays of any other layout. Damage that Zarr readers ignore silently is an error here.
When a shard is first touched, its record is checked against its digest, its files against their recorded sizes, and its
samples against the index. Every chunk read is checked against its checksum unless ``crc=False``, and with
``verify=True`` the sample's bytes are checked against the digest taken at capture.

Any number of threads may read a store, and it may be sent to other processes. Its memory does not grow with the number
of shards, because a bounded number of files is open at a time.
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
from numpy.typing import NDArray

from hscache.errors import InputError, IntegrityError
from hscache.manifest import LOSSY
from hscache.rows import count_supervised, supervised_positions
from hscache.store.buffers import Buffers
from hscache.store.index import committed_shards, load_index, read_manifest
from hscache.store.layout import (
    FINAL_STATE,
    HIDDEN_STATES,
    INPUT_IDS,
    LOGIT_IDS,
    LOGIT_LOGPROBS,
    LOGIT_LSE,
    LOSS_MASK,
    STATE_ARRAYS,
    ArraySpec,
    StorePaths,
    array_specs,
    damaged,
    scales_name,
    shard_name,
)
from hscache.store.lossy import decode_bits
from hscache.store.shard_reader import ShardReader

if TYPE_CHECKING:
    import torch

Kind = Literal["torch", "numpy", "bits"]


@dataclass(frozen=True)
class TopLogits:
    """The target's distribution for S supervised tokens.

    Attributes:
        positions: int64 [S], position of the token that row r predicted, counted from the returned range's start; the
            state that predicted it is at the position before.
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
        decode_threads: Threads that unpack the packed chunks of a read; None for the machine's cores, at most 4.

    Raises:
        InputError: ``not-a-store``.
        FormatError: ``format-version``.
        IntegrityError: ``store-damaged``.
    """

    def __init__(self, path: Path | str, *, decode_threads: int | None = None) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        index = load_index(self.path)
        rows = index.filter(pc.equal(index["status"], "ok"))
        self.sample_ids: list[str] = rows["sample_id"].to_pylist()
        self.tags: list[str | None] = rows["tag"].to_pylist()
        self.digests: list[str] = rows["digest"].to_pylist()
        self._columns = {
            name: rows[name].to_numpy() for name in ("shard", "start", "n_tokens", "loss_start", "n_loss", "corpus_row")
        }
        self._shards = ShardReader(
            self.path, self.specs.values(), self.manifest["digest"], self._columns, decode_threads=decode_threads
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __getitem__(self, i: int) -> Sample:
        return self.sample(i)

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(i) for i in range(len(self)))

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
        return set(committed_shards(self.path)) >= set(range(int(self.manifest["plan"]["shards"])))

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

    def buffers(self, n_tokens: int | None = None, *, taps: int | None = None, pinned: bool = False) -> Buffers:
        """Return memory to read samples into.

        Args:
            n_tokens: Longest range; None for the longest sample.
            taps: Taps that will be asked for; None for all.
            pinned: Page-lock the memory; needs CUDA.
        """
        longest = int(self.n_tokens.max(initial=0)) if n_tokens is None else n_tokens
        return Buffers(self.specs.values(), longest, n_taps=taps, pinned=pinned)

    def sample(
        self,
        i: int,
        *,
        start: int = 0,
        stop: int | None = None,
        taps: Sequence[int] | None = None,
        kind: Kind = "torch",
        verify: bool = False,
        crc: bool = True,
        out: Buffers | None = None,
    ) -> Sample:
        """Read one sample.

        Args:
            i: Number of the sample, 0-based; negative counts from the end.
            start: First token.
            stop: End of the token range; None for the sample's end.
            taps: Decoder blocks to return, in this order; None for all.
            kind: ``torch`` (states bfloat16), ``numpy`` (states float32), or ``bits`` (states as bf16 bits, uint16).
            verify: Check the sample's bytes against its digest; reads the whole sample.
            crc: Compare all chunks touched with their checksums; costs about a third of the reading.
            out: Memory to read into, from :meth:`buffers`; the returned arrays are views of it, except those that are
                converted: float32 states of kind ``numpy`` and states decoded from a lossy codec. None for fresh
                memory, which costs more time than the reading.

        Raises:
            InputError: ``sample-unknown``, ``sample-range``, ``array-absent`` (a tap that is not stored).
            IntegrityError: ``store-damaged``, ``sample-digest``.
            ValueError: ``out`` is too small, or made for another number of taps.
        """
        i, stop = self._resolve(i, start, stop)
        picks = [self._tap_index(tap) for tap in taps] if taps is not None else None
        if out is not None:
            out.check(stop - start, len(self.taps if picks is None else picks))
        whole = picks is None and stop - start == self.n_tokens[i]
        if verify and not whole:
            self.check_digest(i)
        rows = self._token_rows(i, start, stop)
        shard, rooms = int(self._columns["shard"][i]), {} if out is None else out.arrays
        arrays = {
            name: self._shards.read(
                shard, name, rows, room=rooms.get(name), columns=picks if spec.by_tap else None, crc=crc
            )
            for name, spec in self.specs.items()
            if spec.axis == "tokens"
        }
        positions = None
        if LOGIT_IDS in self.specs:
            positions, rows = self._supervised(i, start, stop, arrays[LOSS_MASK], crc=crc)
            arrays |= {
                spec.name: self._read(i, spec.name, rows, out, crc=crc)
                for spec in self.specs.values()
                if spec.axis == "loss"
            }
        if verify and whole:
            self._compare_digest(i, arrays)
        if self._lossy:
            arrays |= decoded(arrays, self.specs.values())
        return _give_sample(self.sample_ids[i], self.tags[i], arrays, positions, kind)

    def loss_mask(self, i: int) -> NDArray[np.uint8]:
        """Return the loss mask of a sample, uint8 [n], without reading its states.

        Raises:
            InputError: ``sample-unknown``.
            IntegrityError: ``store-damaged``.
        """
        return self._whole(i, LOSS_MASK)

    def input_ids(self, i: int) -> NDArray[np.int32]:
        """Return the token ids of a sample, int32 [n], without reading its states.

        Raises:
            InputError: ``sample-unknown``.
            IntegrityError: ``store-damaged``.
        """
        return self._whole(i, INPUT_IDS)

    def _whole(self, i: int, name: str) -> NDArray[Any]:
        i, stop = self._resolve(i, 0, None)
        return self._read(i, name, self._token_rows(i, 0, stop))

    def check_digest(self, i: int) -> None:
        """Compare all bytes of a sample with the digest taken when it was captured.

        Raises:
            IntegrityError: ``sample-digest``, or ``store-damaged``.
        """
        self.stored(i)

    def stored(self, i: int) -> dict[str, NDArray[Any]]:
        """Return all arrays of a sample as stored in its shard, checked against its digest.

        Raises:
            IntegrityError: ``sample-digest``, or ``store-damaged``.
        """
        loss = int(self._columns["loss_start"][i])
        rows = {
            "tokens": self._token_rows(i, 0, int(self.n_tokens[i])),
            "loss": slice(loss, loss + int(self.n_loss[i])),
        }
        arrays = {name: self._read(i, name, rows[spec.axis]) for name, spec in self.specs.items()}
        self._compare_digest(i, arrays)
        return arrays

    def close(self) -> None:
        """Close files and threads; the next read opens them again."""
        self._shards.close()

    def _compare_digest(self, i: int, arrays: dict[str, NDArray[Any]]) -> None:
        digest = xxhash.xxh3_128()
        for name in self.specs:
            digest.update(arrays[name].data.cast("B") if arrays[name].size else b"")
        if digest.hexdigest() != self.digests[i]:
            shard = shard_name(int(self._columns["shard"][i]))
            raise IntegrityError(
                "sample-digest",
                f"{shard}: sample {self.sample_ids[i]!r} differs from its digest",
                hint=f"hscache verify {self.path} --level full",
            )

    def _resolve(self, i: int, start: int, stop: int | None) -> tuple[int, int]:
        if not -len(self) <= i < len(self):
            raise InputError("sample-unknown", f"{self.path}: sample {i}; the store has {len(self)}")
        i %= len(self)
        n = int(self.n_tokens[i])
        stop = n if stop is None else stop
        if not 0 <= start < stop <= n:
            raise InputError("sample-range", f"tokens {start}:{stop} of sample {i}, which has {n}")
        return i, stop

    def _token_rows(self, i: int, start: int, stop: int) -> slice:
        first = int(self._columns["start"][i])
        return slice(first + start, first + stop)

    def _supervised(
        self, i: int, start: int, stop: int, mask: NDArray[np.uint8], *, crc: bool
    ) -> tuple[NDArray[np.int64], slice]:
        """Return the supervised tokens of a range, counted from its start, and their rows in the logit arrays."""
        skipped, first = 0, int(self._columns["loss_start"][i])
        if start == 0:
            positions = supervised_positions(mask)
        else:
            positions = np.flatnonzero(mask)
            before = self._read(i, LOSS_MASK, self._token_rows(i, 0, start), crc=crc)
            skipped = count_supervised(before)
        marked, recorded = skipped + len(positions), int(self.n_loss[i])
        if marked > recorded or (stop - start == self.n_tokens[i] and marked < recorded):
            path = StorePaths(self.path).shard(int(self._columns["shard"][i])) / LOSS_MASK
            what = f"marks {marked} tokens of sample {self.sample_ids[i]!r}, but {recorded} are recorded"
            raise damaged(path, what)
        return positions, slice(first + skipped, first + skipped + len(positions))

    @cached_property
    def _lossy(self) -> bool:
        return any(spec.scheme is not None for spec in self.specs.values())

    @cached_property
    def _by_id(self) -> dict[str, int]:
        return {sample_id: i for i, sample_id in enumerate(self.sample_ids)}

    def _tap_index(self, tap: int) -> int:
        if tap not in self.taps:
            raise InputError("array-absent", f"{self.path}: no tap {tap}; stored are {self.taps}")
        return self.taps.index(tap)

    def _read(
        self,
        i: int,
        name: str,
        rows: slice,
        out: Buffers | None = None,
        columns: Sequence[int] | None = None,
        *,
        crc: bool = True,
    ) -> NDArray[Any]:
        room = None if out is None else out.arrays[name]
        return self._shards.read(int(self._columns["shard"][i]), name, rows, room=room, columns=columns, crc=crc)


def open_store(path: Path | str, *, decode_threads: int | None = None) -> Store:
    """Open a store for reading; exported as ``hscache.open``. The arguments are those of :class:`Store`."""
    return Store(path, decode_threads=decode_threads)


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


def codecs_of(document: dict[str, Any]) -> list[str]:
    """Return the codecs that a store's states went through, the store's own first, from its ``manifest.json``."""
    made = [document["manifest"]["store"]["codec"]]
    before = document.get("converted")
    while before:
        made.append(before["codec"])
        before = before["converted"]
    return made


def coarsest_codec(document: dict[str, Any]) -> str:
    """Return the codec whose error a store's states carry, whatever its codec is now: ``int4``, ``int8`` or ``raw``."""
    made = codecs_of(document)
    return next((codec for codec in reversed(LOSSY) if codec in made), "raw")


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


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bf16 bit patterns as float32 numbers: a bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_torch(rows: NDArray[Any], name: str) -> torch.Tensor:
    """Return stored rows as a tensor that shares their memory; state arrays become bfloat16."""
    import torch

    if not (rows.flags.c_contiguous and rows.flags.writeable):
        rows = np.require(rows, requirements=["C", "W"])
    tensor = torch.from_numpy(rows)
    return tensor.view(torch.bfloat16) if name in STATE_ARRAYS else tensor


def _give(rows: NDArray[Any], name: str, kind: Kind) -> Any:
    if kind == "torch":
        return as_torch(rows, name)
    if kind == "numpy" and name in STATE_ARRAYS:
        return bf16_to_float32(rows)
    return rows


def _give_sample(
    sample_id: str,
    tag: str | None,
    arrays: dict[str, NDArray[Any]],
    positions: NDArray[np.int64] | None,
    kind: Kind,
) -> Sample:
    given = {name: _give(rows, name, kind) for name, rows in arrays.items()}
    logits = None
    if positions is not None:
        logits = TopLogits(
            _give(positions, "positions", kind), given[LOGIT_IDS], given[LOGIT_LOGPROBS], given[LOGIT_LSE]
        )
    return Sample(
        sample_id=sample_id,
        tag=tag,
        input_ids=given[INPUT_IDS],
        loss_mask=given[LOSS_MASK],
        hidden_states=given[HIDDEN_STATES],
        final_state=given.get(FINAL_STATE),
        logits=logits,
    )
