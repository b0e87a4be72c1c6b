"""Files of rows: folders, patterns and packed files are read alike, and damage costs only the rows that it hits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hscache.corpus.containers import read_objects
from hscache.corpus.readers import read_corpus
from hscache.corpus.writer import CorpusWriter
from hscache.errors import InputError
from hscache.rows import Reject, Sample
from tests.made.corpora import KINDS, ROWS, arrow, as_lines, jsonl, parquet, plain, read, reasons, write


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path / "nothing.jsonl")
    assert caught.value.code == "corpus-missing"


@pytest.mark.parametrize("name", ["c.csv", "c.gz", "c.csv.gz", "c.parquet.zst", "plain", "empty-directory/"])
def test_an_unknown_kind_of_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(b"")
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-format"


def test_a_directory_of_splits_is_refused_with_their_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    split = datasets.Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [0, 1]}])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError) as caught:
        read(tmp_path / "splits")
    assert caught.value.code == "corpus-format"
    assert "test, train" in caught.value.message
    assert len(read(tmp_path / "splits" / "train")) == 1


@pytest.mark.parametrize("damage", ["data", "state", "entry"])
def test_an_arrow_directory_without_a_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = arrow(tmp_path / "c", ROWS)
    if damage == "data":
        next(path.glob("*.arrow")).unlink()
    else:
        (path / "state.json").write_bytes(b"{" if damage == "state" else b"{}")
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-truncated"


def of_many_batches(folder: Path, kind: str) -> tuple[Path, list[int]]:
    """Write 900 rows in nine batches; return the file and the byte after each batch."""
    rows = [{"id": f"r{i}", "input_ids": [i, i + 1, 7], "loss_mask": [0, 1, 1]} for i in range(900)]
    table, path, ends = pa.Table.from_pylist(rows), folder / f"c.{kind}", []
    with pa.OSFile(str(path), "wb") as sink:
        writer = (pa.ipc.new_file if kind == "feather" else pa.ipc.new_stream)(sink, table.schema)
        for batch in table.to_batches(max_chunksize=100):
            writer.write_batch(batch)
            ends.append(sink.tell())
        writer.close()
    return path, ends


@pytest.mark.parametrize("kind", ["feather", "arrow"])
@pytest.mark.parametrize("more", [0, 1, 9, 200])
def test_an_arrow_file_cut_off_keeps_its_good_batches_and_names_the_byte(tmp_path: Path, kind: str, more: int) -> None:
    path, ends = of_many_batches(tmp_path, kind)
    path.write_bytes(path.read_bytes()[: ends[3] + more])
    *good, last = read(path)
    assert [row.sample_id for row in good] == [f"r{i}" for i in range(400)]
    assert (last.row, last.reason) == (400, "damaged")
    assert f"byte {ends[3]}: " in last.detail


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        *(("arrow", content) for content in (b"", b"ARROW1", b"ARROW1\0\0", b"no arrow data at all, but long enough")),
        *(("parquet", content) for content in (b"", b"not parquet at all, but long enough")),
    ],
)
def test_another_file_of_that_name_is_refused(tmp_path: Path, kind: str, content: bytes) -> None:
    path = tmp_path / f"c.{kind}"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-format"


def test_a_line_cut_off_keeps_the_rows_before_it_and_names_its_byte(tmp_path: Path) -> None:
    text = as_lines(ROWS)
    start = text.rindex(b'{"id": "c"')
    for end in (start + 1, start + 20, len(text) - 2):
        *good, last = read(jsonl(tmp_path / "c.jsonl", text[:end]))
        assert [row.sample_id for row in good] == ["a", "b"]
        assert (last.row, last.reason) == (2, "bad-json")
        assert last.detail.startswith(f"line 3: byte {start}: ")


def test_a_line_without_its_newline_is_a_row(tmp_path: Path) -> None:
    assert reasons(read(jsonl(tmp_path / "c.jsonl", as_lines(ROWS)[:-1]))) == ["", "", ""]


@pytest.mark.parametrize("cut", [1, 8, 9, 40])
def test_a_gzip_cut_off_keeps_its_good_rows_and_names_where_it_broke(tmp_path: Path, cut: int) -> None:
    rng = np.random.default_rng(0)  # ids that do not compress, so that the cut removes rows
    rows = [
        {"id": f"r{i}", "input_ids": rng.integers(0, 1 << 30, 50).tolist(), "loss_mask": [1] * 50} for i in range(40)
    ]
    text = as_lines(rows)
    *good, last = read(jsonl(tmp_path / "c.jsonl.gz", gzip.compress(text)[:-cut]))
    assert [row.sample_id for row in good] == [f"r{i}" for i in range(len(good))]
    assert len(good) >= 38
    assert all(isinstance(row, Sample) for row in good)
    offset = len(as_lines(rows[: len(good)]))
    assert (last.row, last.reason) == (len(good), "bad-json")
    assert f" byte {offset}: " in last.detail


def test_a_gzip_with_a_flipped_byte_ends_in_a_reject(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(as_lines(ROWS)))
    packed[-6] ^= 1  # the checksum
    assert read(jsonl(tmp_path / "c.jsonl.gz", bytes(packed)))[-1].reason == "bad-json"


def test_a_gz_file_that_is_no_gzip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(jsonl(tmp_path / "c.jsonl.gz", ROWS))
    assert (caught.value.code, "not gz data" in caught.value.message) == ("corpus-format", True)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_parquet_file_without_its_footer_is_refused(tmp_path: Path, keep: int) -> None:
    path = parquet(tmp_path / "c.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-truncated"
    assert "half written" in caught.value.message


def test_a_broken_page_costs_the_rows_of_its_row_group_and_each_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    with CorpusWriter(path) as writer:
        for i in range(2500):
            writer.add(f"r{i}", list(range(i, i + 9)), [1] * 9)
    facts = pq.ParquetFile(path).metadata.row_group(1)
    starts = [
        chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
        for chunk in map(facts.column, range(facts.num_columns))
    ]
    data = bytearray(path.read_bytes())
    data[starts[1] + 60] ^= 1
    path.write_bytes(data)
    got = read(path)
    assert [row.row for row in got] == list(range(2500))
    assert reasons(got) == [""] * 1024 + ["damaged"] * 1024 + [""] * 452
    assert f"byte {min(starts)}: " in got[1024].detail


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_text_that_is_not_utf8_is_one_damaged_row(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset

    text = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    table = pa.table({"sample_id": text, "input_ids": [[1, 2], [3, 4]], "loss_mask": [[0, 1], [0, 1]]})
    path = tmp_path / "c.parquet"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        path = tmp_path / "saved"
        Dataset(table).save_to_disk(path)
    good, bad = read(path)
    assert (good.sample_id, bad.row, bad.reason, "UTF8" in bad.detail) == ("good", 1, "damaged", True)


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    a, b, c = (as_lines([row]) for row in ROWS)
    got = read(jsonl(tmp_path / "c.jsonl", b"\n  \n" + a + b"\n" + b + b"\t\n" + c + b"\n\n"))
    assert [(row.row, row.sample_id) for row in got] == [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize(
    ("before", "end"),
    [(b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n"), (b"\xef\xbb\xbf", b"\r\n")],
    ids=["bom", "crlf", "both"],
)
def test_files_from_other_systems_read_alike(tmp_path: Path, before: bytes, end: bytes) -> None:
    text = before + as_lines(ROWS).replace(b"\n", end)
    assert plain(read(jsonl(tmp_path / "c.jsonl", text))) == plain(read(jsonl(tmp_path / "d.jsonl", ROWS)))


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": "\xff\xfe", "input_ids": [1], "loss_mask": [1]}',
        b"[1, 2]",
        b'"text"',
        b"17",
        b"null",
        b"{'id': 1}",
        b'{"id": "x"',
        b"[" * 100_000,
        b'{"id": "\\ud800", "input_ids": [1, 2], "loss_mask": [0, 1]}',
        b'{"id": 1' + b"0" * 5000 + b"}",
    ],
    ids=["not-utf8", "list", "text", "number", "null", "python", "cut", "deep", "half-surrogate", "long-number"],
)
def test_a_line_that_is_no_json_object_is_a_rejected_row(tmp_path: Path, line: bytes) -> None:
    good = as_lines(ROWS[:1])
    first, bad, after = read(jsonl(tmp_path / "c.jsonl", good + line + b"\n" + good))
    assert reasons([first, bad, after]) == ["", "bad-json", ""]
    assert bad.detail.startswith(f"line 2: byte {len(good)}: ")
    assert (bad.row, after.row) == (1, 2)


def test_an_escaped_surrogate_pair_is_text(tmp_path: Path) -> None:
    line = b'{"id": "\\uD83D\\uDE00", "input_ids": [1, 2], "loss_mask": [0, 1]}\n'
    assert read(jsonl(tmp_path / "c.jsonl", line))[0].sample_id == "\N{GRINNING FACE}"


def many_files(folder: Path) -> list[str]:
    """Write rows to files of several kinds, among files that are none of a corpus; return the ids in reading order."""
    for name in ("a.jsonl", "b.parquet", "c.json", "d.arrow", "deep/e.jsonl"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"id": f"{path.stem}{i}", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]} for i in range(2)]
        made = write({"arrow": "stream.arrow"}.get(path.suffix[1:], path.suffix[1:]), path.parent, rows)
        made.rename(path)
    for name in ("README.md", ".hidden.jsonl", "dataset_info.json"):
        (folder / name).write_text("not rows")
    return [f"{name}{i}" for name in "abcde" for i in range(2)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", "abcd"),
        ("*", "abcd"),
        ("*.json*", "ac"),
        ("[bd].*", "bd"),
        ("**/*.jsonl", "ae"),
        ("deep", "e"),
        ("a.jsonl", "a"),
    ],
)
def test_folders_and_patterns_are_read_in_order_with_running_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, names: str
) -> None:
    ids = [name for name in many_files(tmp_path) if name[0] in names]
    got = read(tmp_path / pattern)
    assert [(row.row, row.sample_id) for row in got] == list(enumerate(ids))
    monkeypatch.chdir(tmp_path)
    assert [row.sample_id for row in read(Path(pattern))] == ids


def test_a_pattern_reaches_directories_that_save_to_disk_wrote(tmp_path: Path) -> None:
    for name in ("x", "y"):
        arrow(tmp_path / name, [{"id": name, "input_ids": [1, 2], "loss_mask": [0, 1]}])
    for pattern in ("*", "**/*"):
        assert [row.sample_id for row in read(tmp_path / pattern)] == ["x", "y"]


def test_a_pattern_that_matches_nothing_to_read_is_refused(tmp_path: Path) -> None:
    many_files(tmp_path)
    for pattern, code in (("*.zst", "corpus-missing"), ("*.md", "corpus-format")):
        with pytest.raises(InputError) as caught:
            read(tmp_path / pattern)
        assert caught.value.code == code


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    assert len(read(jsonl(tmp_path / "c[1].jsonl", ROWS))) == 3


@pytest.mark.parametrize("keep", [5, 60, 2000])
def test_a_zst_file_cut_off_keeps_its_good_rows(tmp_path: Path, keep: int) -> None:
    rng = np.random.default_rng(0)
    text = as_lines(
        [
            {"id": f"r{i}", "input_ids": rng.integers(0, 1 << 30, 50).tolist(), "loss_mask": [1] * 50}
            for i in range(2000)
        ]
    )
    packed = pa.Codec("zstd").compress(text, asbytes=True)
    *good, last = read(jsonl(tmp_path / "c.jsonl.zst", packed[:-keep]))
    assert [row.sample_id for row in good] == [f"r{i}" for i in range(len(good))]
    assert len(good) > 1500
    offset = sum(map(len, text.splitlines(keepends=True)[: len(good)]))
    assert (last.reason, f" byte {offset}: " in last.detail) == ("bad-json", True)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("name", ["jsonl", "json"])
def test_a_file_that_is_not_packed_as_its_name_says_is_refused(tmp_path: Path, name: str, suffix: str) -> None:
    with pytest.raises(InputError) as caught:
        read(jsonl(tmp_path / f"c.{name}.{suffix}", ROWS))
    assert (caught.value.code, f"not {suffix} data" in caught.value.message) == ("corpus-format", True)


ARRAY = b",".join(as_lines([row]).rstrip() for row in ROWS)


@pytest.mark.parametrize(
    ("text", "good", "start"),
    [
        (b"[" + ARRAY, 3, 1 + len(ARRAY)),
        (b"[" + ARRAY[:-5], 2, 1 + ARRAY.index(b'{"id": "c"')),
        (b"[" + ARRAY + b",]", 3, 2 + len(ARRAY)),
        (b"[" + ARRAY + b"] x", 3, 3 + len(ARRAY)),
        (b"[" + ARRAY.replace(b"}", b"}}", 1) + b"]", 1, 2 + ARRAY.index(b"}")),
        (b"[" + ARRAY + b",7]", 3, 2 + len(ARRAY)),
        (b'[{"id": "\xc3\xa9\xff", "input_ids": [1], "loss_mask": [1]},' + ARRAY + b"]", 3, 1),
        (b"[", 0, 1),
    ],
    ids=["open", "cut", "comma", "more", "brace", "number", "utf8", "nothing"],
)
def test_a_broken_array_keeps_its_good_rows_and_names_the_byte(
    tmp_path: Path, text: bytes, good: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chunk in (1 << 16, 16):
        monkeypatch.setattr("hscache.corpus.containers._CHUNK", chunk)
        got = read(jsonl(tmp_path / "c.json", b"\xef\xbb\xbf \n" + text))
        assert sum(isinstance(row, Sample) for row in got) == good
        (bad,) = (row for row in got if isinstance(row, Reject))
        assert (bad.reason, f"byte {start + 5}: " in bad.detail) == ("bad-json", True), bad.detail


def test_an_array_longer_than_a_read_gives_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": f"é{i}", "input_ids": [i, i + 1], "loss_mask": [0, 1]} for i in range(300)]
    path = jsonl(tmp_path / "c.json", json.dumps(rows, ensure_ascii=False).encode())
    for chunk in (7, 1 << 16):
        monkeypatch.setattr("hscache.corpus.containers._CHUNK", chunk)
        assert [row.sample_id for row in read(path)] == [row["id"] for row in rows]
    assert read(jsonl(tmp_path / "empty.json", b" [ ] ")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_messages_are_the_same_objects_in_every_container(tmp_path: Path, kind: str) -> None:
    call = {"type": "function", "function": {"name": "area", "arguments": {"r": 2}}}
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "area"}]},
        {
            "id": "b",
            "messages": [{"role": "user", "content": "x", "name": "n"}, {"role": "tool", "tool_calls": [call]}],
        },
    ]
    assert [row.value for row in read_objects(write(kind, tmp_path, rows))] == rows


def test_a_row_group_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 1 << 30, 4_000_000, dtype=np.int32)
    starts = np.arange(0, len(ids) + 1, 200, dtype=np.int32)
    masks = pa.ListArray.from_arrays(starts, np.ones(len(ids), np.uint8))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(starts, ids), "loss_mask": masks})
    pq.write_table(table, tmp_path / "c.parquet", use_dictionary=False, compression="none")
    whole, before, most = table.nbytes, pa.total_allocated_bytes(), 0
    for _ in read_corpus(tmp_path / "c.parquet"):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < whole / 2


samples = st.lists(
    st.tuples(st.lists(st.integers(0, 2**31 - 1), max_size=8), st.lists(st.integers(0, 1), max_size=8)), max_size=6
)


@given(samples)
def test_any_rows_come_back_from_parquet_and_jsonl(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[list[int], list[int]]]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    objects = [{"input_ids": ids, "loss_mask": mask} for ids, mask in rows]
    schema = pa.schema([("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int8()))])
    expected = [
        (i, "", ids, mask, None, "") if len(ids) == len(mask) else (i, "", None, None, None, "length-mismatch")
        for i, (ids, mask) in enumerate(rows)
    ]
    assert plain(read(parquet(folder / "p.parquet", objects, schema))) == expected
    assert plain(read(jsonl(folder / "p.jsonl", objects))) == expected


def test_the_name_of_a_cached_dataset_means_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "hub" / "datasets--owner--name"
    files = repo / "snapshots" / "0123abc"
    (files / "data").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("0123abc")
    many_files(files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert [row.sample_id for row in read(Path("owner/name"))] == [f"{name}{i}" for name in "abcde" for i in range(2)]
    assert [row.sample_id for row in read(Path("owner/name/deep/*"))] == ["e0", "e1"]
    for missing in ("owner/other", "owner/name/test-*"):
        with pytest.raises(InputError, match="no dataset in the hub's local cache"):
            read(Path(missing))
