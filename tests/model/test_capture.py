"""The stored states are the target's own: SmolLM2 against transformers' plain forward of each sample alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import zarr

import hscache
from hscache.build.run import build
from hscache.corpus.readers import read_corpus
from hscache.model.capture import Capturer
from hscache.model.facts import read_shape
from hscache.model.loading import LoadedTarget, load_target
from hscache.rows import Sample
from hscache.store.head import load_head
from hscache.store.index import read_plan
from tests.conftest import smollm2_manifest

TAPS = (1, 8, 14, 20, 27)


@pytest.fixture(scope="module")
def target(smollm2: Path) -> LoadedTarget:
    spec = smollm2_manifest(Path()).target
    return load_target(spec, read_shape(spec, smollm2), smollm2, torch.device("cpu"))


@pytest.fixture(scope="module")
def rows(corpus: Path) -> list[Sample]:
    return list(read_corpus(corpus))[:6]


@pytest.fixture(scope="module")
def store(smollm2: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> hscache.store.reader.Store:
    out = tmp_path_factory.mktemp("capture") / "store"
    report = build(smollm2_manifest(corpus), out)
    assert report.samples == 24
    assert report.shards > 3
    return hscache.open(out)


@torch.inference_mode()
def alone(target: LoadedTarget, ids: torch.Tensor, width: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What transformers says about one sample by itself: hidden states of every layer, final state, logits.

    With a width the sample is right-padded to it, as it was in its batch.
    """
    n = len(ids)
    padded = torch.zeros(1, max(width, n), dtype=torch.long)
    padded[0, :n] = ids
    mask = (torch.arange(padded.shape[1]) < n).long()[None]
    out = target.model(input_ids=padded, attention_mask=mask, use_cache=False, output_hidden_states=True)
    return torch.stack(out.hidden_states)[:, 0, :n], out.hidden_states[-1][0, :n], out.logits[0, :n]


def batch_width(store: hscache.store.reader.Store, sample_id: str) -> int:
    """The padded width of a sample's forward batch, from the plan."""
    plan = read_plan(store.path).to_pylist()
    batch = next(row["batch"] for row in plan if row["sample_id"] == sample_id)
    return max(row["n_tokens"] for row in plan if row["batch"] == batch)


def test_reading_back_equals_a_fresh_forward_of_the_sample_alone_bit_by_bit(
    store: hscache.store.reader.Store, target: LoadedTarget
) -> None:
    """Alone in its batch, at the padded width that the plan records."""
    padded = 0
    for i in range(0, len(store), 3):
        sample = store[i]
        width = batch_width(store, sample.sample_id)
        padded += width > len(sample.input_ids)
        layers, final, _ = alone(target, sample.input_ids, width)
        for column, tap in enumerate(TAPS):
            assert torch.equal(sample.hidden_states[:, column], layers[tap + 1].bfloat16()), f"tap {tap}"
        assert torch.equal(sample.final_state, final.bfloat16())
    assert padded


@pytest.mark.parametrize("i", [7, 16])
def test_without_the_padding_only_float32_rounding_differs(
    store: hscache.store.reader.Store, target: LoadedTarget, i: int
) -> None:
    """Attention on CPU sums over keys in blocks of the padded width; what moves is the last bits of float32."""
    sample = store[i]
    layers, _, _ = alone(target, sample.input_ids)
    wanted = layers[[tap + 1 for tap in TAPS]].transpose(0, 1)
    cosine = torch.cosine_similarity(sample.hidden_states.double(), wanted.bfloat16().double(), dim=-1)
    assert (1 - cosine).max() < 1e-6
    assert (sample.hidden_states != wanted.bfloat16()).float().mean() < 0.01, "bf16 rounding hides nearly all of it"


def test_top_k_is_that_of_the_whole_softmax(store: hscache.store.reader.Store, target: LoadedTarget) -> None:
    sample = store[3]
    _, _, logits = alone(target, sample.input_ids)
    positions = torch.from_numpy(np.flatnonzero(sample.loss_mask.numpy()))
    assert torch.equal(sample.logits.positions, positions)
    before = logits[positions - 1]
    expected = torch.log_softmax(before, dim=-1).topk(64, dim=-1)
    assert torch.equal(sample.logits.ids.long(), expected.indices)
    # float16 keeps a log-probability of -20 to 1/128
    torch.testing.assert_close(sample.logits.logprobs.float(), expected.values, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sample.logits.lse, before.logsumexp(-1))
    assert (sample.logits.logprobs.float().exp().sum(-1) < 1.001).all(), "never renormalised"


def test_greedy_completions_are_the_stored_argmax(store: hscache.store.reader.Store) -> None:
    """The corpus was written by this target, greedily, in float32: row r predicts supervised token r."""
    hits = [
        (sample.logits.ids[:, 0] == sample.input_ids[sample.logits.positions]).float().mean().item() for sample in store
    ]
    assert min(hits) == 1.0


def test_the_target_folder_reproduces_the_stored_top_k_from_the_final_state(
    store: hscache.store.reader.Store,
) -> None:
    head = load_head(store.path / "target")
    for i in (0, 11):
        sample = store[i]
        logprobs = torch.log_softmax(head.logits(sample.final_state[sample.logits.positions - 1]), dim=-1)
        stored = sample.logits.logprobs.float()
        error = (logprobs.gather(-1, sample.logits.ids.long()) - stored).abs()
        # the final state is rounded to bf16 (2^-9 relative), the stored log-probabilities are not
        assert error.max() < 0.15
        assert (error * stored.exp()).sum(-1).mean() < 0.01


def test_a_shard_opens_with_zarr_alone(store: hscache.store.reader.Store) -> None:
    group = zarr.open_group(str(store.path / "shards/00000.zarr"), mode="r")
    assert sorted(group.array_keys()) == [
        "final_state", "hidden_states", "input_ids", "logit_ids", "logit_logprobs", "logit_lse", "loss_mask",
    ]  # fmt: skip
    assert group["hidden_states"].attrs["logical_dtype"] == "bfloat16"
    bits = group["hidden_states"][:]
    numbers = (bits.astype(np.uint32) << 16).view(np.float32)
    samples = [s for s in range(len(store)) if store._columns["shard"][s] == 0]
    assert samples
    for i in samples:
        start, n = int(store._columns["start"][i]), int(store.n_tokens[i])
        assert np.array_equal(numbers[start : start + n], store[i].hidden_states.float().numpy())


def test_the_last_block_is_seen_before_the_norm(target: LoadedTarget, rows: list[Sample]) -> None:
    capturer = Capturer(target, (29,), final_state=True, topk=0)
    [captured] = capturer.start(rows[:1])[0].samples()
    last = torch.from_numpy(captured.arrays["hidden_states"].view(np.int16)).view(torch.bfloat16)[:, 0]
    _, final, _ = alone(target, torch.from_numpy(rows[0].input_ids))
    assert not torch.equal(last, final.bfloat16())
    with torch.inference_mode():
        normed = target.norm(last.float())
    torch.testing.assert_close(normed, final, rtol=0.02, atol=0.02)


@pytest.mark.thorough
def test_out_of_memory_halves_the_batch_and_changes_nothing(
    target: LoadedTarget, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sorted(rows, key=lambda row: -len(row.input_ids))
    whole = list(Capturer(target, TAPS, final_state=True, topk=8).start(rows)[0].samples())
    forward = type(target.backbone).forward

    def small(self: torch.nn.Module, *args: object, input_ids: torch.Tensor, **kwargs: object) -> object:
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return forward(self, *args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(target.backbone), "forward", small)
    capturer = Capturer(target, TAPS, final_state=True, topk=8)
    parts = [captured for pending in capturer.start(rows) for captured in pending.samples()]
    assert capturer.oom_splits == 3
    assert [c.row.sample_id for c in parts] == [row.sample_id for row in rows]
    for a, b in zip(whole, parts, strict=True):
        assert all(np.array_equal(a.arrays[name], b.arrays[name]) for name in a.arrays)


def test_a_sample_that_never_fits_is_rejected_alone(
    target: LoadedTarget, rows: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(row.input_ids) for row in rows)
    forward = type(target.backbone).forward

    def small(self: torch.nn.Module, *args: object, input_ids: torch.Tensor, **kwargs: object) -> object:
        if input_ids.shape[1] >= longest:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory")
        return forward(self, *args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(target.backbone), "forward", small)
    captured = [c for p in Capturer(target, TAPS, final_state=False, topk=0).start(rows) for c in p.samples()]
    assert len(captured) == len(rows)
    assert {c.reason for c in captured} == {"", "out-of-memory"}
    assert [len(c.row.input_ids) for c in captured if c.reason] == [longest]
