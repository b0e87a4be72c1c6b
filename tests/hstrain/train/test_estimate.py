"""What a run will need, against what runs need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hstrain.drafter.model import DrafterConfig, count_parameters
from hstrain.manifest import drafter_config, load_train_manifest
from hstrain.train.estimate import host_memory_bytes, memory_bytes

from tests.made import stores
from tests.made.trainers import train_manifest, turn_rows

pytestmark = pytest.mark.thorough

ATTENTION = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "block_size": 8}
TWO = ["full_attention", "sliding_attention"]
SHAPES: dict[str, dict[str, Any]] = {
    "weights": {
        "drafter": {**ATTENTION, "layer_types": TWO, "intermediate_size": 12288},
        "data": {"pack_tokens": 300, "anchors": 8},
    },
    "activations": {
        "drafter": {**ATTENTION, "layer_types": TWO, "intermediate_size": 512},
        "data": {"pack_tokens": 1200, "max_tokens": 1024, "anchors": 150},
    },
    "bf16": {
        "drafter": {**ATTENTION, "layer_types": TWO, "intermediate_size": 2048},
        "data": {"pack_tokens": 900, "max_tokens": 1024, "anchors": 100},
        "run": {"precision": "bf16"},
    },
    "recomputed": {
        "drafter": {**ATTENTION, "layer_types": TWO * 2, "intermediate_size": 1024},
        "data": {"pack_tokens": 900, "max_tokens": 1024, "anchors": 100},
        "run": {"gradient_checkpointing": True},
    },
}
MEASURE = """
import ctypes, gc, json, os, shutil, sys
from pathlib import Path
import torch
from tests.made.trainers import train_manifest
from hstrain.run.checkpoint import save_checkpoint
from hstrain.run.folder import RunPaths
from hstrain.train.estimate import memory_bytes, pack_size
from hstrain.train.parallel import World, optimizer_tensors, whole_tensors
from hstrain.train.step import Trainer

torch.set_num_threads(1)

def status(key):
    return int(dict(line.split(":", 1) for line in open("/proc/self/status"))[key].split()[0]) * 1024

def steps(sections, number):
    trainer = Trainer(train_manifest(**sections), Path(sys.argv[1]), World.join("cpu"))
    trainer.distribute()
    with trainer.stream(0) as stream:
        (pack,) = next(stream)
        for step in range(number):  # moments are there from the second step on
            trainer.step(step, [pack])
        if number > 1:
            weights = whole_tensors(trainer.drafter.state_dict().items(), trainer.world)
            moments = whole_tensors(optimizer_tensors(trainer.drafter, trainer.optimizers), trainer.world)
            run = RunPaths(Path(sys.argv[1]).parent / f"run-{os.getpid()}")
            save_checkpoint(run, number, weights, trainer.config, {}, moments, {})
            del weights, moments
            shutil.rmtree(run.root)
    keys, T, N = pack_size(pack, trainer.config.block_size)
    head = {t.data_ptr(): t.nbytes for t in (trainer.head.embed_VH, trainer.head.lm_head_VH)}
    return memory_bytes(trainer.config, trainer.manifest, T=T, N=N, keys=keys, head_bytes=sum(head.values()))

small = {"data": {"pack_tokens": 2}, **json.loads(sys.argv[3])}

def warm():  # libraries and the kernels that they compile
    for precision in ("fp32", "bf16"):
        steps({**small, "run": {"precision": precision}}, 1)

warm()
for name, sections in json.loads(sys.argv[2]).items():
    read, write = os.pipe()
    if os.fork() == 0:  # every shape begins with the same memory
        warm()  # again: after a fork, libraries come back page by page
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        terms = steps(sections, 2)
        os.write(write, json.dumps([status("VmHWM") - before, terms]).encode())
        os._exit(0)
    os.close(write)
    with open(read) as answer:
        print(json.dumps([name, *json.load(answer)]))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, dict[str, int]]]:
    """Shape -> growth of resident memory in bytes, and the terms counted.

    Tensors have pages of their own there, so that what the allocator keeps for later does not count. The smallest of
    three: pages of libraries that come back meanwhile can only add.
    """
    path = tmp_path_factory.mktemp("estimate") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "HIDDEN", 128)
        patch.setattr(stores, "VOCAB", 4096)
        manifest = stores.little_manifest(
            limits={"max_tokens": 1024, "batch_tokens": 1024}, store={"chunk_tokens": 64, "shard_bytes": 10**8}
        )
        stores.make_store(path, turn_rows([300] * 6), manifest=manifest)
    small = {"drafter": {**ATTENTION, "layer_types": TWO, "intermediate_size": 16}}
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(path), json.dumps(SHAPES), json.dumps(small)]
    found: dict[str, tuple[int, dict[str, int]]] = {}
    for _ in range(3):
        answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert answer.returncode == 0, answer.stderr
        for name, growth, terms in map(json.loads, answer.stdout.splitlines()):
            found[name] = min(found.get(name, (growth, terms)), (growth, terms), key=lambda one: one[0])
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_counted_within_15_percent(measured: dict[str, tuple[int, dict[str, int]]], shape: str) -> None:
    growth, terms = measured[shape]
    counted = sum(terms.values())
    assert growth > 80e6  # else it would be noise
    assert counted == pytest.approx(growth, rel=0.15), ", ".join(
        f"{name} {n / 1e6:.0f} MB" for name, n in terms.items()
    )


def headline(**run: Any) -> tuple[DrafterConfig, Any]:
    manifest = load_train_manifest(Path(__file__).parents[3] / "manifests/train/qwen3.6-27b.toml")
    manifest = manifest.model_copy(update={"run": manifest.run.model_copy(update=run)})
    shape = {"taps": (1, 16, 31, 46, 61), "hidden_size": 5120, "vocab_size": 248320, "num_layers": 64}
    return drafter_config(manifest.drafter, **shape), manifest  # type: ignore[arg-type]


def test_the_headline_drafter_is_counted_without_being_made() -> None:
    config, manifest = headline()
    P, _ = count_parameters(config)
    terms = memory_bytes(config, manifest, T=4096, N=512, device="cuda")
    assert terms["weights"] == 4 * P
    assert terms["moments"] == 8 * P
    assert terms["head"] == 2 * 248320 * 5120
    assert terms["communication"] == 0
    assert host_memory_bytes(config, manifest, T=4096)["checkpoint"] == 12 * P
    cut = memory_bytes(config, manifest, T=4096, N=512, device="cuda", world=8)
    assert host_memory_bytes(config, manifest, T=4096, world=8)["checkpoint"] == 12 * P  # the first rank writes it all
    on_cpu = memory_bytes(config, manifest, T=9, N=1, device="cpu", world=8)
    assert on_cpu["activations, gradients or checkpoint"] == 12 * P  # and holds it beside its own part
    assert cut["weights"] == 4 * (P // 8)
    assert 0 < cut["communication"] < 3 * P
    copies = memory_bytes(*headline(parallel="ddp"), T=4096, N=512, device="cuda", world=8)
    assert copies["weights"] == 4 * P
    assert copies["communication"] == 4 * P


def test_every_choice_that_saves_memory_is_seen_to() -> None:
    def total(device: str = "cpu", **run: Any) -> int:
        return sum(memory_bytes(*headline(**run), T=4096, N=512, device=device).values())

    assert total(gradient_checkpointing=True) < total(gradient_checkpointing=False)
    assert total(precision="bf16", gradient_checkpointing=False) < total(precision="fp32", gradient_checkpointing=False)
    assert total("cuda") < total("cpu")
    config, _ = headline()
    totals = [memory_bytes(config, train_manifest(optim={"name": name}), T=99, N=9) for name in ("adamw", "muon")]
    adamw, muon = (sum(terms.values()) for terms in totals)
    assert muon < adamw
