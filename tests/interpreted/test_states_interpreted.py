"""What fla's real kernels cost a drafter in acceptance: nothing, or the build refuses them.

As in :mod:`test_verify_interpreted`; two held-out samples of 80 tokens, over the chunk border at 64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fla_env
import pytest
from compare_states import compare_states

pytestmark = pytest.mark.fla

NEW, OLD, UNGUARDED = f"fla {fla_env.NEW}", f"fla {fla_env.OLD}", f"fla {fla_env.OLD}, its guard off"


@pytest.fixture(scope="module")
def rows(scored: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    for version in (fla_env.NEW, fla_env.OLD):
        if not fla_env.is_ready(version):
            pytest.skip(f"fla {version} is not installed for the interpreter: python tools/bench/fla_env.py {version}")
    store, run = scored
    found = compare_states(run, store, tmp_path_factory.mktemp("states"), [NEW, OLD, UNGUARDED], samples=2)
    return {row["states"]: row for row in found["rows"]}


def test_states_of_flas_kernels_are_accepted_as_those_of_torch(rows: dict[str, Any]) -> None:
    less = rows[NEW]["less_first"]
    low, high = less["interval"]
    assert low <= 0 <= high
    assert (less["samples"], less["other_walks"]) == (2, 0)
    assert rows[NEW]["tau_all"] == pytest.approx(rows["as built"]["tau_all"], abs=0.05)
    assert rows[NEW]["found_by"] == []


def test_kernels_that_misread_grouped_heads_are_refused(rows: dict[str, Any]) -> None:
    assert rows[OLD]["refused"] == "refused by build: kernel-wrong-states"


def test_without_the_guard_their_states_are_found_or_were_rejected(rows: dict[str, Any]) -> None:
    wrong = rows[UNGUARDED]
    assert wrong["rejected"] or {"verify --recompute", "doctor --target (live states)"} <= set(wrong["found_by"])
