"""compare_states.py without fla: right states cost nothing, wrong ones do or are refused, and somebody tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fla_env
import pytest
from compare_states import compare_states, print_comparison, variants, write_corpus
from hstrain.data.packs import split

import hscache

pytestmark = pytest.mark.thorough

RECOMPUTE, LIVE, KIND = "verify --recompute", "doctor --target (live states)", "doctor (norm kind)"
ONLY = [
    "built again",
    f"fla {fla_env.NEW}",
    "taps in reverse order",
    "rows one token late",
    "final norm by w, not 1+w",
    "every norm by w, not 1+w",
    "q, k not normalised",
    "noise of the states' size",
]


@pytest.fixture(scope="module")
def found(scored: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    store, run = scored
    folder = tmp_path_factory.mktemp("states")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fla_env, "is_ready", lambda _: False)
        patch.setattr("os.fsync", lambda fd: None)
        return compare_states(run, store, folder, ONLY)


def row(found: dict[str, Any], states: str) -> dict[str, Any]:
    (line,) = [line for line in found["rows"] if line["states"] == states]
    return dict(line)


def test_the_given_store_comes_first_and_nobody_finds_anything(found: dict[str, Any]) -> None:
    assert [line["states"] for line in found["rows"]] == ["as built", *ONLY]
    first = found["rows"][0]
    assert first["tau"] > 1.05, "it must have learnt something, or nothing can be lost"
    assert (first["found_by"], first["less_first"], first["samples"]) == ([], None, found["samples"])


def test_the_same_states_built_again_cost_nothing(found: dict[str, Any]) -> None:
    again = row(found, "built again")
    low, high = again["less_first"]["interval"]
    assert low <= 0 <= high
    assert again["less_first"]["other_walks"] <= 1, "another padded width may round a last bit otherwise"
    assert again["less_first"]["samples"] == found["samples"] > 3
    assert again["found_by"] == []


def test_a_wrong_final_norm_is_found_and_costs_a_drafter_nothing(found: dict[str, Any]) -> None:
    wrong, again = row(found, "final norm by w, not 1+w"), row(found, "built again")
    for figure in ("tau", "tau_all", "ddtree", "less_first"):
        assert wrong[figure] == again[figure], "a drafter reads neither the final state nor the final norm"
    assert wrong["found_by"] == [RECOMPUTE, KIND]


def test_wrong_norms_in_the_blocks_cost_acceptance_and_are_found(found: dict[str, Any]) -> None:
    wrong = row(found, "every norm by w, not 1+w")
    assert wrong["less_first"]["interval"][1] < 0
    assert wrong["found_by"] == [RECOMPUTE, KIND, LIVE]


def test_states_that_say_nothing_leave_a_token_a_step(found: dict[str, Any]) -> None:
    wrong = row(found, "noise of the states' size")
    assert wrong["less_first"]["interval"][1] < 0
    assert wrong["tau"] < 1.05
    assert wrong["found_by"] == [RECOMPUTE, LIVE]


@pytest.mark.parametrize("states", ["taps in reverse order", "rows one token late"])
def test_states_of_another_place_change_what_is_accepted_and_are_found(found: dict[str, Any], states: str) -> None:
    wrong = row(found, states)
    assert wrong["less_first"]["other_walks"] > 0
    assert wrong["found_by"] == [RECOMPUTE, LIVE]


def test_states_that_explode_are_rejected_by_the_build(found: dict[str, Any]) -> None:
    wrong = row(found, "q, k not normalised")
    assert wrong["rejected"]["non-finite"] > 0
    assert wrong["refused"] in (None, "refused by build: non-finite")


def test_without_fla_its_line_says_how_to_get_it(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert row(found, f"fla {fla_env.NEW}")["refused"] == f"not installed: python tools/bench/fla_env.py {fla_env.NEW}"
    print_comparison(found)
    out = capsys.readouterr().out
    assert f"{found['samples']} held-out samples" in out
    for line in found["rows"]:
        (told,) = [text for text in out.splitlines() if text.strip().startswith(f"{line['states']} ")]
        assert (line["refused"] or f"{line['tau']:.3f}") in told


def test_every_variant_has_a_name_of_its_own() -> None:
    names = [variant.name for variant in variants()]
    assert len(set(names)) == len(names)


def test_a_corpus_of_held_out_samples_has_the_same_ones_held_out(scored: tuple[Path, Path], tmp_path: Path) -> None:
    from hscache.corpus.readers import read_corpus

    store = hscache.open(scored[0])
    train, held, _ = split(store, 0.15)
    write_corpus(store, held[:3], train, tmp_path / "corpus.parquet")
    rows = list(read_corpus(tmp_path / "corpus.parquet"))
    assert [r.sample_id for r in rows[:3]] == [store.sample_ids[i] for i in held[:3]]
    assert len(rows) == 4
    assert store.sample_ids.index(rows[3].sample_id) in train
