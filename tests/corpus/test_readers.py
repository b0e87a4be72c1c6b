"""Tokenized sources: every format gives the same rows, and a bad row or a broken file is told, never passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hscache.errors import InputError
from hscache.rows import Reject
from tests.made.corpora import KINDS, ROWS, as_lines, jsonl, parquet, plain, read, reasons, write


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
    path = write(kind, tmp_path, [{"input_ids": [1], "weights": [1]}])
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.code == "corpus-format"
    wanted = "no column loss_mask or completion_mask or assistant_masks or labels; found input_ids, weights"
    assert wanted in caught.value.message


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
    [[1.0, 2.0], [1, 2.5], ["1", "2"], [[1], [2]], [1, None], None, "12", {"a": 1}, 7, [1 << 70, 1], [-(1 << 70)]],
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
        ([[[1], [2]]], pa.list_(pa.list_(pa.int32()))),
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
    assert (row.reason, row.n_tokens) == ("ids-out-of-vocab", 2)
    assert f"input_ids holds {value} as token 1" in row.detail


@pytest.mark.parametrize("value", [2, -1, -100, 255, 256, 257, 1 << 40])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_mask_values_beyond_0_and_1_are_rejected_with_their_value(tmp_path: Path, kind: str, value: int) -> None:
    (row,) = read(write(kind, tmp_path, [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, value]}]))
    assert (row.reason, f"loss_mask holds {value} for token 2" in row.detail) == ("bad-mask", True)


def test_unsigned_values_beyond_63_bits_do_not_wrap_around(tmp_path: Path) -> None:
    huge = (1 << 64) - 7
    kind = pa.list_(pa.uint64())
    for ids, mask, reason in (([1, huge], [0, 1], "ids-out-of-vocab"), ([1, 2], [0, huge], "bad-mask")):
        pq.write_table(
            pa.table({"input_ids": pa.array([ids], kind), "loss_mask": pa.array([mask], kind)}), tmp_path / "c.parquet"
        )
        (row,) = read(tmp_path / "c.parquet")
        assert (row.reason, f"holds {huge} " in row.detail) == (reason, True)


def test_ids_and_mask_of_other_lengths_are_rejected_with_both(tmp_path: Path) -> None:
    (row,) = read(jsonl(tmp_path / "c.jsonl", [{"id": "x", "input_ids": [1, 2, 3], "loss_mask": [0, 1]}]))
    assert (row.sample_id, row.reason, row.n_tokens) == ("x", "length-mismatch", 3)
    assert row.detail == "line 1: 3 input_ids, 2 loss_mask"


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


# One sample of four tokens, of which the last two are supervised, as each kind of source spells it.
SPELLINGS: dict[str, dict[str, Any]] = {
    "hscache": {"loss_mask": [0, 0, 1, 1], "source": "x"},
    "speculators": {"loss_mask": [0, 0, 1, 1], "seq_len": 4},
    "labels": {"labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]},
    "trl-completion": {"completion_mask": [0, 0, 1, 1]},
    "trl-assistant": {"assistant_masks": [0, 0, 1, 1]},
    "trl-both": {"completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 0, 1, 1], "labels": [5, 6, 7, 8]},
    "mask-before-labels": {"loss_mask": [0, 0, 1, 1], "labels": [5, 6, 7, 8]},
    "specforge": {"input_ids": [[5, 6, 7, 8]], "loss_mask": [[0, 0, 1, 1]], "attention_mask": [[1, 1, 1, 1]]},
    "padded-right": {
        "input_ids": [5, 6, 7, 8, 0],
        "labels": [-100] * 2 + [7, 8, -100],
        "attention_mask": [1] * 4 + [0],
    },
    "padded-left": {"input_ids": [0, 5, 6, 7, 8], "loss_mask": [0, 0, 0, 1, 1], "attention_mask": [0] + [1] * 4},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_row_means_the_same_in_every_spelling_and_container(tmp_path: Path, spelling: str, kind: str) -> None:
    rows = [{"primary_id": f"r{i}", "input_ids": [5, 6, 7, 8], **SPELLINGS[spelling]} for i in range(2)]
    expected = [(i, f"r{i}", [5, 6, 7, 8], [0, 0, 1, 1], None, "") for i in range(2)]
    assert plain(read(write(kind, tmp_path, rows))) == expected


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"labels": [-100, 3]}, "labels holds 3 for token 1, which is 2"),
        ({"labels": [-1, 2]}, "labels holds -1 for token 0, which is 1"),
        ({"completion_mask": [0, 2]}, "completion_mask holds 2 for token 1"),
        ({"assistant_masks": [0, -100]}, "assistant_masks holds -100 for token 1"),
        ({"loss_mask": [0, 1], "attention_mask": [1, 2]}, "attention_mask holds 2 for token 1"),
    ],
)
def test_a_wrong_mask_is_reported_with_column_and_value(tmp_path: Path, columns: dict[str, Any], told: str) -> None:
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        (row,) = read(write(kind, folder, [{"input_ids": [1, 2], **columns}]))
        assert (row.reason, told in row.detail) == ("bad-mask", True), kind


@pytest.mark.parametrize(
    ("ids", "told"),
    [([1, 2.5], "2.5"), (["1"], "'1'"), ("12", "'12'"), ([1, 1 << 70], str(1 << 70)), (None, "missing")],
)
def test_a_bad_row_is_reported_with_column_and_value(tmp_path: Path, ids: object, told: str) -> None:
    (row,) = read(jsonl(tmp_path / "c.jsonl", [{"input_ids": ids, "loss_mask": [0, 1]}]))
    assert row.detail.startswith("line 1: input_ids ")
    assert told in row.detail


def test_the_source_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "c.jsonl", [{"input_ids": [1, 2], "labels": [-100, 2]}] * 3)
    assert len(read(path)) == 3
    assert capsys.readouterr().err == f"{path}: input_ids + labels\n"


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    lists = pa.array([[1, 2]], pa.list_(pa.int32()))
    table = pa.Table.from_arrays([lists, lists, lists], names=["input_ids", "loss_mask", "input_ids"])
    path = tmp_path / f"c.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(InputError) as caught:
        read(path)
    assert (caught.value.code, caught.value.exit_code) == ("corpus-format", 2)
    assert "two columns named input_ids" in caught.value.message


def test_a_reject_of_several_files_names_file_and_row_wherever_they_lie(tmp_path: Path) -> None:
    details = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        (folder / "deep").mkdir(parents=True)
        jsonl(folder / "a.jsonl", as_lines(ROWS) + b"{\n")
        parquet(folder / "deep" / "b.parquet", [*ROWS, {"input_ids": [1], "loss_mask": [0, 1]}])
        got = read(folder / "**" / "*.*")
        assert reasons(got) == ["", "", "", "bad-json", "", "", "", "length-mismatch"]
        assert [row.row for row in got] == list(range(8))
        assert got[4].reject("empty", "no tokens").detail == "deep/b.parquet row 0: no tokens"
        details.append([row.detail for row in got if isinstance(row, Reject)])
    assert details[0] == details[1]
    assert details[0][0].startswith(f"a.jsonl line 4: byte {len(as_lines(ROWS))}: ")
    assert details[0][1].startswith("deep/b.parquet row 3: ")
