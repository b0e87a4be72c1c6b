"""The cache alone and live decoding tell the same acceptance lengths, step by step, on a trained hybrid target.

And they do not once either side sees a row too many, a row too few, or other layers: the agreement is worth something.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import compare_walks
import pytest
import torch
from hstrain.data.packs import Pack, split
from hstrain.drafter.attention import Backend, Blocks
from hstrain.drafter.losses import Head
from hstrain.live.decode import Draft, decode
from hstrain.live.target import LiveTarget, Sampling, open_target
from hstrain.run.checkpoint import load_drafter
from hstrain.score import walk as evaluate
from hstrain.score.ddtree import SIZES
from hstrain.score.walk import SampleScore, score_store, summarise

import hscache
from hscache.store.head import load_head
from tests.conftest import TINY_HYBRID
from tests.made.hybrid import NEW_TOKENS, PROMPTS, Hybrid


def compare(hybrid: Hybrid, **changes: Any) -> list[dict[str, Any]]:
    options = {
        "held_out": 1.0,
        "samples": None,
        "dtype": "float32",
        "peer": None,
        "target": str(hybrid.target),
        **changes,
    }
    return compare_walks.compare(argparse.Namespace(store=hybrid.store, checkpoint=hybrid.run, **options))


@pytest.fixture(scope="module")
def found(hybrid: Hybrid) -> list[dict[str, Any]]:
    return compare(hybrid)


@pytest.fixture(scope="module")
def scores(hybrid: Hybrid) -> list[SampleScore]:
    drafter, _ = load_drafter(hybrid.run)
    store, head = hscache.open(hybrid.store), Head(load_head(hybrid.store / "target"), "cpu", torch.float32)
    return score_store(drafter, head, store, range(len(store)), trees=SIZES)


@contextmanager
def opened(hybrid: Hybrid) -> Iterator[tuple[LiveTarget, Draft]]:
    drafter, _ = load_drafter(hybrid.run)
    with open_target(str(hybrid.target), drafter.config.taps, dtype="float32", device="cpu") as (target, _):
        yield target, Draft(drafter, load_head(hybrid.store / "target"), target.device)


def test_every_list_of_lengths_is_the_same(found: list[dict[str, Any]], hybrid: Hybrid) -> None:
    assert [entry["sample_id"] for entry in found] == hscache.open(hybrid.store).sample_ids
    assert len(found) == len(PROMPTS)
    for entry in found:
        assert entry["same_text"], entry
        assert entry["cache"] == entry["live"], entry["sample_id"]
        assert entry["same"]


def test_the_drafter_is_accepted_at_some_steps_and_refused_at_others(found: list[dict[str, Any]]) -> None:
    steps = [length for entry in found for length in entry["cache"]]
    assert {1, 2, 3} < set(steps) <= set(range(1, 7))
    assert 1.3 < sum(steps) / len(steps) < 4
    assert any(sum(entry["cache"]) == NEW_TOKENS - 1 for entry in found), "one that fills its room"
    assert any(sum(entry["cache"]) < NEW_TOKENS - 1 for entry in found), "one that ends with an end token"


# the comparison notices what it is there to notice


def parted(found: list[dict[str, Any]]) -> list[str]:
    """Return the samples whose lists differ, the live text being right nevertheless: a bad draft costs only steps."""
    assert all(entry["same_text"] for entry in found)
    for entry in found:
        assert entry["same"] == (entry["cache"] == entry["live"])
        assert entry["same"] or "from the cache" in entry["why"]
    return [entry["sample_id"] for entry in found if not entry["same"]]


def test_other_taps_live_are_noticed(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compare_walks, "open_target", lambda path, taps, **how: open_target(path, [t - 1 for t in taps], **how)
    )
    found = compare(hybrid, samples=2)
    assert parted(found)
    for entry in found:
        assert entry["same"] or re.search(r"two best in slot \d: cache: \d+: [-\d.]+, .*; live: \d+: ", entry["why"]), (
            entry
        )


def test_the_anchors_own_row_in_the_live_context_is_noticed(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = hscache.open(hybrid.store).sample(0)
    with opened(hybrid) as (target, _):
        states = target.prefill(sample.input_ids.tolist()).states.bfloat16()

    def too_much(self: Draft, anchor: int) -> torch.Tensor:
        """Draft from a context that has the anchor's row, as if the target had read it before."""
        assert anchor == sample.input_ids[self.length]
        at, none = torch.tensor([self.length]), torch.zeros(1, dtype=torch.long)
        new = self.drafter.context(states[self.length, None], at)
        grown = [(torch.cat((a[0], b[0])), torch.cat((a[1], b[1]))) for a, b in zip(self._context, new, strict=True)]
        blocks = Blocks(at, none, at + 1, self.block_size, self.length + 1)
        inputs = evaluate.block_inputs(torch.tensor([anchor]), self.head.embed, self.drafter.config)
        return self.head.logits(self.drafter.draft(inputs, blocks, grown)[1:])

    monkeypatch.setattr(Draft, "propose", too_much)
    assert parted(compare(hybrid, samples=1)) == [sample.sample_id]


def test_the_anchors_own_row_in_the_walk_is_noticed(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(self: Pack, block_size: int, backend: Backend) -> Blocks:
        rows = len(self.positions_T)
        return Blocks(self.anchors_N, self.lo_N, (self.hi_N + 1).clamp(max=rows), block_size, rows, backend)

    monkeypatch.setattr(Pack, "blocks", too_much)
    assert parted(compare(hybrid, samples=2))


def test_a_live_context_one_row_late_is_noticed(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Draft.extend

    def late(self: Draft, states: torch.Tensor) -> None:
        if self.length == 0:
            self.last = torch.zeros_like(states[:1])  # type: ignore[attr-defined]
        shifted = torch.cat((self.last, states[:-1]))  # type: ignore[attr-defined]
        self.last = states[-1:]  # type: ignore[attr-defined]
        extend(self, shifted)

    monkeypatch.setattr(Draft, "extend", late)
    assert parted(compare(hybrid, samples=2))


def test_another_text_is_told_apart_from_another_walk(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(target: LiveTarget, *args: Any) -> Any:
        target.eos_ids = set(range(target.loaded.shape.vocab_size))
        return decode(target, *args)

    monkeypatch.setattr(compare_walks, "decode", stopped)
    (entry,) = compare(hybrid, samples=1)
    assert not entry["same_text"]
    assert "the live text parts from the stored one at token 1" in entry["why"]


def test_where_texts_part_the_targets_two_best_are_shown(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def altered(target: LiveTarget, *args: Any) -> Any:
        out = decode(target, *args)
        out.ids[5] = out.top_ids[5][1]
        return out

    monkeypatch.setattr(compare_walks, "decode", altered)
    (entry,) = compare(hybrid, samples=1)
    assert re.search(r"at token 5 of \d+: stored (\d+), live (\d+); live logits \1: [-\d.]+, \2: [-\d.]+", entry["why"])


# lossless


def test_greedy_text_with_the_drafter_is_the_text_without_it_and_the_stored_one(hybrid: Hybrid) -> None:
    store = hscache.open(hybrid.store)
    with opened(hybrid) as (target, draft):
        for i in range(3):
            sample = store.sample(i)
            ids, first = sample.input_ids.tolist(), int(sample.loss_mask.argmax())
            drafted = decode(target, ids[:first], Sampling(NEW_TOKENS), draft)
            assert drafted.ids == ids[first:] == decode(target, ids[:first], Sampling(NEW_TOKENS)).ids
            assert len(drafted.steps) < len(ids) - first - 1, "some drafts are accepted"


# trees


def test_a_larger_tree_accepts_more(scores: list[SampleScore]) -> None:
    figures: Any = summarise(scores)
    taus = [figures["tau"], *(figures["ddtree"][str(size)] for size in (8, 16, 32, 64))]
    assert taus == sorted(taus)
    assert taus[0] < taus[1] < taus[-1], "trees are worth something here"
    for score in scores:
        assert (score.tree_Ns[:, 1:] >= score.tree_Ns[:, :-1]).all(), "each tree holds the smaller one"


@pytest.mark.parametrize(("size", "samples"), [(8, 2), (32, 1)])
def test_the_walk_with_trees_is_that_of_live_trees(
    hybrid: Hybrid, scores: list[SampleScore], size: int, samples: int
) -> None:
    store, which = hscache.open(hybrid.store), SIZES.index(size)
    with opened(hybrid) as (target, draft):
        for i, score in enumerate(scores[:samples]):
            sample = store.sample(i)
            ids, first = sample.input_ids.tolist(), int(sample.loss_mask.argmax())
            out = decode(target, ids[:first], Sampling(NEW_TOKENS), draft, size)
            assert out.ids == ids[first:]
            assert [step.accepted for step in out.steps] == score.walk(score.tree_Ns[:, which])


# the program


def test_the_program_says_so(
    hybrid: Hybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(*arguments: object) -> Any:
        words = ["compare_walks.py", hybrid.store, hybrid.run, "--target", hybrid.target, *arguments]
        monkeypatch.setattr(sys, "argv", [*map(str, words)])
        with pytest.raises(SystemExit) as stop:
            compare_walks.main()
        return stop.value.code

    report = tmp_path / "walks.json"
    assert main("--held-out", 1, "--samples", 2, "--json", report) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 samples, float32: 2 lists of acceptance lengths are equal, 0 are not")
    assert [entry["same"] for entry in json.loads(report.read_text())] == [True, True]
    assert "no sample held out" in str(main("--held-out", 0))
    monkeypatch.setattr(
        compare_walks, "open_target", lambda path, taps, **how: open_target(path, [t - 1 for t in taps], **how)
    )
    assert main("--held-out", 1, "--samples", 1) == 1


def test_another_text_is_bad_whatever_its_lists(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def altered(target: LiveTarget, *args: Any) -> Any:
        out = decode(target, *args)
        out.ids[5] = out.top_ids[5][1]
        return out

    words = ["compare_walks.py", hybrid.store, hybrid.run, "--target", hybrid.target, "--held-out", 1, "--samples", 1]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    monkeypatch.setattr(compare_walks, "decode", altered)
    with pytest.raises(SystemExit) as stop:
        compare_walks.main()
    assert stop.value.code == 1
    assert "1 lists of acceptance lengths are equal, 0 are not; 1 live texts are not" in capsys.readouterr().out


@pytest.mark.thorough
def test_compared_is_what_the_run_held_out(
    scored: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, run = scored
    words = ["compare_walks.py", store, run, "--target", TINY_HYBRID]
    monkeypatch.setattr(sys, "argv", [*map(str, words)])
    with pytest.raises(SystemExit):
        compare_walks.main()
    opened = hscache.open(store)
    said = capsys.readouterr().err.splitlines()
    held = [opened.sample_ids[i] for i in split(opened, 0.15)[1]]
    assert len(said) == len(held)
    assert all(line.startswith(f"{name}: ") for line, name in zip(said, held, strict=True))
