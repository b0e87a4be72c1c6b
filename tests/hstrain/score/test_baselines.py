"""Baselines of drafting: each draft is that of a slow, plain definition, on texts that repeat."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hstrain.score.baselines import NAMES, baseline_scores

import hscache
from hscache.rows import Sample
from tests.made.stores import little_manifest, make_store

B = 5
pytestmark = pytest.mark.usefixtures("no_disk")


def texts(n: int, seed: int) -> list[Sample]:
    """Return rows over six tokens, so that contexts of every length come again; each ends in a loop."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        ids = np.r_[rng.integers(0, 6, rng.integers(2, 30)), [1, 2, 3] * int(rng.integers(0, 4))].astype(np.int32)
        mask = (rng.random(len(ids)) < 0.8).astype(np.uint8)
        mask[-1] = 1
        rows.append(Sample(i, f"s{i}", ids, mask))
    return rows


def most_frequent(training: list[list[int]]) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in training:
        for n in range(1, 5):
            for j in range(n, len(text)):
                counts[tuple(text[j - n : j])][text[j]] += 1
    return {key: min(found, key=lambda token: (-found[token], token)) for key, found in counts.items()}


def by_table(table: dict[tuple[int, ...], int], text: list[int], longest: int) -> list[int]:
    text, drafted = list(text), list[int]()
    for _ in range(B - 1):
        known = (table.get(tuple(text[-n:])) for n in range(min(longest, len(text)), 0, -1))
        drafted.append(next((token for token in known if token is not None), -1))
        text.append(drafted[-1])
    return drafted


def by_lookup(text: list[int]) -> list[int] | None:
    for n in (4, 3, 2):
        for j in range(len(text) - n - 1, -1, -1):
            if text[j : j + n] == text[-n:]:
                copy = list(text)
                for k in range(B - 1):
                    copy.append(copy[j + n + k])
                return copy[len(text) :]
    return None


def test_every_draft_is_that_of_the_plain_definition(tmp_path: Path) -> None:
    rows = texts(40, seed=3)
    store = hscache.open(make_store(tmp_path / "store", rows, manifest=little_manifest()).path)
    training, numbers = list(range(0, len(store), 2)), list(range(1, len(store), 2))
    table = most_frequent([store.input_ids(i).tolist() for i in training])
    found = baseline_scores(store, training, numbers, B)
    assert tuple(found) == NAMES
    right = dict.fromkeys(NAMES, 0)
    for at, i in enumerate(numbers):
        ids, mask = store.input_ids(i).tolist(), store.loss_mask(i).tolist()
        score = found["bigram"][at]
        assert score.anchors_N.tolist() == [p for p in range(1, len(ids) - 1) if mask[p] and mask[p + 1]]
        for row, p in enumerate(score.anchors_N.tolist()):
            text = ids[: p + 1]
            copied = by_lookup(text)
            drafts = {"bigram": by_table(table, text, 1), "5-gram": by_table(table, text, 4)}
            drafts |= {"lookup": copied or [-1] * (B - 1), "lookup, 5-gram": copied or drafts["5-gram"]}
            left = next((k for k in range(len(ids) - p) if p + k + 1 == len(ids) or not mask[p + k + 1]), 0)
            for name, draft in drafts.items():
                wanted = [k < left and draft[k] == ids[p + 1 + k] for k in range(B - 1)]
                assert found[name][at].correct_NK[row].tolist() == wanted, (name, text, draft)
                right[name] += sum(wanted)
    assert all(right.values()), "every baseline is right somewhere"


def test_without_training_samples_there_is_only_the_lookup(tmp_path: Path) -> None:
    store = hscache.open(make_store(tmp_path / "store", texts(8, seed=1), manifest=little_manifest()).path)
    assert tuple(baseline_scores(store, [], range(len(store)), B)) == ("lookup",)


def test_tables_count_a_bounded_number_of_tokens_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = hscache.open(make_store(tmp_path / "store", texts(20, seed=2), manifest=little_manifest()).path)
    monkeypatch.setattr("hstrain.score.baselines._MOST_TOKENS", 1)
    first = baseline_scores(store, [0, 1, 2], [3, 4, 5], B)
    assert "count the first 1 of 3 training samples" in capsys.readouterr().err
    monkeypatch.undo()
    same = baseline_scores(store, [0], [3, 4, 5], B)
    for name in NAMES:
        for a, b in zip(first[name], same[name], strict=True):
            assert np.array_equal(a.correct_NK, b.correct_NK)
