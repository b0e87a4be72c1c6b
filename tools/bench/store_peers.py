"""How others keep the same samples, each read the way its owner reads it; for ``bench_store.py``.

Every class writes samples into a folder and has ``read(i, start, stop)``, which returns once all bytes of the range are
in this process's memory: anonymous memory, not pages of a mapped file.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle_env
import torch
import zarr
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from hscache.store.buffers import page_aligned

Arrays = dict[str, NDArray[Any]]


def as_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Return a sample's arrays as tensors that share their memory, states as bfloat16."""
    states = ("hidden_states", "final_state")
    tensors = {name: torch.from_numpy(np.require(array, requirements=["W"])) for name, array in arrays.items()}
    return {name: t.view(torch.bfloat16) if name in states else t for name, t in tensors.items()}


class Flat:
    """The bound: all bytes of a sample in one file, into the same memory again and again, one call per array.

    Args:
        folder: Gets the files.
        samples: What is written.
        room: Array name -> memory to read into; None for memory of its own.
    """

    def __init__(self, folder: Path, samples: Sequence[Arrays], room: Mapping[str, NDArray[Any]] | None = None) -> None:
        self.paths, self._fds, self._layouts = [], [], []
        longest = max(len(arrays["input_ids"]) for arrays in samples)
        self._room = {}
        for name, array in samples[0].items():
            # the bound is entitled to good memory too
            memory = page_aligned((longest, *array.shape[1:]), array.dtype) if room is None else room[name]
            memory.fill(0)
            self._room[name] = memoryview(memory).cast("B")
        for i, arrays in enumerate(samples):
            path, layout, at = folder / f"{i}.bin", {}, 0
            with open(path, "wb") as file:
                for name, array in arrays.items():
                    layout[name] = (at, array.nbytes // len(array))
                    at += file.write(array.data.cast("B"))
                os.fsync(file.fileno())
            self.paths.append(path)
            self._layouts.append(layout)
            self._fds.append(os.open(path, os.O_RDONLY))

    def read(self, i: int, start: int, stop: int) -> int:
        """Read a range; return its bytes."""
        total = 0
        for name, (at, row_bytes) in self._layouts[i].items():
            n_bytes = (stop - start) * row_bytes
            got = os.preadv(self._fds[i], [self._room[name][:n_bytes]], at + start * row_bytes)
            assert got == n_bytes
            total += got
        return total


class SafetensorsSlice:
    """One safetensors file per sample, as speculators writes it; a range is a slice of each tensor."""

    def __init__(self, folder: Path, samples: Sequence[Arrays], *, keep_open: bool = False) -> None:
        self.paths = [folder / f"{i}.safetensors" for i in range(len(samples))]
        for path, arrays in zip(self.paths, samples, strict=True):
            if not path.exists():
                save_file(as_tensors(arrays), path)
                _sync(path)
        self._open = {i: safe_open(str(path), "pt") for i, path in enumerate(self.paths)} if keep_open else {}

    def read(self, i: int, start: int, stop: int) -> object:
        """Read a range."""
        file = self._open.get(i) or safe_open(str(self.paths[i]), "pt")
        # a slice is a view of the mapped file since 0.8
        return {name: file.get_slice(name)[start:stop].clone() for name in file.keys()}  # noqa: SIM118


class TorchFile:
    """One ``torch.save`` file per sample, as SpecForge and Model-Optimizer write it."""

    def __init__(self, folder: Path, samples: Sequence[Arrays], *, mmap: bool = False) -> None:
        self._mmap = mmap
        self.paths = [folder / f"{i}.pt" for i in range(len(samples))]
        for path, arrays in zip(self.paths, samples, strict=True):
            if not path.exists():
                torch.save(as_tensors(arrays), path)
                _sync(path)

    def read(self, i: int, start: int, stop: int) -> object:
        """Read a range."""
        loaded = torch.load(self.paths[i], weights_only=True, mmap=self._mmap)
        ranges = {name: tensor[start:stop] for name, tensor in loaded.items()}
        return {name: tensor.clone() for name, tensor in ranges.items()} if self._mmap else ranges


class GzipFile:
    """One gzipped ``torch.save`` file per sample, as SpecForge writes it with compression on."""

    def __init__(self, folder: Path, samples: Sequence[Arrays]) -> None:
        self.paths = [folder / f"{i}.ckpt.gz" for i in range(len(samples))]
        for path, arrays in zip(self.paths, samples, strict=True):
            with gzip.open(path, "wb", compresslevel=6) as file:
                torch.save(as_tensors(arrays), file)

    def read(self, i: int, start: int, stop: int) -> object:
        """Read a range."""
        with gzip.open(self.paths[i], "rb") as file:
            loaded = torch.load(file, weights_only=True)
        return {name: tensor[start:stop] for name, tensor in loaded.items()}


class FileDataset(torch.utils.data.Dataset[Any]):
    """What a DataLoader's workers read."""

    def __init__(self, paths: list[Path], order: list[int]) -> None:
        self._paths, self._order = paths, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, at: int) -> Any:
        return torch.load(self._paths[self._order[at]], weights_only=True)


class Zarr:
    """zarr-python on our own shard."""

    def __init__(self, shard: Path, starts: Sequence[int]) -> None:
        group = zarr.open_group(str(shard), mode="r")
        self._arrays, self._starts = [group[name] for name in group.array_keys()], starts

    def read(self, i: int, start: int, stop: int) -> object:
        """Read a range."""
        return [np.asarray(array[self._starts[i] + start : self._starts[i] + stop]) for array in self._arrays]


class TensorStore:
    """tensorstore on our own shard.

    Raises:
        ImportError: It is not installed.
    """

    def __init__(self, shard: Path, starts: Sequence[int]) -> None:
        oracle_env.import_oracles()
        import tensorstore

        self._starts = starts
        self._arrays = [
            tensorstore.open(
                {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path.parent) + "/"}}, read=True
            ).result()
            for path in sorted(shard.glob("*/zarr.json"))
        ]

    def read(self, i: int, start: int, stop: int) -> object:
        """Read a range."""
        rows = slice(self._starts[i] + start, self._starts[i] + stop)
        return [future.result() for future in [array[rows].read() for array in self._arrays]]


def write_zarr(folder: Path, joined: Arrays, chunk_tokens: int) -> None:
    """Write the same shard with zarr-python, one call per array, checksummed, and sync its files."""
    group = zarr.open_group(str(folder), mode="w")
    for name, rows in joined.items():
        chunk = chunk_tokens if rows.dtype == np.uint16 else 4096
        outer = -(-len(rows) // chunk) * chunk
        array = group.create_array(
            name,
            shape=rows.shape,
            dtype=rows.dtype,
            chunks=(chunk, *rows.shape[1:]),
            shards=(outer, *rows.shape[1:]),
            compressors=[zarr.codecs.Crc32cCodec()],
            filters=None,
        )
        array[:] = rows
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)


def write_flat(path: Path, samples: Sequence[Arrays]) -> None:
    """Write the same bytes to one file and sync it: what no durable writer can avoid."""
    with open(path, "wb", buffering=0) as file:
        for arrays in samples:
            for array in arrays.values():
                data = array.data.cast("B")
                while data:
                    data = data[file.write(data) :]
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
