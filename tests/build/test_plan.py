"""The plan: a pure function that places every row exactly once, within its limits, with exact sizes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from hscache.build.plan import REASONS, WINDOW_ROWS, Plan, array_bytes, make_plan, manifest_specs
from hscache.corpus.readers import read_corpus
from hscache.errors import ConfigError, EnvironmentFault, InputError
from hscache.manifest import BuildManifest, TargetShape
from hscache.model.facts import config_shape, read_shape, resolve_path, resolve_taps
from hscache.rows import Reject, Sample, count_supervised, supervised_positions
from hscache.store.layout import data_file_name
from hscache.store.shard_writer import ShardWriter
from tests.made.stores import HIDDEN, VOCAB, corpus_rows, little_arrays, little_manifest, make_store

Batches = list[list[Sample]]


class Sink:
    def __init__(self) -> None:
        self.batches: Batches = []

    def write_batch(self, rows: list[Sample]) -> None:
        self.batches.append(rows)


def length(row: Sample) -> int:
    return len(row.input_ids)


def plan_of(rows: Any, manifest: BuildManifest | None = None) -> tuple[Plan, Batches]:
    sink = Sink()
    plan = make_plan(rows, manifest or little_manifest(), hidden_size=HIDDEN, vocab_size=VOCAB, sink=sink)
    return plan, sink.batches


def row(i: int, ids: Any, mask: Any, name: str = "") -> Sample:
    return Sample(i, name or f"r{i}", np.array(ids, np.int32), np.array(mask, np.uint8))


@st.composite
def corpora(draw: st.DrawFn) -> list[Sample]:
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=60))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows = []
    for i, n in enumerate(lengths):
        ids, mask = rng.integers(0, VOCAB + (i % 7 == 3), n), rng.integers(0, 2, n)
        rows.append(row(i, ids, mask, name=f"r{i // 2 if i % 11 == 5 else i}"))
    rows[0] = row(0, [1, 2], [0, 1], "always-good")
    return rows


limits = st.builds(
    lambda batch_tokens, shard_bytes, min_loss: little_manifest(
        limits={"batch_tokens": batch_tokens, "min_loss_tokens": min_loss, "max_tokens": 64},
        store={"shard_bytes": shard_bytes},
    ),
    st.integers(1, 300),
    st.integers(1, 20_000),
    st.just(1),
)


@given(corpora(), limits)
def test_plan_depends_on_nothing_but_rows_and_manifest(rows: list[Sample], manifest: BuildManifest) -> None:
    (first, first_batches), (again, again_batches) = plan_of(rows, manifest), plan_of(iter(rows), manifest)
    assert first.table.equals(again.table)
    assert (first.corpus, first.batches, first.totals) == (again.corpus, again.batches, again.totals)
    assert [[r.row for r in b] for b in first_batches] == [[r.row for r in b] for b in again_batches]


def test_plan_does_not_depend_on_how_the_file_was_cut_or_packed(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "input_ids": list(range(i % 30 + 2)), "loss_mask": [1] * (i % 30 + 2)} for i in range(1500)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "one.parquet")
    pq.write_table(table, tmp_path / "many.parquet", row_group_size=7, data_page_size=64)
    text = b"".join(json.dumps(r).encode() + b"\n" for r in rows)
    (tmp_path / "c.jsonl").write_bytes(text)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(text))
    names = ("one.parquet", "many.parquet", "c.jsonl", "c.jsonl.gz")
    plans = [plan_of(read_corpus(tmp_path / name))[0] for name in names]
    assert all(plan.table.equals(plans[0].table) and plan.corpus == plans[0].corpus for plan in plans)
    assert len(plans[0].batches) > 1


@given(corpora(), limits)
def test_every_row_is_in_the_plan_exactly_once(rows: list[Sample], manifest: BuildManifest) -> None:
    plan, batches = plan_of(rows, manifest)
    table = plan.table.to_pylist()
    assert sorted(line["corpus_row"] for line in table) == list(range(len(rows)))
    planned = [line for line in table if line["status"] == "planned"]
    rejected = [line for line in table if line["status"] == "rejected"]
    assert len(planned) + len(rejected) == len(table) == plan.totals["rows"]
    assert (len(planned), len(rejected)) == (plan.totals["samples"], plan.totals["rejected"])
    assert all(line["reason"] in REASONS and line["shard"] == -1 for line in rejected)
    assert all(line["reason"] == "" and line["shard"] >= 0 for line in planned)
    assert plan.reasons() == Counter(line["reason"] for line in rejected)
    # the sink got what the table says, in its order
    assert [r.row for batch in batches for r in batch] == [line["corpus_row"] for line in planned]
    assert plan.totals["tokens"] == sum(line["n_tokens"] for line in planned)
    assert plan.totals["loss_tokens"] == sum(r.n_loss for batch in batches for r in batch)


@given(corpora(), limits)
def test_a_batch_keeps_its_token_budget_and_begins_with_its_longest_sample(
    rows: list[Sample], manifest: BuildManifest
) -> None:
    plan, batches = plan_of(rows, manifest)
    padded = 0
    for batch in batches:
        lengths = [length(r) for r in batch]
        assert lengths[0] == max(lengths)
        assert len(batch) == 1 or len(batch) * lengths[0] <= manifest.limits.batch_tokens
        padded += len(batch) * lengths[0]
    assert plan.totals["padded_tokens"] == padded


@given(corpora(), limits)
def test_shards_are_runs_of_whole_batches_within_their_size(rows: list[Sample], manifest: BuildManifest) -> None:
    plan, batches = plan_of(rows, manifest)
    assert [number for shard in plan.batches for number in shard] == list(range(len(batches)))
    specs = manifest_specs(manifest, HIDDEN)
    per_token = sum(spec.row_bytes for spec in specs if spec.axis == "tokens")
    per_loss = sum(spec.row_bytes for spec in specs if spec.axis == "loss")
    sizes = []
    for shard, numbers in enumerate(plan.batches):
        members = [r for number in numbers for r in batches[number]]
        n_tokens = sum(length(r) for r in members)
        n_loss = sum(r.n_loss for r in members)
        assert plan.shard_rows[shard] == (n_tokens, n_loss)
        sizes.append(n_tokens * per_token + n_loss * per_loss)
        assert len(numbers) == 1 or sizes[-1] <= manifest.store.shard_bytes
        lines = [line for line in plan.table.to_pylist() if line["shard"] == shard]
        assert [line["corpus_row"] for line in lines] == [r.row for r in members]
        assert [line["order"] for line in lines] == list(range(len(lines)))
        assert {line["batch"] for line in lines} == set(numbers)
    for shard, numbers in enumerate(plan.batches[1:], 1):  # a shard rolled only because the next batch did not fit
        first = batches[numbers[0]]
        first_bytes = sum(length(r) * per_token + r.n_loss * per_loss for r in first)
        assert sizes[shard - 1] + first_bytes > manifest.store.shard_bytes


def test_samples_of_two_windows_never_share_a_batch() -> None:
    rows = [row(i, [1] * (2 + i % 50), [1] * (2 + i % 50)) for i in range(WINDOW_ROWS + 300)]
    plan, batches = plan_of(rows, little_manifest(limits={"batch_tokens": 400}, store={"shard_bytes": 100_000}))
    windows = [{r.row // WINDOW_ROWS for r in batch} for batch in batches]
    assert all(len(window) == 1 for window in windows)
    assert sorted(windows, key=min) == windows
    assert plan.totals["samples"] == len(rows)


def test_a_shard_is_no_length_class() -> None:
    rows = [row(i, [1] * (2 + i % 60), [1] * (2 + i % 60)) for i in range(WINDOW_ROWS)]
    _, batches = plan_of(rows, little_manifest(limits={"batch_tokens": 64}))
    widths = [length(batch[0]) for batch in batches]
    assert widths != sorted(widths, reverse=True)
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2


FAULTS: dict[str, Sample | Reject] = {
    **{
        reason: Reject(1, "x", reason, "as a reader says it")
        for reason in ("bad-json", "damaged", "bad-row", "length-mismatch", "bad-mask")
    },
    "empty": row(1, [], []),
    "ids-out-of-vocab": row(1, [1, VOCAB, 3], [0, 1, 1]),
    "too-few-supervised": row(1, [1, 2, 3], [1, 0, 0]),
    "too-long": row(1, [1] * 65, [1] * 65),
    "repeats": row(1, [1, 2, 3, 4] * 2, [0] * 4 + [1] * 4),  # the last of four
    "cut-answer": Sample(1, "r1", np.array([4, 5], np.int32), np.array([0, 1], np.uint8), finish_reason="length"),
    "duplicate-id": row(1, [4, 5], [0, 1], "r0"),
}


def test_the_faults_cover_all_reasons() -> None:
    assert FAULTS.keys() == REASONS.keys()


@pytest.mark.parametrize("reason", REASONS)
def test_a_row_that_cannot_be_used_is_recorded_with_its_reason(reason: str) -> None:
    good = row(0, [1, 2, 3], [0, 1, 1])
    manifest = little_manifest(limits={"repeats": 0.2, "drop_cut": True})
    plan, batches = plan_of([good, FAULTS[reason], row(2, [6, 7], [0, 1])], manifest)
    assert plan.reasons() == {reason: 1}
    line = plan.table.to_pylist()[-1]
    assert (line["corpus_row"], line["reason"], bool(line["detail"])) == (1, reason, True)
    assert sorted(r.row for batch in batches for r in batch) == [0, 2]


@pytest.mark.parametrize("bad", [VOCAB, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    plan, _ = plan_of([row(0, [1, 2], [0, 1]), row(1, [1, bad], [0, 1])])
    assert plan.table.to_pylist()[-1]["detail"] == f"id {bad}, vocabulary of {VOCAB}"


def test_limits_are_inclusive() -> None:
    manifest = little_manifest(limits={"max_tokens": 8, "min_loss_tokens": 4, "repeats": 0.25})
    plan, _ = plan_of([row(0, [1, 2, 3, VOCAB - 1] * 2, [0] * 4 + [1] * 4)], manifest)
    assert plan.totals["samples"] == 1


def test_repeats_and_cut_answers_are_counted_and_kept_unless_limits_say_otherwise() -> None:
    cut = replace(FAULTS["cut-answer"], sample_id="cut")
    plan, _ = plan_of([row(0, [6, 7], [0, 1]), FAULTS["repeats"], cut, row(3, [7] * 65, [1] * 65)])
    assert plan.reasons() == {"too-long": 1}
    totals = {name: plan.totals[name] for name in ("samples", "loss_tokens", "repeated_tokens", "cut")}
    assert totals == {"samples": 3, "loss_tokens": 6, "repeated_tokens": 1, "cut": 1}


def test_rows_without_an_id_are_known_by_their_content() -> None:
    same = [Sample(i, "", np.array([1, 2], np.int32), np.array([0, 1], np.uint8)) for i in range(2)]
    other = Sample(2, "", np.array([1, 2], np.int32), np.array([1, 1], np.uint8))
    plan, _ = plan_of([*same, other])
    ids = plan.table["sample_id"].to_pylist()
    assert plan.reasons() == {"duplicate-id": 1}
    assert len(set(ids)) == 2
    assert all(len(name) == 32 for name in ids)


def test_a_rejected_row_does_not_take_the_id_of_a_good_one() -> None:
    plan, _ = plan_of([row(0, [1, VOCAB], [0, 1], "x"), row(1, [1, 2], [0, 1], "x")])
    assert plan.reasons() == {"ids-out-of-vocab": 1}


def test_any_change_of_order_or_content_changes_the_corpus_digest() -> None:
    rows = corpus_rows()
    digest = plan_of(rows)[0].corpus["digest"]
    swapped = [rows[1], rows[0], *rows[2:]]
    shorter = [*rows[:-1], Sample(6, "s6", rows[6].input_ids[:-1], rows[6].loss_mask[:-1])]
    masked = [*rows[:-1], Sample(6, "s6", rows[6].input_ids, 1 - rows[6].loss_mask)]
    digests = {digest, *(plan_of(changed)[0].corpus["digest"] for changed in (swapped, shorter, masked, rows[:-1]))}
    assert len(digests) == 5
    assert plan_of(rows)[0].corpus == {"rows": 7, "digest": digest}


@pytest.mark.parametrize(
    ("reasons", "told"),
    [([], "it has no rows"), (["empty"], "1 empty"), (["bad-json", "too-long", "too-long"], "2 too-long, 1 bad-json")],
)
def test_a_corpus_without_a_usable_row_is_refused_with_the_counts(reasons: list[str], told: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_of([FAULTS[reason] for reason in reasons])
    assert caught.value.code == "corpus-empty"
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("mask", "count"), [([], 0), ([1], 0), ([0, 1], 1), ([1, 1], 1), ([1, 0, 0], 0), ([0, 1, 0, 1], 2)]
)
def test_the_first_token_is_never_supervised(mask: list[int], count: int) -> None:
    assert count_supervised(np.array(mask, np.uint8)) == count_supervised(mask) == count
    assert supervised_positions(np.array(mask, np.uint8)).tolist() == [i for i, m in enumerate(mask) if m and i]


@pytest.mark.parametrize("final_state", [True, False])
@pytest.mark.parametrize("topk", [0, 4])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 64])
def test_sizes_are_those_of_the_written_files(tmp_path: Path, final_state: bool, topk: int, chunk_tokens: int) -> None:
    manifest = little_manifest(
        states={"final_state": final_state},
        logits={"topk": topk},
        store={"chunk_tokens": chunk_tokens, "shard_bytes": 1600},
    )
    plan, batches = plan_of(corpus_rows(), manifest)
    specs = manifest_specs(manifest, HIDDEN)
    found = dict.fromkeys((spec.name for spec in specs), 0)
    for shard, numbers in enumerate(plan.batches):
        writer = ShardWriter(tmp_path / f"w{shard}", specs, "raw")
        for r in (r for number in numbers for r in batches[number]):
            writer.add(r.sample_id, r.row, little_arrays(r, manifest))
        writer.commit(tmp_path / f"s{shard}", {})
        for spec in specs:
            found[spec.name] += (tmp_path / f"s{shard}" / spec.name / data_file_name(spec)).stat().st_size
    sizes = array_bytes(plan, specs)
    assert {entry.name: entry.files for entry in sizes} == found
    rows = {"tokens": plan.totals["tokens"], "loss": plan.totals["loss_tokens"]}
    assert all(entry.data == rows[entry.axis] * entry.per_row for entry in sizes)
    assert len(plan.batches) > 1


def shape(layers: int) -> TargetShape:
    return TargetShape(num_layers=layers, hidden_size=HIDDEN, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("layers", "taps"), [(64, (1, 16, 31, 46, 61)), (30, (1, 8, 14, 20, 27)), (8, (1, 2, 3, 4, 5))]
)
def test_default_taps_follow_the_five_tap_rule(layers: int, taps: tuple[int, ...]) -> None:
    assert resolve_taps(little_manifest(states={"taps": "default"}), shape(layers)).states.taps == taps


@pytest.mark.parametrize(
    ("taps", "layers"), [([0, 4], 4), ([2, 1], 4), ([1, 1], 4), ([4], 4), ("default", 4), ("default", 2)]
)
def test_taps_outside_unordered_or_repeated_are_refused(taps: Any, layers: int) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_taps(little_manifest(states={"taps": taps}), shape(layers))
    assert caught.value.code == "taps-invalid"


def test_last_block_and_first_block_are_taps() -> None:
    resolved = resolve_taps(little_manifest(states={"taps": [0, 3]}), shape(4))
    assert (resolved.states.taps, resolved.target.shape) == ((0, 3), shape(4))


def config(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


FACTS = {"num_hidden_layers": 4, "hidden_size": HIDDEN, "vocab_size": VOCAB}


def test_shape_is_read_from_a_plain_or_nested_config_and_compared(tmp_path: Path) -> None:
    spec = little_manifest().target
    assert read_shape(spec, config(tmp_path / "plain", **FACTS)) == shape(4)
    assert read_shape(spec, config(tmp_path / "nested", vision=1, text_config=FACTS)) == shape(4)
    with pytest.raises(ConfigError) as caught:
        read_shape(spec, config(tmp_path / "other", **{**FACTS, "hidden_size": 16}))
    assert caught.value.code == "target-facts-mismatch"
    assert "hidden_size: manifest 8, checkpoint 16" in caught.value.message


def test_defaults_and_other_names_of_a_family_are_read_by_its_class(tmp_path: Path) -> None:
    """As a released checkpoint may leave them out; the folder's own number of another part is not the answer."""
    partial = config(tmp_path / "part", model_type="qwen3_5", vocab_size=9, text_config={"hidden_size": 16})
    theirs = AutoConfig.from_pretrained(str(partial)).get_text_config()
    found = config_shape(partial)
    assert found.hidden_size == 16
    assert (found.num_layers, found.vocab_size) == (theirs.num_hidden_layers, theirs.vocab_size)
    assert found.vocab_size != 9
    renamed = config(tmp_path / "gpt2", model_type="gpt2", n_layer=3, n_embd=12, vocab_size=40)
    assert config_shape(renamed) == TargetShape(num_layers=3, hidden_size=12, vocab_size=40)
    spec = little_manifest(target={"path": str(partial)}).target
    with pytest.raises(ConfigError, match="hidden_size: manifest 8, checkpoint 16"):
        read_shape(spec, partial)


@pytest.mark.parametrize(
    "fields", [{}, {**FACTS, "vocab_size": "many"}, {**FACTS, "hidden_size": 0}, {"text_config": 3}]
)
def test_a_config_without_the_shape_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        read_shape(little_manifest().target, config(tmp_path / "t", **fields))
    assert caught.value.code == "target-config"


def test_without_checkpoint_the_declared_shape_is_used_or_demanded(tmp_path: Path) -> None:
    spec = little_manifest(target={"path": str(tmp_path / "nowhere")}).target
    assert resolve_path(spec, download=False) is None
    assert read_shape(spec, None) == shape(4)
    with pytest.raises(EnvironmentFault) as caught:
        read_shape(spec.model_copy(update={"shape": None}), None)
    assert caught.value.code == "target-missing"


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_sizes_of_every_array_are_exact(tmp_path: Path, codec: str) -> None:
    made = make_store(tmp_path / "store", manifest=little_manifest(store={"codec": codec}))
    planned = {entry.name: entry for entry in array_bytes(made.plan, manifest_specs(made.manifest, HIDDEN))}
    on_disk = {name: sum(p.stat().st_size for p in made.path.glob(f"shards/*/{name}/c.*")) for name in planned}
    assert {name: entry.files for name, entry in planned.items()} == on_disk
    states = [entry.per_row for name, entry in planned.items() if name.startswith("hidden_states")]
    # 8 channels at 3 taps: bf16; codes, and a step with one kept element
    assert states == {"raw": [48], "int8": [24, 18], "int4": [12, 18]}[codec]
