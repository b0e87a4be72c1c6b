"""The corpus file: whole under its name or not there; what is not in it has its reason beside it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hscache.corpus.readers import CORPUS_SCHEMA, read_corpus
from hscache.corpus.writer import CorpusWriter, Journal, journal_path, rejects_path
from hscache.errors import ConflictError, InputError


def test_good_rows_are_in_the_corpus_and_bad_ones_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "corpus.parquet"
    with CorpusWriter(out) as writer:
        writer.add("a", [1, 2, 3], [1, 0, 1], tag="math", source="x.jsonl", finish_reason="stop")
        writer.reject("x.jsonl", 1, "bad-json", "byte 7: ü")
        writer.add("b", [4, 5], [0, 1])
        assert not out.exists()
    assert pq.read_schema(out).equals(CORPUS_SCHEMA)
    assert [(row.sample_id, row.tag) for row in read_corpus(out)] == [("a", "math"), ("b", None)]
    (line,) = (tmp_path / "deep" / "corpus.rejected.jsonl").read_text().splitlines()
    assert json.loads(line) == {"source": "x.jsonl", "row": 1, "reason": "bad-json", "detail": "byte 7: ü"}
    report = writer.report
    assert (report.rows, report.samples, report.tokens, report.loss_tokens) == (3, 2, 5, 2)
    assert (report.rejected, report.finish_reasons) == ({"bad-json": 1}, {"stop": 1})
    report.say()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1 of 3 rows rejected: 1 bad-json" in captured.err
    assert sorted(p.name for p in out.parent.iterdir()) == ["corpus.parquet", "corpus.rejected.jsonl"]


def test_more_rows_than_a_row_group_are_all_there(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c.parquet") as writer:
        for i in range(2500):
            writer.add(f"r{i}", [i, i], [0, 1])
    assert [row.sample_id for row in read_corpus(tmp_path / "c.parquet")] == [f"r{i}" for i in range(2500)]


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    with suppress(KeyError), CorpusWriter(tmp_path / "c.parquet") as writer:
        writer.add("a", [1, 2], [0, 1])
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_an_existing_corpus_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "c.parquet"
    out.write_bytes(b"mine")
    with pytest.raises(ConflictError) as caught:
        CorpusWriter(out)
    assert caught.value.code == "corpus-exists"
    assert out.read_bytes() == b"mine"


def test_no_sample_is_an_error_that_keeps_the_reasons(tmp_path: Path) -> None:
    out = tmp_path / "c.parquet"
    writer = CorpusWriter(out)
    writer.reject("x.jsonl", 0, "bad-row", "found text")
    with pytest.raises(InputError) as caught:
        writer.__exit__(None, None, None)
    assert (caught.value.code, "1 bad-row" in caught.value.message) == ("corpus-empty", True)
    assert [p.name for p in tmp_path.iterdir()] == [rejects_path(out).name]
    assert caught.value.hint == f"see {rejects_path(out)}"


def test_an_input_without_rows_names_no_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        CorpusWriter(tmp_path / "c.parquet").__exit__(None, None, None)
    assert (caught.value.code, caught.value.hint) == ("corpus-empty", "the input has no rows")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["c.jsonl", "c", "c.PARQUET", "c.parquet.gz"])
def test_a_corpus_under_a_name_that_promises_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as caught:
        CorpusWriter(tmp_path / "new" / name)
    assert (caught.value.code, caught.value.exit_code) == ("corpus-format", 2)
    assert str(caught.value.hint).endswith(".parquet")
    assert not list(tmp_path.iterdir())


def test_a_journal_gives_back_what_it_was_given(tmp_path: Path) -> None:
    path = journal_path(tmp_path / "c.parquet")
    with Journal(path, {"generate": 1}) as journal:
        journal.append({7: [1, 2], 0: [3]})
    path.write_bytes(path.read_bytes() + b"[1,[4\n[2,[5]]\n")
    with Journal(path, {"generate": 1}) as journal:
        assert [i for i in range(9) if i in journal] == [0, 7]
        journal.append({1: []}, ["made"])
        assert [journal.read(i) for i in (0, 1, 7)] == [([3], []), ([], ["made"]), ([1, 2], [])]
        journal.append({2: [6]})
        assert journal.read(2) == ([6], [])
        with pytest.raises(ConflictError, match="another process"):
            Journal(path, {"generate": 1})
    with pytest.raises(ConflictError, match="seed: None there, 3 here"):
        Journal(path, {"generate": 1, "seed": 3})


def test_reasons_of_an_earlier_try_do_not_stay(tmp_path: Path) -> None:
    rejects_path(tmp_path / "c.parquet").write_text("old")
    with CorpusWriter(tmp_path / "c.parquet") as writer:
        writer.add("a", [1, 2], [0, 1])
    assert [p.name for p in tmp_path.iterdir()] == ["c.parquet"]
