"""Records that hold anything: opening, reading, verify and info give errors of ours, soon, and take little memory.

A value anywhere in ``manifest.json``, a shard's ``zarr.json`` or ``target.json`` is replaced or removed, and the file
is written as it is, which its digest then contradicts, or with its digest made right, as another tool would write it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import operator
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hscache
from hscache.audit.verify import verify
from hscache.errors import HscacheError
from hscache.report import print_info
from hscache.store.info import store_info
from hscache.store.layout import canonical_json, group_metadata, json_digest
from tests.made.stores import corpus_rows, little_manifest, make_store

SECONDS = 1.0
MOST_BYTES = 256 << 20


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = [
    0, -1, 1, 2, 7, 255, 2**31, 2**48, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324,
    math.nan, math.inf, -math.inf,
]  # fmt: skip
TEXTS = ["", "x", "raw", "int8", "int4", "zstd", "../../etc/passwd", "/", "..", "a\x00b", "\ud800", "x" * (1 << 20)]
OTHERS = [None, True, False, [], {}, [[]], [None], {"": None}, [0] * 100_000, nested(50), nested(990)]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.sampled_from(TEXTS),
    st.sampled_from(OTHERS),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(st.none() | st.booleans() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def change(value: Any, place: tuple[Any, ...], new: Any, *, remove: bool) -> Any:
    """Return a copy with the value at a place replaced or removed."""
    out = copy.deepcopy(value)
    inside = out
    for key in place[:-1]:
        inside = inside[key]
    if remove:
        del inside[place[-1]]
    else:
        inside[place[-1]] = new
    return out


def sealed(document: dict[str, Any]) -> bytes:
    body = {key: value for key, value in document.items() if key != "digest"}
    return canonical_json({**body, "digest": json_digest(body)})


RECORDS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "manifest.json": (json.loads, sealed),
    "target/target.json": (json.loads, sealed),
    "shards/00000.zarr/zarr.json": (
        lambda text: json.loads(text)["attributes"]["hscache"],
        lambda body: canonical_json(group_metadata(body)),
    ),
}
"""File -> what of it is changed, and its bytes with the digest made right."""


class Victims:
    """Stores to write changed records into."""

    def __init__(self, folder: Path) -> None:
        self.stores = {}
        for codec in ("raw", "int8"):
            manifest = little_manifest(store={"codec": codec, "shard_bytes": 3000 if codec == "raw" else 100_000})
            self.stores[codec] = make_store(folder / codec, corpus_rows((5, 9, 1, 7)), manifest=manifest).path
        self.good = {
            (codec, name): (root / name).read_bytes() for codec, root in self.stores.items() for name in RECORDS
        }

    @contextlib.contextmanager
    def changed(self, codec: str, name: str, text: bytes) -> Iterator[Path]:
        path = self.stores[codec] / name
        path.write_bytes(text)
        try:
            yield self.stores[codec]
        finally:
            path.write_bytes(self.good[codec, name])


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Victims:
    return Victims(tmp_path_factory.mktemp("victims"))


@contextlib.contextmanager
def soon(what: str) -> Iterator[None]:
    """Ask for an answer or an error within a second."""
    started = time.process_time()
    try:
        yield
    finally:
        assert time.process_time() - started < SECONDS, what


def read_all(root: Path) -> None:
    with soon("open"):
        store = hscache.open(root, decode_threads=1)
    for i in range(len(store)):
        for how in ({"verify": True}, {"kind": "numpy", "crc": False}):
            with soon(f"sample, {how}"), contextlib.suppress(HscacheError):
                store.sample(i, **how)  # type: ignore[call-overload]
    store.close()


WAYS: dict[str, Callable[[Path], object]] = {
    "read": read_all,
    "verify": verify,
    "verify quick": lambda root: verify(root, "quick"),
    "info": lambda root: print_info(store_info(root)),
}


def check(root: Path, *, must_be_seen: bool) -> None:
    for way, work in WAYS.items():
        try:
            # a read of all samples is many calls, each with a second of its own
            with soon(way) if work is not read_all else contextlib.nullcontext():
                answer = work(root)
        except HscacheError:
            continue
        if way == "verify" and must_be_seen:
            assert not answer.ok  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def _bounded_memory(victims: Victims) -> Iterator[None]:
    """Everything together takes little more memory than reading the store as it is."""
    for root in victims.stores.values():
        check(root, must_be_seen=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < MOST_BYTES, f"{grown >> 20} MiB"


def fuzz(victims: Victims, data: st.DataObject) -> None:
    name, codec = data.draw(st.sampled_from(sorted(RECORDS))), data.draw(st.sampled_from(["raw", "int8"]))
    load, seal = RECORDS[name]
    body = load(victims.good[codec, name])
    place = data.draw(st.sampled_from([*places(body)]))
    changed = change(body, place, data.draw(VALUES), remove=data.draw(st.booleans()))
    try:
        text, right = seal(changed), True
    except (ValueError, RecursionError):  # no canonical JSON has it: not with a right digest
        text, right = json.dumps(changed).encode(), False
    if data.draw(st.booleans()):
        text, right = json.dumps(changed).encode(), False
    with victims.changed(codec, name, text) as root:
        check(root, must_be_seen=not right)


@pytest.mark.thorough
@settings(max_examples=150)
@given(st.data())
def test_changed_records_give_errors_of_ours(victims: Victims, data: st.DataObject) -> None:
    fuzz(victims, data)


@pytest.mark.parametrize("softcap", [-(2**63) - 1, 2**63, 10**30, 10**400, 0, -1.0, 1e308])
def test_any_number_as_softcap_gives_an_answer_or_an_error_of_ours(victims: Victims, softcap: float) -> None:
    name = "target/target.json"
    load, seal = RECORDS[name]
    body = load(victims.good["raw", name])
    text = seal(change(body, ("head", "softcap"), softcap, remove=False))
    with victims.changed("raw", name, text) as root:
        check(root, must_be_seen=False)


@pytest.mark.fuzz
@settings(max_examples=5000, derandomize=False)
@given(st.data())
def test_many_changed_records_give_errors_of_ours(victims: Victims, data: st.DataObject) -> None:
    fuzz(victims, data)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("name", RECORDS)
def test_every_missing_key_gives_errors_of_ours(victims: Victims, name: str, codec: str) -> None:
    load, seal = RECORDS[name]
    body = load(victims.good[codec, name])
    for place in places(body):
        if not isinstance(place[-1], str):
            continue
        with victims.changed(codec, name, seal(change(body, place, None, remove=True))) as root:
            check(root, must_be_seen=False)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("name", RECORDS)
def test_every_number_made_zero_gives_errors_of_ours(victims: Victims, name: str, codec: str) -> None:
    load, seal = RECORDS[name]
    body = load(victims.good[codec, name])
    for place in places(body):
        if type(functools.reduce(operator.getitem, place, body)) in (int, float):
            with victims.changed(codec, name, seal(change(body, place, 0, remove=False))) as root:
                check(root, must_be_seen=False)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"NaN", b"null", b"{}", b"[]",
                                  b'{"format_version":' + b"9" * 5000 + b"}", b'{"format_version":true}'])  # fmt: skip
def test_text_that_is_no_record_gives_errors_of_ours(victims: Victims, name: str, text: bytes) -> None:
    with victims.changed("raw", name, text) as root:
        check(root, must_be_seen=True)


def test_a_folder_in_place_of_a_record_gives_errors_of_ours(tmp_path: Path) -> None:
    for i, name in enumerate([*RECORDS, "plan.parquet", "index.parquet"]):
        root = make_store(tmp_path / str(i)).path
        (root / name).unlink()
        (root / name).mkdir()
        check(root, must_be_seen=True)
        shutil.rmtree(root)
