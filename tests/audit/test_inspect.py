"""inspect: a good corpus gives no finding, and each planted fault is named by the verdict."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hscache.audit.inspect import FINDINGS, inspect_path, runs_of, sample_text
from hscache.corpus.readers import CORPUS_SCHEMA
from hscache.corpus.tokenize import tokenize_files
from hscache.errors import InputError
from hscache.rows import repeated_tokens
from tests.conftest import DATA
from tests.made.templates import make_tokenizer

Row = dict[str, Any]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("target"), "chatml")


@pytest.fixture(scope="module")
def good(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder, rng = tmp_path_factory.mktemp("good"), random.Random(0)
    letters = [chr(code) for code in range(33, 127)]
    chats = [
        [{"role": role, "content": "".join(rng.choices(letters, k=20))} for role in ("user", "assistant") * 2]
        for _ in range(40)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenize_files([folder / "a.jsonl"], target, folder / "a.parquet")
    return pq.read_table(folder / "a.parquet").to_pylist()


def begin_early(row: Row) -> None:
    starts = [i for i in range(1, len(row["loss_mask"])) if row["loss_mask"][i] and not row["loss_mask"][i - 1]]
    for start in starts:
        row["loss_mask"][start - 1] = 1


def begin_at_the_role(row: Row) -> None:
    starts = [i for i in range(1, len(row["loss_mask"])) if row["loss_mask"][i] and not row["loss_mask"][i - 1]]
    for start in starts:
        header = len("assistant\n") + 1
        row["loss_mask"][start - header : start] = [1] * header


def lose_the_end(row: Row) -> None:
    for start, stop in runs_of(np.array(row["loss_mask"], np.uint8)):
        assert start < stop
        row["loss_mask"][stop - 1] = 0


def loop(row: Row) -> None:
    (start, stop), *_ = runs_of(np.array(row["loss_mask"], np.uint8))
    row["input_ids"][start : stop - 1] = (row["input_ids"][start : start + 2] * 20)[: stop - 1 - start]


def be_cut(row: Row) -> None:
    row["finish_reason"] = "length"


def be_damaged(row: Row) -> None:
    row["loss_mask"] = row["loss_mask"][:-1]


FAULTS: dict[str, tuple[Callable[[Row], None] | None, int]] = {
    "boundary": (begin_early, 4),
    "begins-special": (begin_at_the_role, 40),
    "unended": (lose_the_end, 4),
    "repeats": (loop, 40),
    "cut": (be_cut, 8),
    "duplicates": (None, 8),
    "rejected": (be_damaged, 1),
}
"""Finding -> what is done to so many rows."""


def write(rows: list[Row], path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=CORPUS_SCHEMA), path)
    return path


def test_every_finding_is_planted() -> None:
    assert FAULTS.keys() == FINDINGS.keys()


def test_a_good_corpus_has_no_finding(good: list[Row], target: Path, tmp_path: Path) -> None:
    found = inspect_path(write(good, tmp_path / "c.parquet"), target)
    assert found["findings"] == []
    assert {text.replace(" ", ""): n for text, n in found["before"].items()} == {"nt\n": 80}
    assert found["last"] == {"<|im_end|>": 80}
    assert (found["samples"], found["runs"], found["cut"], found["duplicates"]) == (40, 80, 0, 0)
    assert found["supervised"] == 80 * 21


@pytest.mark.parametrize("code", FAULTS)
def test_the_verdict_names_a_planted_fault(good: list[Row], target: Path, tmp_path: Path, code: str) -> None:
    rows = json.loads(json.dumps(good))
    change, n = FAULTS[code]
    for i in range(n):
        if change is None:
            rows[i] = {**rows[20], "sample_id": f"again-{i}"}
        else:
            change(rows[i])
    found = inspect_path(write(rows, tmp_path / "c.parquet"), target)
    assert code in {finding["code"] for finding in found["findings"]}


def test_repeats_count_sequences_of_four() -> None:
    mask = np.ones(8, np.uint8)
    assert repeated_tokens(np.array([1, 2, 3, 4, 1, 2, 3, 4]), mask) == 1
    assert repeated_tokens(np.array([1, 2, 3, 4, 1, 2, 3, 5]), mask) == 0
    assert repeated_tokens(np.array([7] * 8), mask) == 4
    assert repeated_tokens(np.array([7] * 3), mask[:3]) == 0
    assert repeated_tokens(np.array([7] * 8), np.array([0] * 7 + [1], np.uint8)) == 1


def test_a_samples_text_shows_what_is_supervised(good: list[Row], target: Path, tmp_path: Path) -> None:
    path = write(good, tmp_path / "c.parquet")
    text = sample_text(path, good[3]["sample_id"], target)
    assert text.count("[[") == text.count("<|im_end|>]]") == 2
    with pytest.raises(InputError) as caught:
        sample_text(path, "none", target)
    assert caught.value.code == "sample-unknown"


def test_a_store_gives_statistics_too() -> None:
    found = inspect_path(DATA / "golden-v1" / "raw")
    assert found["samples"] > 0
    assert found["supervised"] > 0
