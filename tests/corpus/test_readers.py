"""Tokenized sources: every format gives the same rows, and a bad row or a broken file is told, never passed over."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hscache.corpus.readers import read_corpus
from hscache.corpus.writer import CorpusWriter
from hscache.errors import InputError
from hscache.rows import Reject, Sample

ROWS: list[dict[str, Any]] = [
    {"id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "tag": "math"},
    {"id": "b", "input_ids": [7], "loss_mask": [1], "tag": None},
    {"id": "c", "input_ids": list(range(300)), "loss_mask": [0] * 100 + [1] * 200, "tag": "code"},
]
Plain = tuple[int, str, list[int] | None, list[int] | None, str | None, str]


def plain(rows: list[Any]) -> list[Plain]:
    return [
        (row.row, row.sample_id, None, None, row.tag, row.reason)
        if isinstance(row, Reject)
        else (row.row, row.sample_id, row.input_ids.tolist(), row.loss_mask.tolist(), row.tag, "")
        for row in rows
    ]


def reasons(rows: list[Any]) -> list[str]:
    return [row[-1] for row in plain(rows)]


def read(path: Path) -> list[Any]:
    return list(read_corpus(path))


def as_lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def jsonl(path: Path, content: list[Any] | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else as_lines(content))
    return path


def parquet(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None, **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, **options)
    return path


def arrow(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def write(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    if kind == "parquet":
        return parquet(folder / "c.parquet", rows)
    if kind == "jsonl":
        return jsonl(folder / "c.jsonl", rows)
    if kind == "jsonl.gz":
        return jsonl(folder / "c.jsonl.gz", gzip.compress(as_lines(rows)))
    return arrow(folder / "c", rows)


KINDS = ("parquet", "jsonl", "jsonl.gz", "arrow")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    rows = read(write(kind, tmp_path, ROWS))
    assert plain(rows) == [
        (i, row["id"], row["input_ids"], row["loss_mask"], row["tag"], "") for i, row in enumerate(ROWS)
    ]
    assert {(row.input_ids.dtype, row.loss_mask.dtype) for row in rows} == {(np.dtype("i4"), np.dtype("u1"))}


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_one_read_keep_their_numbers(kind: str, tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "input_ids": [i, i + 1], "loss_mask": [0, 1]} for i in range(700)]
    got = read(write(kind, tmp_path, rows))
    assert [(row.row, row.sample_id) for row in got] == [(i, f"r{i}") for i in range(700)]
    assert got[699].input_ids.tolist() == [699, 700]


@pytest.mark.parametrize("ids", [pa.int32(), pa.int64(), pa.uint32(), pa.int16()])
@pytest.mark.parametrize("mask", [pa.uint8(), pa.int64(), pa.bool_()])
@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list])
def test_any_whole_number_columns_give_the_same_rows(
    tmp_path: Path, ids: pa.DataType, mask: pa.DataType, make_list: Any
) -> None:
    schema = pa.schema([("id", pa.string()), ("input_ids", make_list(ids)), ("loss_mask", make_list(mask))])
    rows = [{**row, "loss_mask": [bool(m) for m in row["loss_mask"]] if mask == pa.bool_() else row["loss_mask"]}
            for row in ROWS]  # fmt: skip
    got = plain(read(parquet(tmp_path / "c.parquet", rows, schema)))
    assert [row[2:4] for row in got] == [(row["input_ids"], row["loss_mask"]) for row in ROWS]


@pytest.mark.parametrize("kind", KINDS)
def test_extra_columns_are_left_alone(kind: str, tmp_path: Path) -> None:
    rows = [{**row, "seq_len": 3, "messages": [{"role": "user", "content": "hi"}]} for row in ROWS]
    assert plain(read(write(kind, tmp_path, rows))) == plain(read(write("jsonl", tmp_path, ROWS)))


@pytest.mark.parametrize("kind", KINDS)
def test_missing_column_is_refused_with_what_was_found(kind: str, tmp_path: Path) -> None:
    path = write(kind, tmp_path, [{"input_ids": [1], "labels": [1]}])
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-format"
    assert "no column loss_mask; found input_ids, labels" in caught.value.message


def test_sample_id_wins_over_other_id_columns(tmp_path: Path) -> None:
    row = {"uuid": "u", "id": "i", "sample_id": "s", "input_ids": [1, 2], "loss_mask": [0, 1]}
    for kind in ("parquet", "jsonl"):
        assert read(write(kind, tmp_path, [row]))[0].sample_id == "s"


def test_ids_and_tags_that_are_no_text_become_text(tmp_path: Path) -> None:
    rows = [
        {"id": 17, "input_ids": [1, 2], "loss_mask": [0, 1], "tag": 3},
        {"id": None, "input_ids": [1, 2], "loss_mask": [0, 1], "tag": {"a": 1}},
        {"id": 18, "input_ids": "no list", "loss_mask": [0, 1], "tag": ["x"]},
    ]
    got = read(jsonl(tmp_path / "c.jsonl", rows))
    assert [(row.sample_id, row.tag) for row in got] == [("17", "3"), ("", "{'a': 1}"), ("18", "['x']")]


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path / "nothing.jsonl")
    assert caught.value.code == "corpus-missing"


@pytest.mark.parametrize("name", ["c.csv", "c.gz", "c.json.gz", "plain", "empty-directory/"])
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
    assert "['train', 'test']" in caught.value.message
    assert len(read(tmp_path / "splits" / "train")) == 1


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_a_broken_arrow_directory_is_refused(tmp_path: Path, damage: str) -> None:
    path = arrow(tmp_path / "c", ROWS)
    data = next(path.glob("*.arrow"))
    if damage == "remove":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-truncated"


def test_a_line_cut_off_keeps_the_rows_before_it_and_names_its_byte(tmp_path: Path) -> None:
    text = as_lines(ROWS)
    start = text.rindex(b'{"id": "c"')
    for end in (start + 1, start + 20, len(text) - 2):
        *good, last = read(jsonl(tmp_path / "c.jsonl", text[:end]))
        assert [row.sample_id for row in good] == ["a", "b"]
        assert (last.row, last.reason) == (2, "bad-json")
        assert last.detail.startswith(f"byte {start}: ")


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
    assert last.detail.startswith(f"byte {offset}: ")


def test_a_gzip_with_a_flipped_byte_ends_in_a_reject(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(as_lines(ROWS)))
    packed[-6] ^= 1  # the checksum
    assert read(jsonl(tmp_path / "c.jsonl.gz", bytes(packed)))[-1].reason == "bad-json"


def test_a_gz_file_that_is_no_gzip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(jsonl(tmp_path / "c.jsonl.gz", ROWS))
    assert (caught.value.code, "not gzip" in caught.value.message) == ("corpus-format", True)


@pytest.mark.parametrize("keep", [4, 100, -1])
def test_a_parquet_file_without_its_footer_is_refused(tmp_path: Path, keep: int) -> None:
    path = parquet(tmp_path / "c.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-truncated"
    assert "half written" in caught.value.message


@pytest.mark.parametrize("content", [b"", b"not parquet at all, but long enough"])
def test_another_file_named_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-format"


def test_a_broken_page_of_a_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    with CorpusWriter(path) as writer:
        for i in range(600):
            writer.add(f"r{i}", list(range(i, i + 9)), [1] * 9)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-truncated"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_text_that_is_not_utf8_is_refused(tmp_path: Path, kind: str) -> None:
    from datasets import Dataset

    text = pa.array([b"good", b"\xff\xfe"]).view(pa.string())
    table = pa.table({"sample_id": text, "input_ids": [[1, 2], [3, 4]], "loss_mask": [[0, 1], [0, 1]]})
    path = tmp_path / "c.parquet"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        path = tmp_path / "saved"
        Dataset(table).save_to_disk(path)
    with pytest.raises(InputError) as caught:
        read(path)
    assert (caught.value.code, "UTF8" in caught.value.message) == ("corpus-truncated", True)


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
    assert bad.detail.startswith(f"byte {len(good)}: ")
    assert (bad.row, after.row) == (1, 2)


def test_an_escaped_surrogate_pair_is_text(tmp_path: Path) -> None:
    line = b'{"id": "\\uD83D\\uDE00", "input_ids": [1, 2], "loss_mask": [0, 1]}\n'
    assert read(jsonl(tmp_path / "c.jsonl", line))[0].sample_id == "\N{GRINNING FACE}"


def test_columns_are_required_of_the_first_good_row(tmp_path: Path) -> None:
    got = read(jsonl(tmp_path / "c.jsonl", b"{broken\n" + as_lines(ROWS)))
    assert reasons(got) == ["bad-json", "", "", ""]
    with pytest.raises(InputError) as caught:
        read(jsonl(tmp_path / "d.jsonl", b"{broken\n" + as_lines([{"messages": []}])))
    assert (caught.value.code, "no column input_ids" in caught.value.message) == ("corpus-format", True)


def test_a_later_row_without_a_column_is_one_bad_row(tmp_path: Path) -> None:
    got = read(jsonl(tmp_path / "c.jsonl", [ROWS[0], {"id": "x", "input_ids": [1]}, ROWS[1]]))
    assert reasons(got) == ["", "bad-row", ""]
    assert (got[1].sample_id, "loss_mask" in got[1].detail) == ("x", True)


@pytest.mark.parametrize(
    "ids",
    [[1.0, 2.0], [1, 2.5], ["1", "2"], [[1, 2]], [1, None], None, "12", {"a": 1}, 7, [1 << 70, 1], [-(1 << 70)]],
    ids=["floats", "half", "texts", "nested", "null-inside", "null", "text", "object", "number", "huge", "low"],
)  # fmt: skip
def test_ids_that_are_no_list_of_whole_numbers_are_a_bad_row(tmp_path: Path, ids: object) -> None:
    row = {"id": "x", "input_ids": ids, "loss_mask": [0, 1]}
    got = read(jsonl(tmp_path / "c.jsonl", [ROWS[0], row, ROWS[1]]))
    assert reasons(got) == ["", "bad-row", ""]
    assert "input_ids" in got[1].detail


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([[1.0, 2.0]], pa.list_(pa.float32())),
        ([["1", "2"]], pa.list_(pa.string())),
        ([[[1, 2]]], pa.list_(pa.list_(pa.int32()))),
        ([None], pa.list_(pa.int32())),
        ([[1, None]], pa.list_(pa.int32())),
        (["12"], pa.string()),
        ([[None, None]], pa.list_(pa.null())),
    ],
    ids=["floats", "texts", "nested", "null", "null-inside", "text", "nulls"],
)
def test_parquet_ids_that_are_no_list_of_whole_numbers_are_a_bad_row(
    tmp_path: Path, column: list[Any], kind: pa.DataType
) -> None:
    table = pa.table({"input_ids": pa.array(column, kind), "loss_mask": pa.array([[0, 1]], pa.list_(pa.uint8()))})
    pq.write_table(table, tmp_path / "c.parquet")
    (row,) = read(tmp_path / "c.parquet")
    assert row.reason == "bad-row"


def test_a_null_row_between_good_ones_is_one_bad_row(tmp_path: Path) -> None:
    rows = [ROWS[0], {"id": "n", "input_ids": None, "loss_mask": None}, ROWS[2]]
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        got = read(write(kind, folder, rows))
        assert reasons(got) == ["", "bad-row", ""]
        assert got[2].input_ids.tolist() == ROWS[2]["input_ids"]


@pytest.mark.parametrize("value", [1 << 31, 1 << 40, (1 << 63) - 1, -1, -2, -(1 << 40)])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_ids_that_are_no_token_ids_are_rejected_with_their_value(tmp_path: Path, kind: str, value: int) -> None:
    (row,) = read(write(kind, tmp_path, [{"input_ids": [1, value], "loss_mask": [0, 1]}]))
    assert (row.reason, row.n_tokens, row.n_loss) == ("ids-out-of-vocab", 2, 1)
    assert row.detail == f"input_ids holds {value}, expected token ids"


@pytest.mark.parametrize("value", [2, -1, -100, 255, 256, 257, 1 << 40])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_mask_values_beyond_0_and_1_are_rejected_with_their_value(tmp_path: Path, kind: str, value: int) -> None:
    (row,) = read(write(kind, tmp_path, [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, value]}]))
    assert (row.reason, row.detail) == ("bad-mask", f"loss_mask holds {value}, expected 0 or 1")


def test_unsigned_values_beyond_63_bits_do_not_wrap_around(tmp_path: Path) -> None:
    huge = (1 << 64) - 7
    kind = pa.list_(pa.uint64())
    for ids, mask, reason in (([1, huge], [0, 1], "ids-out-of-vocab"), ([1, 2], [0, huge], "bad-mask")):
        pq.write_table(
            pa.table({"input_ids": pa.array([ids], kind), "loss_mask": pa.array([mask], kind)}), tmp_path / "c.parquet"
        )
        (row,) = read(tmp_path / "c.parquet")
        assert (row.reason, f"holds {huge}," in row.detail) == (reason, True)


def test_ids_and_mask_of_other_lengths_are_rejected_with_both(tmp_path: Path) -> None:
    (row,) = read(jsonl(tmp_path / "c.jsonl", [{"id": "x", "input_ids": [1, 2, 3], "loss_mask": [0, 1]}]))
    assert (row.sample_id, row.reason, row.detail) == ("x", "length-mismatch", "3 ids, 2 mask entries")
    assert (row.n_tokens, row.n_loss) == (3, 1)


def test_rejected_rows_of_other_content_are_another_corpus(tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "loss_mask": [0]} for ids in ([1, 2], [1, 3], [1, -5], [1, 1 << 40])]
    assert len({row.content for row in read(jsonl(tmp_path / "c.jsonl", rows))}) == 4


def test_the_finish_reason_is_kept_where_there_is_one(tmp_path: Path) -> None:
    rows = [{**row, "finish_reason": reason} for row, reason in zip(ROWS, ("stop", None, "length"), strict=True)]
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        assert [row.finish_reason for row in read(write(kind, folder, rows))] == ["stop", None, "length"]
    assert [row.finish_reason for row in read(jsonl(tmp_path / "none.jsonl", ROWS))] == [None] * 3


@pytest.mark.parametrize("value", [0.5, 1.0, "1", None, [1]])
def test_mask_values_that_are_no_whole_numbers_are_a_bad_row(tmp_path: Path, value: object) -> None:
    (row,) = read(jsonl(tmp_path / "c.jsonl", [{"input_ids": [1, 2], "loss_mask": [0, value]}]))
    assert row.reason == "bad-row"


def test_true_and_false_are_a_mask(tmp_path: Path) -> None:
    (row,) = read(jsonl(tmp_path / "c.jsonl", b'{"input_ids": [1, 2], "loss_mask": [false, true]}'))
    assert row.loss_mask.tolist() == [0, 1]


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
