"""A sample of ``tools/faults/mutate.py``, and that it sees what it should."""

from __future__ import annotations

from pathlib import Path

import mutate
import pytest

from hscache.store.reader import Store

pytestmark = pytest.mark.thorough


@pytest.fixture
def mutations(tmp_path: Path) -> mutate.Mutations:
    return mutate.Mutations(*mutate.make_stores(tmp_path, "zstd"))


def test_no_sampled_mutation_goes_unseen(mutations: mutate.Mutations) -> None:
    mutations.deletions()
    mutations.swaps()
    mutations.strangers()
    mutations.cuts(2)
    mutations.flips(4)
    result = mutations.result()
    assert result["missed"] == 0, [row["misses"] for row in result["rows"] if row["misses"]]
    assert result["bytes"] >= 64 << 10
    assert result["shards"] == 2
    assert {row["harm"] for row in result["rows"]} == {"delete", "swap", "double", "foreign", "cut", "flip"}
    assert all(row["found"] == row["tried"] > 0 for row in result["rows"])


def test_extra_files_are_seen(mutations: mutate.Mutations) -> None:
    mutations.extras()
    result = mutations.result()
    assert (result["missed"], {row["harm"] for row in result["rows"]}) == (0, {"extra"})


def test_a_blind_verify_and_a_lying_reader_are_told(
    mutations: mutate.Mutations, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = mutate.verify(mutations.store)
    real, lies = Store.sample, [False]

    def lying(store: Store, i: int, **kwargs: object) -> object:
        sample = real(store, i, **kwargs)  # type: ignore[arg-type]
        if lies[0]:
            sample.input_ids[0] ^= 1
        return sample

    with monkeypatch.context() as patch:
        patch.setattr(mutate, "verify", lambda root: blind)
        mutations.swaps()
    lies[0] = True
    with monkeypatch.context() as patch:
        patch.setattr(Store, "sample", lying)
        mutations.strangers()
    result = mutations.result()
    missed = [miss for row in result["rows"] for miss in row["misses"]]
    assert any("verify found nothing" in miss for miss in missed)
    assert any("gives other values for" in miss for miss in missed)
