"""Are the kernels right on this machine? Doctor, build, verify, and real head sizes, into one JSON file.

::

    python tools/targets/gpu_check.py --out tests/gpu/<gpu>-<date>.json

Needs no network: the tiny hybrid target and its completions are in the repository, the other target is random. On a GPU
with fla it builds the tiny hybrid's store in float32 and bfloat16, verifies it whole, recomputes samples and compares
the torch path with fla's; then it compares every optional op on the same inputs at the head sizes of real models
(K = V = 128, two value heads per key head). The file is written anew after each step, so that a crash leaves what was
measured. Exit status 1 when a step failed or a comparison disagrees.

Triton computes float32 products in TF32 unless ``TRITON_F32_DEFAULT=ieee``; limits for float32 are those of exact
products. The float32 steps therefore run twice, the second time in a process with that variable, and that one counts.

Without a GPU it is a dry run: the same steps, where each comparison that needs kernels says why it was skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tiny_targets
import torch

import hscache
from hscache.audit.doctor import diagnose
from hscache.audit.states import verify_with_states
from hscache.audit.verify import verify
from hscache.build.run import KernelPolicy, build
from hscache.console import say
from hscache.kernels.compare import LocalComparison, compare_local
from hscache.kernels.guards import environment, probe_package
from hscache.kernels.observe import planned_records
from hscache.kernels.path import describe_path
from hscache.kernels.sites import find_sites
from hscache.manifest import load_manifest
from hscache.store.index import committed_shards, read_shard

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 63, 64, 65, 130)
LONG = 2048
REAL_HEADS = {
    "hidden_size": 512, "num_hidden_layers": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
Step = Callable[["Machine"], dict[str, Any]]


class Machine:
    """Where the steps run, and whether fla's kernels can.

    Args:
        device: Such as ``cuda:0`` or ``cpu``.
        samples: Samples of the tiny hybrid to build and compare.
    """

    def __init__(self, device: str, samples: int) -> None:
        self.device, self.samples = torch.device(device), samples
        self.is_gpu = self.device.type == "cuda"
        # with Triton's interpreter fla takes CPU tensors: slow, but every line of this script can be tried
        fla = probe_package("fla", ["chunk_gated_delta_rule"])
        runs = self.is_gpu or os.environ.get("TRITON_INTERPRET") == "1"
        self.why_no_fla = fla.error or (None if runs else "fla is installed, but there is no GPU")


def check_doctor(machine: Machine) -> dict[str, Any]:
    """What would run, and what is missing: not a fault of the machine's kernels, so never a failure."""
    diagnosis = diagnose(ROOT / "tools/targets/tiny_hybrid")
    return {"would_run": str(diagnosis.path), **diagnosis.to_json(), "ok": True, "diagnosis_ok": diagnosis.ok}


def check_store(machine: Machine, dtype: str) -> dict[str, Any]:
    """Build a store of the tiny hybrid, verify every byte, recompute samples, compare torch with fla."""
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        corpus = _corpus(Path(scratch) / "corpus.parquet", machine.samples)
        manifest = load_manifest(
            ROOT / "manifests/build/demo.toml",
            [f"target.path={ROOT}/tools/targets/tiny_hybrid", f"corpus.path={corpus}", f"target.dtype={dtype}"],
        )
        policy = KernelPolicy("auto" if machine.why_no_fla else "fla", allow_fallback=True)
        built = build(manifest, store, device=str(machine.device), kernels=policy)
        made = [read_shard(store / f"shards/{k:05d}.zarr")["provenance"]["kernels"] for k in committed_shards(store)]
        report = verify(store)
        states = verify_with_states(
            report, recompute=min(4, machine.samples), kernels=None if machine.why_no_fla else "torch,fla",
            samples=machine.samples, device=str(machine.device),
        )  # fmt: skip
    return {
        "path": sorted({kernels["path"] for kernels in made}),
        "path_id": sorted({kernels["path_id"] for kernels in made}),
        "fla_backends": made[0]["fla_backends"],
        "build": {"samples": built.samples, "tokens": built.tokens, "capture_seconds": built.capture_seconds},
        "verify": report.to_json(),
        **states,
        "skipped": {"--kernels torch,fla": machine.why_no_fla} if machine.why_no_fla else {},
        "ok": report.ok,
    }


def check_heads(machine: Machine, dtype: str) -> dict[str, Any]:
    """Compare every optional op that has another implementation than torch, on the same inputs to both."""
    model = tiny_targets.qwen3_5(**REAL_HEADS).to(machine.device, getattr(torch, dtype))
    lengths = (*LENGTHS, LONG) if machine.is_gpu else LENGTHS
    ids = {
        n: torch.randint(0, 512, (1, n), generator=torch.Generator().manual_seed(n)).to(machine.device) for n in lengths
    }
    with torch.inference_mode():  # that the model runs at all is the least that a dry run shows
        finite = bool(model(input_ids=ids[130], use_cache=False).logits.isfinite().all()) if _runs(model) else None
    compared: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for op, why in _candidates(model, machine).items():
        if why is not None:
            skipped[op] = why
            continue
        candidate = "fla" if op == "chunk_gated_delta_rule" else "bound"
        for n in lengths:
            found = compare_local(model, ids[n], candidate=candidate, ops=[op])
            compared += [_row(comparison, n) for comparison in found]
    return {
        "config": REAL_HEADS,
        "lengths": lengths,
        "finite": finite,
        "path": str(describe_path(planned_records(model))),
        "compared": compared,
        "skipped": skipped,
        "ok": finite is not False and all(row["ok"] for row in compared),
    }


STEPS: dict[str, Step] = {
    "doctor": check_doctor,
    "store float32": lambda machine: check_store(machine, "float32"),
    "store bfloat16": lambda machine: check_store(machine, "bfloat16"),
    "heads float32": lambda machine: check_heads(machine, "float32"),
    "heads bfloat16": lambda machine: check_heads(machine, "bfloat16"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=8, help="of the tiny hybrid's completions; 8 by default")
    parser.add_argument("--only", choices=STEPS, nargs="+", default=list(STEPS), help="steps to run")
    options = parser.parse_args(argv)
    machine = Machine(options.device, options.samples)
    document: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hscache": hscache.__version__,
        "device": str(machine.device),
        "dry_run": not machine.is_gpu,
        "why_no_fla": machine.why_no_fla,
        "environment": environment(),
        "steps": {},
    }
    for name in options.only:
        document["steps"][name] = step = _run(STEPS[name], machine)
        _write(options.out, document)
        say(f"{name}: {_summary(step)}")
    if machine.is_gpu and machine.why_no_fla is None and "TRITON_F32_DEFAULT" not in os.environ:
        document["ieee"] = _again_in_ieee([name for name in options.only if name.endswith("float32")], options)
    document["ok"] = _ok(document)
    _write(options.out, document)
    if machine.why_no_fla:
        say(f"{'no GPU: a dry run' if not machine.is_gpu else 'NOT OK'}; no kernel was compared: {machine.why_no_fla}")
    say(f"{options.out}: {'nothing wrong was found' if document['ok'] else 'see the steps that are not ok'}")
    return 0 if document["ok"] else 1


def _run(step: Step, machine: Machine) -> dict[str, Any]:
    started = time.monotonic()
    try:
        result = step(machine)
    except Exception as error:  # CUDA's are RuntimeErrors, Triton's Exceptions of its own: the next step may work
        result = {"ok": False, "error": f"{getattr(error, 'code', type(error).__name__)}: {error}"}
    return {**result, "seconds": round(time.monotonic() - started, 1)}


def _again_in_ieee(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run steps in a process where Triton multiplies float32 exactly, and return their results."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "ieee.json"
        if not names:
            return {}
        command = [sys.executable, __file__, "--out", out, "--device", options.device, "--samples", options.samples]
        subprocess.run(
            [*map(str, command), "--only", *names], env={**os.environ, "TRITON_F32_DEFAULT": "ieee"}, check=False
        )
        try:
            steps: dict[str, Any] = json.loads(out.read_text())["steps"]
        except (OSError, ValueError) as error:
            return {name: {"ok": False, "error": f"the process left nothing: {error}"} for name in names}
        return steps


def _ok(document: dict[str, Any]) -> bool:
    """Judge the steps: with exact products where they ran so; a GPU on which nothing was compared is not checked."""
    judged = {
        name: step
        for name, step in document["steps"].items()
        if "error" in step or name not in document.get("ieee", {})
    }
    all_ok = all(step["ok"] for step in [*judged.values(), *document.get("ieee", {}).values()])
    return all_ok and (document["dry_run"] or document["why_no_fla"] is None)


def _corpus(path: Path, samples: int) -> Path:
    import pyarrow.parquet as pq

    pq.write_table(pq.read_table(ROOT / "tests/data/tiny-hybrid-completions.parquet").slice(0, samples), path)
    return path


def _candidates(model: torch.nn.Module, machine: Machine) -> dict[str, str | None]:
    """Return for each prefill op of the model why it has nothing to be compared with, or None when it has."""
    found: dict[str, str | None] = {}
    for site in find_sites(model):
        if site.record(site.bound()).phase != "prefill" or site.op in found:
            continue
        if site.op == "chunk_gated_delta_rule":
            found[site.op] = machine.why_no_fla
        elif site.bound() is site.reference:
            probe = probe_package("causal_conv1d", [site.op])
            found[site.op] = probe.error or "transformers did not bind it"
        else:
            found[site.op] = None if machine.is_gpu else "there is no GPU"
    return found


def _runs(model: torch.nn.Module) -> bool:
    """Tell whether what transformers bound can run where the model is: on a CPU, the torch references alone."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return on_gpu or all(site.bound() is site.reference for site in find_sites(model))


def _row(comparison: LocalComparison, tokens: int) -> dict[str, Any]:
    row = comparison.to_json()
    return {"tokens": tokens, **{name: row[name] for name in row if name not in ("by_head", "by_position")}}


def _summary(step: dict[str, Any]) -> str:
    skipped = "".join(f"; skipped {what}: {why}" for what, why in step.get("skipped", {}).items())
    sentences = [step[part]["sentence"] for part in ("recompute", "kernels") if part in step]
    if step.get("compared"):
        bad = [
            f"layer {row['layer_index']} {row['op']} {row['tokens']} tokens"
            for row in step["compared"]
            if not row["ok"]
        ]
        sentences.append(f"{len(step['compared'])} comparisons, {f'beyond: {bad[:3]}' if bad else 'all within limits'}")
    said = "; ".join([step.get("error", ""), step.get("would_run", ""), *sentences]).strip("; ")
    return f"{'ok' if step['ok'] else 'NOT OK'} ({step['seconds']}s) {said}{skipped}"


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
