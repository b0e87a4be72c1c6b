"""Reading a store: samples, ranges, taps and kinds."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hscache
from hscache.errors import InputError
from hscache.rows import Sample
from hscache.store.codecs import NAMES
from hscache.store.durable import Staging
from hscache.store.head import load_head
from hscache.store.index import committed_shards, read_shard
from hscache.store.layout import StorePaths, array_specs
from hscache.store.reader import as_torch
from tests.made.stores import (
    HIDDEN,
    TAPS,
    TOPK,
    VOCAB,
    Little,
    corpus_rows,
    head_weights,
    little_arrays,
    little_manifest,
    make_store,
    same_bits,
)


def good_ids(little: Little) -> list[str]:
    return [row.sample_id for row in little.rows if row.sample_id in little.arrays]


def test_samples_are_numbered_in_corpus_order_without_the_rejected(little: Little) -> None:
    store = hscache.open(little.path)
    assert store.sample_ids == ["s0", "s1", "s4", "s5", "s6"] == good_ids(little)
    assert len(store) == 5
    assert store.tags == ["math", "code", "code", None, "math"]
    assert store.n_tokens.tolist() == [len(little.arrays[name]["input_ids"]) for name in good_ids(little)]
    assert store.n_loss.tolist() == [len(little.arrays[name]["logit_lse"]) for name in good_ids(little)]
    assert [sample.sample_id for sample in store] == store.sample_ids
    assert store.complete
    assert (store.taps, list(store.specs)) == (list(TAPS), [s.name for s in store.specs.values()])


def test_every_array_comes_back_in_every_kind(little: Little) -> None:
    store = hscache.open(little.path)
    for i, name in enumerate(good_ids(little)):
        arrays = little.arrays[name]
        bits, numbers, tensors = (store.sample(i, kind=kind, verify=True) for kind in ("bits", "numpy", "torch"))
        assert bits.sample_id == name
        for field in ("input_ids", "loss_mask"):
            for sample in (bits, numbers):
                assert same_bits(getattr(sample, field), arrays[field])
            assert torch.equal(getattr(tensors, field), torch.from_numpy(arrays[field].copy()))
        for field in ("hidden_states", "final_state"):
            assert same_bits(getattr(bits, field), arrays[field])
            expected = as_torch(arrays[field].copy(), field)
            tensor = getattr(tensors, field)
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, expected)
            np.testing.assert_array_equal(getattr(numbers, field), expected.float().numpy())
            assert getattr(numbers, field).dtype == np.float32
        for sample in (bits, numbers):
            assert sample.logits is not None
            assert same_bits(sample.logits.ids, arrays["logit_ids"])
            assert same_bits(sample.logits.logprobs, arrays["logit_logprobs"])
            assert same_bits(sample.logits.lse, arrays["logit_lse"])
            assert sample.logits.positions.tolist() == (1 + np.flatnonzero(arrays["loss_mask"][1:])).tolist()
        assert tensors.logits is not None
        assert torch.equal(tensors.logits.lse, torch.from_numpy(arrays["logit_lse"].copy()))


def test_head_and_final_state_give_the_stored_distribution(little: Little) -> None:
    head = load_head(little.path / "target")
    weights = head_weights()
    assert torch.equal(head.embed, weights["embed"])
    assert torch.equal(head.norm, weights["norm"])
    for sample in hscache.open(little.path):
        assert sample.logits is not None
        assert sample.final_state is not None
        logits = head.logits(sample.final_state[sample.logits.positions - 1])
        lse = torch.logsumexp(logits, -1)
        torch.testing.assert_close(lse, sample.logits.lse)
        top, ids = logits.topk(TOPK, -1)
        assert torch.equal(ids.int(), sample.logits.ids)
        torch.testing.assert_close((top - lse[:, None]).half(), sample.logits.logprobs)


def test_tied_head_is_stored_once(tmp_path: Path) -> None:
    from hscache.store.head import write_target

    embed = torch.randn(VOCAB, HIDDEN)
    with Staging(tmp_path / "staging") as staging:
        facts = {"head": {"scale": 2.0, "softcap": 3.0}, "norm_kind": "w"}
        tensors = {"embed": embed, "lm_head": embed, "norm": torch.ones(HIDDEN)}
        write_target(tmp_path / "target", staging.path, tensors, facts, [])
        write_target(tmp_path / "target", staging.path, {}, {}, [])  # there already: left as it is
    head = load_head(tmp_path / "target")
    assert head.lm_head is head.embed
    assert torch.equal(head.embed, embed)  # float32 kept: bf16 would not hold it
    assert head.norm.dtype == torch.bfloat16  # ones are held by bf16
    state = torch.randn(5, HIDDEN)
    torch.testing.assert_close(head.logits(state), torch.tanh(2 * state @ embed.T / 3) * 3)


def test_negative_numbers_count_from_the_end(little: Little) -> None:
    store = hscache.open(little.path)
    for i in range(len(store)):
        assert store[i - len(store)].sample_id == store[i].sample_id


@pytest.mark.parametrize("i", [5, -6, 1 << 40])
def test_a_number_outside_the_store_is_refused(little: Little, i: int) -> None:
    with pytest.raises(InputError) as caught:
        hscache.open(little.path)[i]
    assert caught.value.code == "sample-unknown"


def test_samples_are_found_by_id(little: Little) -> None:
    store = hscache.open(little.path)
    assert [store.index_of(name) for name in store.sample_ids] == list(range(5))
    for name in ("s3", "s2", "never"):  # rejected by capture, by the plan, and unknown
        with pytest.raises(InputError) as caught:
            store.index_of(name)
        assert caught.value.code == "sample-unknown"


@given(st.integers(0, 4), st.data())
def test_a_token_range_is_that_part_of_the_whole(little: Little, i: int, data: st.DataObject) -> None:
    store = hscache.open(little.path)
    n = int(store.n_tokens[i])
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start + 1, n))
    whole, part = store.sample(i, kind="bits"), store.sample(i, start=start, stop=stop, kind="bits")
    for field in ("input_ids", "loss_mask", "hidden_states", "final_state"):
        assert same_bits(getattr(part, field), getattr(whole, field)[start:stop])
    assert whole.logits is not None
    assert part.logits is not None
    inside = (whole.logits.positions >= start) & (whole.logits.positions < stop)
    assert (part.logits.positions + start).tolist() == whole.logits.positions[inside].tolist()
    for field in ("ids", "logprobs", "lse"):
        assert same_bits(getattr(part.logits, field), getattr(whole.logits, field)[inside])


@pytest.mark.parametrize("mask", [[1, 0, 0, 0, 1], [1, 1, 0, 1, 0, 1], [0, 1], [1, 1, 1, 1, 1, 1, 1]])
def test_logit_rows_belong_to_the_supervised_tokens_but_the_first(tmp_path: Path, mask: list[int]) -> None:
    rows = [
        *corpus_rows((6,), seed=9),
        Sample(1, "x", np.arange(len(mask), dtype=np.int32), np.array(mask, np.uint8)),
    ]
    made = make_store(tmp_path / "store", rows)
    store = hscache.open(made.path)
    i = store.index_of("x")
    marked = [t for t in range(1, len(mask)) if mask[t]]
    for start in range(len(mask)):
        for stop in range(start + 1, len(mask) + 1):
            part = store.sample(i, start=start, stop=stop, kind="bits").logits
            assert part is not None
            expected = [t for t in marked if start <= t < stop]
            assert part.positions.tolist() == [t - start for t in expected]
            picks = [marked.index(t) for t in expected]
            assert same_bits(part.lse, made.arrays["x"]["logit_lse"][picks])


@pytest.mark.parametrize("span", [(0, 0), (3, 3), (4, 2), (-1, 3), (0, 6), (5, None), (6, 7)])
def test_a_range_outside_the_sample_is_refused(little: Little, span: tuple[int, int | None]) -> None:
    with pytest.raises(InputError) as caught:
        hscache.open(little.path).sample(0, start=span[0], stop=span[1])
    assert caught.value.code == "sample-range"


@pytest.mark.parametrize("taps", [[0], [3, 0], [2, 2], [3, 2, 0], []])
def test_taps_come_in_the_order_asked_for(little: Little, taps: list[int]) -> None:
    states = hscache.open(little.path).sample(1, taps=taps, kind="bits").hidden_states
    columns = [TAPS.index(tap) for tap in taps]
    assert same_bits(np.ascontiguousarray(states), little.arrays["s1"]["hidden_states"][:, columns])


def test_tensors_of_a_tap_subset_are_bfloat16(little: Little) -> None:
    states = hscache.open(little.path).sample(1, taps=[3]).hidden_states
    expected = as_torch(little.arrays["s1"]["hidden_states"][:, [2]], "hidden_states")
    assert torch.equal(states, expected)


@pytest.mark.parametrize("taps", [[1], [0, 4], [-1]])
def test_a_tap_that_is_not_stored_is_refused(little: Little, taps: list[int]) -> None:
    with pytest.raises(InputError) as caught:
        hscache.open(little.path).sample(0, taps=taps)
    assert caught.value.code == "array-absent"


@pytest.mark.parametrize("codec", NAMES)
def test_a_store_without_final_state_and_logits_says_so(tmp_path: Path, codec: str) -> None:
    manifest = little_manifest(states={"final_state": False}, logits={"topk": 0}, store={"codec": codec})
    made = make_store(tmp_path / "store", manifest=manifest)
    sample = hscache.open(made.path).sample(0, verify=True, kind="bits")
    assert (sample.final_state, sample.logits) == (None, None)
    assert same_bits(sample.hidden_states, made.arrays["s0"]["hidden_states"])


def test_an_opened_store_can_be_pickled_and_read_in_the_copy(little: Little) -> None:
    store = hscache.open(little.path)
    store.sample(0)
    copy = pickle.loads(pickle.dumps(store))
    for i in range(len(store)):
        assert torch.equal(copy[i].hidden_states, store[i].hidden_states)


def test_an_unfinished_store_gives_what_is_committed(tmp_path: Path) -> None:
    made = make_store(tmp_path / "store", shards=[0, 2])
    store = hscache.open(made.path)
    assert not store.complete
    assert 0 < len(store) < len(made.rows)
    assert store.sample_ids == [row.sample_id for row in made.rows if row.sample_id in made.arrays]
    for i, name in enumerate(store.sample_ids):
        assert same_bits(store.sample(i, kind="bits", verify=True).hidden_states, made.arrays[name]["hidden_states"])


def test_a_store_just_begun_is_empty_not_broken(tmp_path: Path) -> None:
    store = hscache.open(make_store(tmp_path / "store", shards=[]).path)
    assert (len(store), list(store), store.complete) == (0, [], False)


def test_only_directories_named_like_a_shard_are_shards(tmp_path: Path) -> None:
    for name in ("00000.zarr", "7.zarr", "0abc.zarr", "00003.zarr.old", "123456.zarr"):
        (tmp_path / "shards" / name).mkdir(parents=True)
        (tmp_path / "shards" / name / "zarr.json").write_bytes(b"{}")
    (tmp_path / "shards" / "00009.zarr").mkdir()
    assert committed_shards(tmp_path) == [0, 123456]


def test_equal_stores_made_at_other_times_hold_equal_content(tmp_path: Path) -> None:
    a, b = (make_store(tmp_path / name, time=name) for name in ("a", "b"))
    assert len(committed_shards(a.path)) == 3
    for shard in committed_shards(a.path):
        first, second = (read_shard(StorePaths(made.path).shard(shard)) for made in (a, b))
        assert first["content_digest"] == second["content_digest"]
        assert first["provenance"] != second["provenance"]
    assert (a.path / "index.parquet").read_bytes() == (b.path / "index.parquet").read_bytes()


def test_little_arrays_are_what_a_build_would_store() -> None:
    (row,) = corpus_rows((7,))
    arrays = little_arrays(row, little_manifest())
    specs = array_specs(n_taps=len(TAPS), hidden_size=HIDDEN, final_state=True, topk=TOPK, chunk_tokens=4)
    assert {spec.name: (spec.dtype, spec.inner) for spec in specs} == {
        name: (array.dtype, array.shape[1:]) for name, array in arrays.items()
    }
