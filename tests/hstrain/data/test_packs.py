"""From store to packs: what is held out, in which order, from which anchors, towards which labels."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hstrain.data.anchors import anchor_candidates, choose_anchors, choose_window, random_of, slot_tokens
from hstrain.data.packs import Pack, PackShape, PackStream, Schedule, split
from hstrain.manifest import DataSpec
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import hscache
from hscache.store.index import load_index
from hscache.store.reader import Store
from hscache.store.ring import ReadAhead
from tests.made.stores import TAPS, Little, flip, little_manifest, make_store
from tests.made.trainers import (
    BLOCK,
    LENGTHS,
    damage,
    pack_of,
    packs_differ_from_store,
    sample,
    train_manifest,
    training_store,
    turn_rows,
)

ALL = PackShape(TAPS, BLOCK, top=True)


@pytest.fixture(scope="module")
def store(little: Little) -> Store:
    return hscache.open(little.path)


def spec(**fields: Any) -> DataSpec:
    return train_manifest(data=fields).data


def packs_of(
    store: Store, one: DataSpec, *, seed: int = 0, start: int = 0, stop: int = 4, rank: int = 0, world: int = 1,
    shape: PackShape = ALL,
) -> list[list[Pack]]:  # fmt: skip
    """Return the packs of steps, with all samples of the store in the schedule."""
    schedule = Schedule(range(len(store)), store.n_tokens, one, seed)
    with PackStream(store, schedule, shape, one, seed=seed, start=start, stop=stop, rank=rank, world=world) as stream:
        return list(stream)


def blocks_in(packs: Iterable[Pack]) -> dict[str, list[int]]:
    """Return the anchors of every sample."""
    found: dict[str, list[int]] = {}
    for pack in packs:
        lo = pack.lo_N.tolist()
        firsts = sorted(set(lo))
        assert len(firsts) == len(pack.sample_ids) or not pack.sample_ids
        for sample_id, first in zip(pack.sample_ids, firsts, strict=False):
            assert sample_id not in found
            found[sample_id] = [int(a) for a, of in zip(pack.anchors_N, lo, strict=True) if of == first]
    return found


def epoch(store: Store, one: DataSpec, number: int = 0, **options: Any) -> list[Pack]:
    """Return all packs of an epoch."""
    schedule = Schedule(range(len(store)), store.n_tokens, one, options.get("seed", 0))
    before, here = (sum(len(schedule.steps(e)) for e in range(stop)) for stop in (number, number + 1))
    return [pack for packs in packs_of(store, one, start=before, stop=here, **options) for pack in packs]


# what is held out


def test_the_split_is_a_function_of_ids_alone(little: Little, store: Store, tmp_path: Path) -> None:
    packed = training_store(tmp_path / "packed", store={"codec": "int8", "chunk_tokens": 4, "shard_bytes": 9000})
    other = hscache.open(packed.path)
    assert other.manifest["plan"]["shards"] != store.manifest["plan"]["shards"]
    for fraction in (0.1, 0.3, 0.6):
        train, held, test = split(store, fraction)
        assert split(other, fraction) == (train, held, test)
        assert sorted(train + held) == list(range(len(store)))
        assert test == []


def test_a_corpus_that_grows_moves_no_sample_to_the_other_side(store: Store, tmp_path: Path) -> None:
    larger = hscache.open(training_store(tmp_path / "larger", LENGTHS * 4).path)
    before, after = ({s.sample_ids[i] for i in split(s, 0.3)[1]} for s in (store, larger))
    assert after & set(store.sample_ids) == before
    assert len(after) / len(larger) == pytest.approx(0.3, abs=0.15)


def test_something_is_held_out_whenever_two_samples_are_there(tmp_path: Path, store: Store) -> None:
    assert len(split(store, 1e-9)[1]) == 1
    assert split(store, 0.0) == (list(range(len(store))), [], [])
    one = hscache.open(training_store(tmp_path / "one", [9]).path)
    assert split(one, 0.5)[0] == [0]
    assert list(map(len, split(store, 1e-9, 1e-9))) == [len(store) - 2, 1, 1]
    for n, parts in ((0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 0, 1]), (3, [1, 1, 1])):
        assert list(map(len, split(named(f"s{i}" for i in range(n)), 0.5, 0.4))) == parts


def named(ids: Iterable[str]) -> Any:
    return SimpleNamespace(sample_ids=list(ids))


def test_the_test_samples_are_those_with_the_lowest_hashes() -> None:
    store = named(f"s{i}" for i in range(400))
    train, validation, test = split(store, 0.1, 0.2)
    assert sorted(train + validation + test) == list(range(400))
    assert (split(store, 0.2)[1], split(store, 0.2 + 0.1)[1]) == (test, sorted(test + validation))
    assert len(test) / 400 == pytest.approx(0.2, abs=0.06)
    assert len(validation) / 400 == pytest.approx(0.1, abs=0.04)
    # so a smaller test share is a part of a larger one
    assert set(split(store, 0.0, 0.1)[2]) < set(test)


@pytest.mark.parametrize("shares", [(0.1, 0.2), (1e-9, 1e-9), (0.5, 0.49)])
def test_with_a_test_the_answers_of_one_conversation_stay_together(shares: tuple[float, float]) -> None:
    store = named(f"chat{i}#{n}" for i in range(100) for n in range(3))
    for part in split(store, *shares):
        assert part
        chats = [store.sample_ids[i].partition("#")[0] for i in part]
        assert all(chats.count(chat) == 3 for chat in chats)
    assert split(named(f"chat#{n}" for n in range(5)), *shares) == ([0, 1, 2, 3, 4], [], [])


# order


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own(store: Store) -> None:
    orders = {}
    for seed in (0, 1):
        schedule = Schedule(range(len(store)), store.n_tokens, spec(), seed)
        for number in range(3):
            packs = schedule.packs(number)
            orders[seed, number] = tuple(i for pack in packs for i in pack)
            assert sorted(orders[seed, number]) == list(range(len(store)))
            assert Schedule(range(len(store)), store.n_tokens, spec(), seed).packs(number) == packs
    assert len(set(orders.values())) == len(orders)
    for tokens in (45, 200):  # how much goes into a pack does not change the order
        other = Schedule(range(len(store)), store.n_tokens, spec(pack_tokens=tokens), 0).packs(1)
        assert tuple(i for pack in other for i in pack) == orders[0, 1]


@given(
    st.lists(st.integers(2, 90), min_size=1, max_size=30), st.integers(2, 120), st.integers(1, 4), st.integers(3, 80)
)
def test_packs_keep_to_their_room_and_steps_to_their_packs(
    lengths: list[int], room: int, per_step: int, longest: int
) -> None:
    one = spec(pack_tokens=room, packs_per_step=per_step, max_tokens=longest)
    schedule = Schedule(range(len(lengths)), np.array(lengths), one, 0)
    for pack in (packs := schedule.packs(0)):
        assert pack
        assert sum(min(lengths[i], longest) for i in pack) <= room or len(pack) == 1
    steps = schedule.steps(0)
    assert [pack for step in steps for pack in step] == packs
    assert all(len(step) == per_step for step in steps[:-1])
    wanted = [(0, step) for step in steps] + [(1, step) for step in schedule.steps(1)]
    for start in (0, 1, len(steps), len(steps) + len(schedule.steps(1)) - 1):
        got = [pair for _, pair in zip(range(len(wanted) - start), schedule.from_step(start), strict=False)]
        assert got == wanted[start:]


def test_a_stream_begun_later_is_the_rest_of_the_whole_one(store: Store) -> None:
    one = spec(packs_per_step=2, max_tokens=25)
    whole, rest = packs_of(store, one, stop=7), packs_of(store, one, start=3, stop=7)
    assert len(rest) == 4
    for a, b in zip(whole[3:], rest, strict=True):
        assert [pack.sample_ids for pack in a] == [pack.sample_ids for pack in b]
        for x, y in zip(a, b, strict=True):
            for name in ("states_TLH", "positions_T", "anchor_ids_N", "anchors_N", "lo_N", "hi_N"):
                assert torch.equal(getattr(x, name), getattr(y, name))
            assert torch.equal(x.targets.tokens_NK, y.targets.tokens_NK)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_every_step_and_take_the_same_number_of_packs(store: Store, world: int) -> None:
    one = spec(packs_per_step=4)
    alone = packs_of(store, one)
    ranks = [packs_of(store, one, rank=rank, world=world) for rank in range(world)]
    for step, packs in enumerate(alone):
        assert len({len(rank[step]) for rank in ranks}) == 1
        shared = [rank[step][k] for k in range(len(ranks[0][step])) for rank in ranks]
        assert [pack.sample_ids for pack in shared[: len(packs)]] == [pack.sample_ids for pack in packs]
        for empty in shared[len(packs) :]:
            assert empty.sample_ids == []
            assert empty.targets.tokens_NK.eq(-1).all()


# anchors


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_an_anchor_is_supervised_has_a_supervised_successor_and_something_before_it(mask: list[bool]) -> None:
    wanted = [a for a in range(1, len(mask) - 1) if mask[a] and mask[a + 1]]
    assert anchor_candidates(np.array(mask, np.uint8)).tolist() == wanted


def test_anchors_are_drawn_evenly_without_repetition() -> None:
    mask = np.ones(22, np.uint8)
    drawn = [choose_anchors(mask, 5, random_of("test", i)).tolist() for i in range(2000)]
    assert all(len(set(some)) == 5 and some == sorted(some) for some in drawn)
    counts = Counter(a for some in drawn for a in some)
    assert sorted(counts) == list(range(1, 21))
    assert max(counts.values()) < 1.25 * min(counts.values())
    assert choose_anchors(mask, 20, random_of("test")).tolist() == list(range(1, 21))


def test_anchors_depend_on_seed_epoch_and_sample_and_on_nothing_else(store: Store) -> None:
    one = spec(anchors=3)
    first = blocks_in(epoch(store, one))
    assert set(first) == {i for i, n in zip(store.sample_ids, candidates(store), strict=True) if n}
    assert all(len(some) <= 3 for some in first.values())
    assert blocks_in(epoch(store, spec(anchors=3, pack_tokens=150))) == first
    assert blocks_in(epoch(store, spec(anchors=3, packs_per_step=3))) == first
    for world in (2, 3):
        shared: dict[str, list[int]] = {}
        for rank in range(world):
            shared |= blocks_in(epoch(store, spec(anchors=3, packs_per_step=4), rank=rank, world=world))
        assert shared == first
    assert blocks_in(epoch(store, one, 1)) != first
    assert blocks_in(epoch(store, one, seed=1)) != first


def candidates(store: Store) -> list[int]:
    return [len(anchor_candidates(store.loss_mask(i))) for i in range(len(store))]


def test_all_anchors_are_taken_where_they_are_few(store: Store) -> None:
    found = blocks_in(epoch(store, spec(anchors=512)))
    for i, sample_id in enumerate(store.sample_ids):
        assert found.get(sample_id, []) == anchor_candidates(store.loss_mask(i)).tolist()


# windows of long samples


def masked(n: int, turns: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """Return the loss mask of a sample that is supervised in these token ranges."""
    mask = np.zeros(n, np.uint8)
    for start, stop in turns:
        mask[start:stop] = 1
    return mask


@given(st.lists(st.booleans(), min_size=3, max_size=60), st.integers(3, 30), st.integers(1, 40), st.integers(0, 9))
def test_a_window_is_no_longer_than_it_may_and_holds_its_anchors_with_what_they_need(
    supervised: list[bool], most: int, most_anchors: int, seed: int
) -> None:
    mask = np.array(supervised, np.uint8)
    start, stop, anchors = choose_window(mask, most, most_anchors, random_of("test", seed))
    possible = anchor_candidates(mask).tolist()
    assert 0 <= start < stop <= len(mask)
    assert stop - start <= most
    assert bool(possible) == bool(len(anchors))
    assert len(anchors) <= most_anchors
    assert sorted(set(anchors.tolist()) & set(possible)) == anchors.tolist()
    assert all(start < a and a + 1 < stop for a in anchors.tolist())
    if len(anchors):
        assert start == 0 or stop - start == most  # as much context as there may be
    if possible and possible[-1] - possible[0] <= most - 3 and len(possible) <= most_anchors:
        assert anchors.tolist() == possible


@pytest.mark.parametrize("most_anchors", [999, 31])
@pytest.mark.parametrize(
    ("n", "turns"),
    [
        (300, [(40, 300)]),
        (300, [(1, 300)]),
        (120, [(0, 90)]),
        (400, [(10, 60), (180, 190), (200, 390)]),
        (90, [(10, 89)]),
    ],
)
def test_every_possible_anchor_of_a_long_sample_has_the_same_chance(
    n: int, turns: list[tuple[int, int]], most_anchors: int
) -> None:
    mask, most, draws = masked(n, turns), 64, 6000
    possible = anchor_candidates(mask)
    times = np.zeros(n)
    for i in range(draws):
        _, _, anchors = choose_window(mask, most, most_anchors, random_of("even", i))
        times[anchors] += 1
    chance = times[possible] / draws
    # by chance; and of a stretch with few anchors the share is rounded up
    apart = 5 * np.sqrt(chance.mean() / draws) + (0.05 * chance.mean() if most_anchors < 99 else 0)
    assert np.abs(chance - chance.mean()).max() < apart


def test_a_window_is_a_function_of_its_key() -> None:
    mask = masked(300, [(40, 300)])
    one, again, other = (choose_window(mask, 64, 8, random_of("window", i)) for i in (1, 1, 2))
    assert (one[:2], one[2].tolist()) == (again[:2], again[2].tolist())
    assert one[2].tolist() != other[2].tolist()


def test_long_samples_are_read_only_around_their_anchors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int, int]] = []
    sample_of = Store.sample

    def noting(self: Store, i: int, *, start: int = 0, stop: int | None = None, **options: Any) -> Any:
        read.append((i, start, int(self.n_tokens[i]) if stop is None else stop))
        return sample_of(self, i, start=start, stop=stop, **options)

    monkeypatch.setattr(Store, "sample", noting)
    one = spec(max_tokens=16, anchors=4)
    seen: dict[str, set[int]] = {}
    for number in range(25):
        read.clear()
        packs = epoch(store, one, number)
        windows = {i: (start, stop) for i, start, stop in read}
        assert len(read) == len(windows) == len(store)
        assert all(stop - start <= min(16, store.n_tokens[i]) for i, (start, stop) in windows.items())
        for sample_id, anchors in blocks_in(packs).items():
            start, stop = windows[store.index_of(sample_id)]
            assert all(start < a < stop - 1 for a in anchors)
            seen.setdefault(sample_id, set()).update(anchors)
        assert not packs_differ_from_store(packs, store, windows)
    for i, sample_id in enumerate(store.sample_ids):  # in time, every anchor is trained on
        assert len(seen.get(sample_id, ())) >= 0.9 * len(anchor_candidates(store.loss_mask(i)))


# labels


@pytest.mark.parametrize("shape", [PackShape(TAPS, BLOCK), ALL, PackShape(TAPS, BLOCK, final=True)])
def test_rows_labels_and_distributions_are_the_samples_own(store: Store, shape: PackShape) -> None:
    packs = epoch(store, spec(anchors=512), shape=shape)
    assert any(len(pack.sample_ids) > 1 for pack in packs)
    assert sum(len(pack.anchors_N) for pack in packs) == sum(candidates(store))
    assert packs_differ_from_store(packs, store, {}) == []


@pytest.mark.parametrize("array", ["tokens_NK", "rows_NK"])
def test_labels_or_rows_off_by_one_are_noticed(store: Store, array: str) -> None:
    """Planted: what public trainers got wrong."""
    (pack, *_) = epoch(store, spec(anchors=512), shape=PackShape(TAPS, BLOCK, final=True))
    wrong = dataclasses.replace(pack.targets, **{array: getattr(pack.targets, array).roll(1, 1)})
    assert packs_differ_from_store([dataclasses.replace(pack, targets=wrong)], store, {})


def test_blocks_end_with_their_turn_and_with_their_sample() -> None:
    ids, mask = np.arange(10, 22, dtype=np.int32), np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], np.uint8)
    tokens = slot_tokens(ids, mask, np.array([2, 3, 7, 9, 10]), 4)
    assert tokens.tolist() == [[13, 14, -1], [14, -1, -1], [18, 19, 20], [20, 21, -1], [21, -1, -1]]


def test_a_block_at_the_end_of_a_sample_says_nothing_of_the_next_one() -> None:
    pack = pack_of([(sample(9, seed=1), [7]), (sample(9, seed=2), [5])])
    assert pack.targets.tokens_NK[0].tolist() == [int(sample(9, seed=1).input_ids[8]), -1, -1]
    assert (pack.lo_N.tolist(), pack.hi_N.tolist()) == ([0, 7], [7, 12])


def test_samples_without_anchors_leave_no_trace(tmp_path: Path) -> None:
    pack = pack_of([(sample(9, turns=[(4, 5), (7, 8)]), [])])
    assert pack.sample_ids == []
    assert pack.targets.tokens_NK.eq(-1).all()
    rows = turn_rows()
    for row in rows[1:]:
        row.loss_mask[:] = 0
        row.loss_mask[3::2] = 1  # supervised tokens, but never two in a row
    little = make_store(tmp_path / "store", rows, manifest=little_manifest())
    packs = epoch(hscache.open(little.path), spec())
    assert list(blocks_in(packs)) == ["t0"]


def test_a_tap_that_is_the_final_state_is_refused(tmp_path: Path) -> None:
    def same(row: Any, arrays: dict[str, Any]) -> None:
        arrays["final_state"] = arrays["hidden_states"][:, 1].copy()

    store = hscache.open(training_store(tmp_path / "store", edit=same).path)
    for shape, refused in ((PackShape(TAPS, BLOCK, final=True), True), (PackShape((0, 3), BLOCK, final=True), False)):
        if refused:
            with pytest.raises(AssertionError, match="a tap is the target's final state"):
                epoch(store, spec(), shape=shape)
        else:
            epoch(store, spec(), shape=shape)


def test_taps_are_read_in_the_order_of_the_drafter(store: Store) -> None:
    (pack, *_) = epoch(store, spec(), shape=PackShape((0, 3), BLOCK))
    first = store.sample(store.index_of(pack.sample_ids[0]))
    n = int(pack.hi_N[pack.lo_N == 0].max())
    assert torch.equal(pack.states_TLH[:n], first.hidden_states[:n, [0, 2]])


# samples that cannot be read, and threads


def test_a_bad_sample_is_left_out_and_named(tmp_path: Path) -> None:
    little = training_store(tmp_path / "store")
    damage(little.path, "t3")
    store = hscache.open(little.path)
    packs = epoch(store, spec(anchors=512))
    assert [(i, what.split(":")[0]) for pack in packs for i, what in pack.bad] == [("t3", "store-damaged")]
    found = blocks_in(packs)
    assert set(found) == {i for i, n in zip(store.sample_ids, candidates(store), strict=True) if n} - {"t3"}
    clean = [pack for pack in packs if not pack.bad]
    assert packs_differ_from_store(clean, store, {}) == []
    (hit,) = [pack for pack in packs if pack.bad]
    assert packs_differ_from_store([hit], store, {}) == []


def test_samples_whose_masks_cannot_be_read_shift_no_other_window(tmp_path: Path) -> None:
    little, one = training_store(tmp_path / "store"), spec(max_tokens=16, anchors=512)
    whole = blocks_in(epoch(hscache.open(little.path), one))
    flip(little.path / "shards/00001.zarr/loss_mask/c.0", 1)
    store = hscache.open(little.path)
    packs = epoch(store, one)
    bad = {sample_id for pack in packs for sample_id, _ in pack.bad}
    index = load_index(little.path).to_pylist()
    assert bad == {row["sample_id"] for row in index if row["shard"] == 1}
    assert blocks_in(packs) == {i: anchors for i, anchors in whole.items() if i not in bad}


def threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith(("hstrain-pack", "hscache-read"))}


def test_a_stream_can_be_left_at_any_time(store: Store) -> None:
    one = spec()
    schedule = Schedule(range(len(store)), store.n_tokens, one, 0)
    for take in (0, 1, 5):
        with PackStream(store, schedule, ALL, one, seed=0, start=0, stop=1000) as stream:
            for _, _packs in zip(range(take), stream, strict=False):
                pass
            assert threads()
        assert not threads()


def test_an_error_of_the_thread_is_raised_where_the_pack_is_asked_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ReadAhead) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ReadAhead, "__next__", broken)
    with pytest.raises(ZeroDivisionError, match="planted"):
        packs_of(store, spec())
    assert not threads()


def test_packs_of_later_steps_do_not_change_those_in_hand(store: Store) -> None:
    """Buffers of the ring are used again: what a pack holds must be its own."""
    one = spec(pack_tokens=45)
    packs: Sequence[Pack] = epoch(store, one)
    assert packs_differ_from_store(packs, store, {}) == []
