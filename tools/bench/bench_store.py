"""How fast are samples read and written, against the disk cache's own speed and against what others do?

One process makes the same samples in every form, reads them in random order, so that neither a machine that drifts nor
what the one before left behind favours anybody, and prints medians of paired ratios: the time of each reader over that
of plain ``preadv`` of a flat file into used memory, for the same sample and range, in the same turn. Every reader gives
all arrays of the sample, in memory of this process, not as pages of a mapped file.

    python tools/bench/bench_store.py [--store STORE] [--repeats 9] [--json FILE] [--scratch FOLDER]

``--store`` gives the states: compression depends on them, and random numbers are no states. About 2.5 GB of scratch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from store_peers import (
    Arrays,
    FileDataset,
    Flat,
    GzipFile,
    SafetensorsSlice,
    TensorStore,
    TorchFile,
    Zarr,
    write_flat,
    write_zarr,
)
from synthetic_store import make_samples, random_states, real_states, repeat_store, write_store

import hscache
from hscache.store import crc
from hscache.store.buffers import Buffers
from hscache.store.codecs import Codec
from hscache.store.layout import StorePaths, array_specs
from hscache.store.reader import Store
from hscache.store.ring import ReadAhead
from hscache.store.shard_writer import ShardWriter

TAPS, HIDDEN, LENGTHS, CHUNK = 5, 5120, (1024, 1536, 1024), 64
RANGE, PREFIX = (333, 589), (0, 512)
# The demo's: samples of 1.4 MB, where what a read costs beside its bytes shows.
SHORT_HIDDEN, SHORT_LENGTHS = 576, (200, 180, 220, 150, 260, 201) * 2
Read = Callable[[int, int, int], object]


def measure(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - started
    del result  # giving memory back belongs to the next one's costs, not to this one's
    return seconds


def ours(store: Store, *, crc: bool, memory: Buffers | None = None) -> Read:
    return lambda i, start, stop: store.sample(i, start=start, stop=stop, crc=crc, out=memory)


def used_memory(store: Store) -> Buffers:
    memory = store.buffers()
    for array in memory.arrays.values():
        array.fill(0)
    return memory


def paired(
    readers: dict[str, Read],
    span: tuple[int, int] | None,
    repeats: int,
    drop: Callable[[], None] | None = None,
    *,
    renew: Callable[[], None] | None = None,
    lengths: Sequence[int] = LENGTHS,
) -> Any:
    """Return name -> (seconds, of them processor time of all threads) per (repeat, sample).

    Args:
        readers: What is compared.
        span: Token range; None for whole samples.
        repeats: Turns.
        drop: Empties the disk cache before each reading.
        renew: Empties it before each turn, after which each reader fills it again, untimed. Where the kernel happened
            to cache a file decides up to a fifth of the speed of reading it; so each turn throws these dice anew.
        lengths: Tokens of each sample.
    """
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    rng, sweep = np.random.default_rng(0), np.zeros(64 << 20, np.uint8)
    for repeat in range(repeats + 1):
        if renew is not None:
            renew()
            for read in readers.values():
                for i, n in enumerate(lengths):
                    read(i, *(span or (0, n)))
        for i, n in enumerate(lengths):
            start, stop = span or (0, n)
            for name in rng.permutation(list(readers)).tolist():
                sweep += 1  # warm is the disk cache, not what the one before left in the processor's
                if drop is not None:
                    drop()
                began = time.process_time()
                took = measure(partial(readers[name], i, start, stop))
                if repeat:  # the first turn opens files and fills the cache
                    seconds[name].append((took, time.process_time() - began))
    return seconds


def ratios(
    seconds: dict[str, list[tuple[float, float]]],
    span: tuple[int, int] | None,
    hidden: int = HIDDEN,
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, dict[str, float]]:
    row_bytes = (TAPS + 1) * hidden * 2 + 5
    sizes = [((span[1] - span[0]) if span else n) * row_bytes for n in lengths]
    return {
        name: {
            "ratio": statistics.median(a / b for (a, _), (b, _) in zip(took, seconds["flat preadv"], strict=True)),
            # where others use the processor, too, waiting for it is no part of this one
            "cpu_ratio": statistics.median(a / b for (_, a), (_, b) in zip(took, seconds["flat preadv"], strict=True)),
            "gb_per_s": statistics.median(sizes[k % len(sizes)] / t / 1e9 for k, (t, _) in enumerate(took)),
        }
        for name, took in seconds.items()
    }


def cold_dropper(paths: Sequence[Path]) -> Callable[[], None] | None:
    """Return what empties the disk cache of these files, or None where the system does not obey."""
    fds = [os.open(path, os.O_RDONLY) for path in paths]

    def drop() -> None:
        for fd in fds:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    drop()
    try:
        os.preadv(fds[0], [bytearray(4096)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return drop
    except OSError:
        pass
    return None


def bench_readers(scratch: Path, samples: list[Arrays], repeats: int) -> dict[str, Any]:
    folders = {name: scratch / name for name in ("flat", "safetensors", "torch", "gzip")}
    for folder in folders.values():
        folder.mkdir()
    store = hscache.open(scratch / "raw")
    shard, starts = StorePaths(store.path).shard(0), store._columns["start"].tolist()
    memory = used_memory(store)  # shared with the bound: where memory lies decides speed, too
    flat, torch_file = Flat(folders["flat"], samples, memory.arrays), TorchFile(folders["torch"], samples)
    safetensors = SafetensorsSlice(folders["safetensors"], samples)
    readers: dict[str, Read] = {
        "flat preadv": flat.read,
        "hscache": ours(store, crc=False, memory=memory),
        "hscache, crc": ours(store, crc=True, memory=memory),
        "hscache, crc, fresh memory": ours(store, crc=True),
        "safetensors slice": safetensors.read,
        "safetensors slice, kept open": SafetensorsSlice(folders["safetensors"], samples, keep_open=True).read,
        "torch.load": torch_file.read,
        "torch.load(mmap=True)": TorchFile(folders["torch"], samples, mmap=True).read,
        "zarr-python": Zarr(shard, starts).read,
    }
    notes = []
    try:
        readers["tensorstore"] = TensorStore(shard, starts).read
    except ImportError:
        notes.append("tensorstore: not installed, skipped; python tools/bench/oracle_env.py")
    result: dict[str, Any] = {"notes": notes}
    drop = cold_dropper([*flat.paths, *safetensors.paths, *torch_file.paths, *shard.glob("*/c.*")])
    if drop is None:
        notes.append(
            "this file system keeps its cache: no cold readings, and the files lie where they lay all the time"
        )
    for case, span in (("full", None), ("range256", RANGE), ("prefix512", PREFIX)):
        result[case] = ratios(paired(readers, span, repeats, renew=drop), span)
    result["one tap"] = bench_one_tap(store, flat, repeats)
    result["verify"] = ratios(
        paired(
            {"flat preadv": flat.read, "hscache, crc and digest": lambda i, a, b: verified(store, i)},
            None,
            repeats,
            renew=drop,
        ),
        None,
    )
    if drop is not None:
        names = ("flat preadv", "hscache", "hscache, crc", "safetensors slice", "torch.load", "zarr-python")
        result["cold full"] = ratios(
            paired({name: readers[name] for name in names}, None, max(1, repeats // 3), drop), None
        )
    result["epoch"] = bench_epochs(store, torch_file, max(2, repeats // 2))
    started = time.perf_counter()
    zipped = GzipFile(folders["gzip"], samples[:1])
    pack = time.perf_counter() - started
    pairs = [
        (measure(lambda: zipped.read(0, 0, LENGTHS[0])), measure(lambda: flat.read(0, 0, LENGTHS[0]))) for _ in "12"
    ]
    size = sum(array.nbytes for array in samples[0].values())
    result["gzip"] = {
        "ratio": statistics.median(a / b for a, b in pairs),
        "gb_per_s": size / pairs[0][0] / 1e9,
        "encode_mb_per_s": size / pack / 1e6,
        "times_smaller": size / zipped.paths[0].stat().st_size,
    }
    return result


_MEMORY: dict[str, Any] = {}


def verified(store: Store, i: int) -> object:
    memory = _MEMORY.setdefault("verify", store.buffers())
    return store.sample(i, verify=True, out=memory)


def bench_one_tap(store: Store, flat: Flat, repeats: int) -> dict[str, dict[str, float]]:
    """One tap of five, without and with checksums; flat reads all of the sample."""
    memory = store.buffers(taps=1)
    readers: dict[str, Read] = {
        "flat preadv": flat.read,
        "hscache": lambda i, a, b: store.sample(i, taps=[2], crc=False, out=memory),
        "hscache, crc": lambda i, a, b: store.sample(i, taps=[2], out=memory),
    }
    return ratios(paired(readers, None, repeats), None)


def bench_short(scratch: Path, stream: NDArray[np.uint16], repeats: int) -> dict[str, Any]:
    """Samples of the demo's shape, whole; with checksums whole chunks are read, a third more than is asked for."""
    samples = make_samples(SHORT_LENGTHS, TAPS, SHORT_HIDDEN, stream)
    folders = {name: scratch / f"short-{name}" for name in ("flat", "safetensors", "torch")}
    for folder in folders.values():
        folder.mkdir()
    write_store(scratch / "short", samples, chunk_tokens=CHUNK)
    store = hscache.open(scratch / "short")
    memory, shard = used_memory(store), StorePaths(store.path).shard(0)
    flat = Flat(folders["flat"], samples, memory.arrays)
    peers = SafetensorsSlice(folders["safetensors"], samples), TorchFile(folders["torch"], samples)
    readers: dict[str, Read] = {
        "flat preadv": flat.read,
        "hscache": ours(store, crc=False, memory=memory),
        "hscache, crc": ours(store, crc=True, memory=memory),
        "safetensors slice": peers[0].read,
        "torch.load": peers[1].read,
        "zarr-python": Zarr(shard, store._columns["start"].tolist()).read,
    }
    drop = cold_dropper([*flat.paths, *peers[0].paths, *peers[1].paths, *shard.glob("*/c.*")])
    seconds = paired(readers, None, repeats, renew=drop, lengths=SHORT_LENGTHS)
    return ratios(seconds, None, SHORT_HIDDEN, SHORT_LENGTHS)


def bench_epochs(store: Store, peer: TorchFile, repeats: int) -> dict[str, Any]:
    """Passes over many samples by readers that read ahead; the consumer does nothing."""
    order = list(range(len(LENGTHS))) * 4
    loader = torch.utils.data.DataLoader(
        FileDataset(peer.paths, order), batch_size=None, num_workers=2, persistent_workers=True
    )
    memory = store.buffers()

    def plain() -> None:
        for i in order:
            store.sample(i, crc=False, out=memory)

    rings = {crc: ReadAhead(store, itertools.cycle(order), buffers=3, threads=2, crc=crc) for crc in (True, False)}

    def ahead(crc: bool) -> None:
        for lease in itertools.islice(rings[crc], len(order)):
            lease.release()

    ways: dict[str, Callable[[], object]] = {
        "hscache": plain,
        "hscache ring(2 threads), crc": lambda: ahead(True),
        "hscache ring(2 threads)": lambda: ahead(False),
        "DataLoader(2)+torch.load": lambda: [None for _ in loader],
    }
    for work in ways.values():
        work()
    turns = [
        {name: measure(ways[name]) for name in (list(ways) if k % 2 else reversed(list(ways)))} for k in range(repeats)
    ]
    for ring in rings.values():
        ring.close()
    total = sum(LENGTHS) * 4 * ((TAPS + 1) * HIDDEN * 2 + 5)
    return {
        name: {
            "times_ours": statistics.median(turn[name] / turn["hscache"] for turn in turns),
            "gb_per_s": statistics.median(total / turn[name] / 1e9 for turn in turns),
        }
        for name in ways
    }


def bench_codecs(scratch: Path, samples: list[Arrays], repeats: int) -> dict[str, Any]:
    """Ratio, encoding and decoding speed of each codec on one core; sample reads on several."""
    spec = array_specs(n_taps=TAPS, hidden_size=HIDDEN, final_state=False, topk=0, chunk_tokens=CHUNK)[-1]
    states = samples[0]["hidden_states"]
    result = {}
    for codec in ("raw", "lz4", "zstd"):
        encoder, root = Codec(codec, spec.dtype), scratch / codec
        encode = [
            measure(lambda e=encoder: [e.encode(states[t : t + CHUNK]) for t in range(0, len(states), CHUNK)])  # type: ignore[misc]
            for _ in range(3)
        ]
        path = StorePaths(root).shard(0) / "hidden_states/c.0.0.0"
        plain = sum(LENGTHS) * spec.row_bytes
        one, several = hscache.open(root, decode_threads=1), hscache.open(root)
        starts = one._columns["start"].tolist()
        zarr_read = Zarr(StorePaths(root).shard(0), starts).read
        readers: dict[str, Read] = {
            "flat preadv": _MEMORY["flat"].read,
            "one core": ours(one, crc=True, memory=used_memory(one)),
            "threads": ours(several, crc=True, memory=used_memory(several)),
            "zarr-python": zarr_read,
        }
        result[codec] = {
            "times_smaller": plain / path.stat().st_size,
            "decode_gb_per_core_s": decode_per_core(one),
            "encode_mb_per_s": states.nbytes / statistics.median(encode) / 1e6 if codec != "raw" else None,
            **{
                case: ratios(paired(readers, span, repeats), span)
                for case, span in (("full", None), ("range256", RANGE))
            },
        }
    return result


def decode_per_core(store: Store) -> float:
    """Return GB of states per second of processor time: reading, checksums and unpacking."""
    memory, rates = store.buffers(), []
    for _ in range(4):
        began, n_bytes = time.thread_time(), 0
        for i in range(len(store)):
            n_bytes += store.sample(i, out=memory, kind="bits").hidden_states.nbytes * (TAPS + 1) // TAPS
        rates.append(n_bytes / (time.thread_time() - began) / 1e9)
    return statistics.median(rates[1:])


def bench_writer(scratch: Path, samples: list[Arrays], repeats: int) -> dict[str, Any]:
    specs = array_specs(n_taps=TAPS, hidden_size=HIDDEN, final_state=True, topk=0, chunk_tokens=CHUNK)
    folder = scratch / "writer"
    samples = [*samples] * 4  # nearly the default size of a shard
    joined = {name: np.concatenate([arrays[name] for arrays in samples]) for name in samples[0]}

    def hscache_writer(codec: str) -> None:
        (folder / "shards").mkdir(parents=True)
        writer = ShardWriter(folder / "staged", specs, codec)
        for i, arrays in enumerate(samples):
            writer.add(str(i), i, arrays)
        writer.commit(folder / "shards/00000.zarr", {"shard": 0})

    def raw() -> None:
        folder.mkdir()
        write_flat(folder / "flat.bin", samples)

    ways: dict[str, Callable[[], object]] = {
        "raw write + fsync": raw,
        "hscache": lambda: hscache_writer("raw"),
        "hscache, zstd": lambda: hscache_writer("zstd"),
        "zarr-python": lambda: write_zarr(folder, joined, CHUNK),
    }
    turns: list[dict[str, float]] = []
    names = list(ways)
    for repeat in range(repeats):
        turn = {}
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            os.sync()
            turn[name] = measure(ways[name])
            shutil.rmtree(folder)
        turns.append(turn)
    total = sum(array.nbytes for arrays in samples for array in arrays.values())
    return {
        name: {
            "ratio": statistics.median(turn[name] / turn["raw write + fsync"] for turn in turns),
            "times_ours": statistics.median(turn[name] / turn["hscache"] for turn in turns),
            "gb_per_s": statistics.median(total / turn[name] / 1e9 for turn in turns),
        }
        for name in ways
    }


_READ_ALL = """
import sys, time
import hscache
store = hscache.open(sys.argv[1])
memory, n_bytes, started = store.buffers(), 0, time.perf_counter()
for i in range(len(store)):
    sample = store.sample(i, kind="bits", crc=False, out=memory)
    n_bytes += sample.hidden_states.nbytes + sample.final_state.nbytes
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(n_bytes, status["VmHWM"].split()[0], time.perf_counter() - started)
"""


def bench_memory(scratch: Path, times: int) -> dict[str, Any]:
    """Peak memory of a process that reads a store, and one that reads a store of that shard ``times`` over."""
    repeat_store(scratch / "raw", scratch / "large", times)
    found = {}
    for name, root in (("small", scratch / "raw"), ("large", scratch / "large")):
        answer = subprocess.run(
            [sys.executable, "-c", _READ_ALL, str(root)], capture_output=True, text=True, check=True
        )
        n_bytes, peak, seconds = answer.stdout.split()
        found[name] = {"gb": int(n_bytes) / 1e9, "peak_mib": int(peak) / 1024, "seconds": float(seconds)}
    return {**found, "ratio": found["large"]["peak_mib"] / found["small"]["peak_mib"]}


def limits(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each limit of the store's design with what was measured."""
    full, epoch, writer, codecs = (
        result["readers"]["full"],
        result["readers"]["epoch"],
        result["writer"],
        result["codecs"],
    )
    checked, plain = full["hscache, crc"]["ratio"], full["hscache"]["ratio"]
    decode = codecs["zstd"]["decode_gb_per_core_s"]
    rows = [
        ("reader / flat preadv, warm", plain, "<=", 1.15),
        ("reader with crc / flat preadv, warm", checked, "<=", 1.6),
        ("the same, samples of 1.4 MB", result["readers"]["short"]["hscache"]["ratio"], "<=", 1.15),
        ("the same with crc, samples of 1.4 MB", result["readers"]["short"]["hscache, crc"]["ratio"], "<=", 1.6),
        ("safetensors slice / reader", full["safetensors slice"]["ratio"] / plain, ">=", 1.5),
        ("torch.load / reader", full["torch.load"]["ratio"] / plain, ">=", 3.0),
        ("DataLoader(2)+torch.load / reader", epoch["DataLoader(2)+torch.load"]["times_ours"], ">=", 4.0),
        ("writer / raw write + fsync", writer["hscache"]["ratio"], "<=", 1.2),
        ("zarr-python / writer", writer["zarr-python"]["times_ours"], ">=", 3.0),
        ("zstd, times smaller", codecs["zstd"]["times_smaller"], ">=", 1.38),
        ("zstd, GB/s decoded per core", decode, ">=", 1.2),
        ("memory, large store / small", result["memory"]["ratio"], "<=", 1.05),
    ]
    return [
        {"what": what, "got": got, "limit": f"{sign} {limit}", "met": got <= limit if sign == "<=" else got >= limit}
        for what, got, sign, limit in rows
    ]


def show(result: dict[str, Any]) -> None:
    readers = result["readers"]
    every = ("full", "range256", "prefix512", "cold full", "one tap", "verify", "short")
    cases = [case for case in every if case in readers]
    names = list(dict.fromkeys(name for case in cases for name in readers[case]))
    print(f"{'time / flat preadv (GB/s)':30}" + "".join(f"{case:>15}" for case in cases))
    for name in names:
        cells = [readers[case].get(name) for case in cases]
        print(f"{name:30}" + "".join(f"{c['ratio']:8.2f} ({c['gb_per_s']:4.1f})" if c else " " * 15 for c in cells))
    for case in ("full", "short"):
        ways = ", ".join(f"{name} {readers[case][name]['cpu_ratio']:.2f}" for name in ("hscache", "hscache, crc"))
        print(f"processor time / that of flat preadv, {case}: {ways}")
    zipped = readers["gzip"]
    print(
        f"{'.ckpt.gz + torch.load':30}{zipped['ratio']:8.2f} ({zipped['gb_per_s']:4.2f})  "
        f"{zipped['times_smaller']:.2f}x smaller, packed at {zipped['encode_mb_per_s']:.0f} MB/s"
    )
    print(f"\n{'pass over many samples':30}{'time / ours':>15}{'GB/s':>8}")
    for name, cell in readers["epoch"].items():
        print(f"{name:30}{cell['times_ours']:15.2f}{cell['gb_per_s']:8.1f}")
    print(
        f"\n{'codec':8}{'smaller':>8}{'encode MB/s':>12}" + " one core, threads, zarr-python: time / flat preadv (GB/s)"
    )
    for codec, cells in result["codecs"].items():
        line = f"{codec:8}{cells['times_smaller']:8.2f}{cells['encode_mb_per_s'] or 0:12.0f}"
        line += f"{cells['decode_gb_per_core_s']:10.2f}"
        for case in ("full", "range256"):
            ways = (cells[case][way] for way in ("one core", "threads", "zarr-python"))
            line += f"   {case}:" + ",".join(f" {w['ratio']:.2f} ({w['gb_per_s']:.2f})" for w in ways)
        print(line)
    print(f"\n{'writer':30}{'time / raw':>15}{'time / ours':>15}{'GB/s':>8}")
    for name, cell in result["writer"].items():
        print(f"{name:30}{cell['ratio']:15.2f}{cell['times_ours']:15.2f}{cell['gb_per_s']:8.2f}")
    small, large = result["memory"]["small"], result["memory"]["large"]
    print(
        f"\nmemory: {small['gb']:.2f} GB read with {small['peak_mib']:.0f} MiB, "
        f"{large['gb']:.1f} GB with {large['peak_mib']:.0f} MiB"
    )
    print(f"\n{'limit':40}{'got':>8}  {'asked':8}")
    for row in result["limits"]:
        print(f"{row['what']:40}{row['got']:8.2f}  {row['limit']:8} {'met' if row['met'] else 'MISSED'}")
    for note in readers["notes"]:
        print(note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="store whose states are taken; default: random numbers")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path.cwd())
    args = parser.parse_args()
    torch.set_num_threads(1)
    n_values = sum(LENGTHS) * (TAPS + 1) * HIDDEN
    stream = real_states(args.store, n_values) if args.store else random_states(n_values)
    samples = make_samples(LENGTHS, TAPS, HIDDEN, stream)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        scratch = Path(folder)
        for codec in ("raw", "lz4", "zstd"):
            write_store(scratch / codec, samples, codec=codec, chunk_tokens=CHUNK)
        (scratch / "flat2").mkdir()
        _MEMORY["flat"] = Flat(scratch / "flat2", samples)
        result = {
            "states": str(args.store) if args.store else "random",
            "shape": {"taps": TAPS, "hidden": HIDDEN, "tokens": LENGTHS, "chunk_tokens": CHUNK},
            "short": {"taps": TAPS, "hidden": SHORT_HIDDEN, "tokens": SHORT_LENGTHS, "chunk_tokens": CHUNK},
            "cores": len(os.sched_getaffinity(0)),
            "repeats": args.repeats,
            "checksums": "google-crc32c" if crc.checksums is None else "awscrt",
            "readers": {
                **bench_readers(scratch, samples, args.repeats),
                "short": bench_short(scratch, stream, args.repeats),
            },
            "codecs": bench_codecs(scratch, samples, args.repeats),
            "writer": bench_writer(scratch, samples, max(3, args.repeats // 2)),
            "memory": bench_memory(scratch, max(2, round(20e9 / (n_values * 2)))),
        }
    result["readers"]["notes"].append(f"checksums by {result['checksums']}")
    result["limits"] = limits(result)
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
