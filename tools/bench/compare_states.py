"""What do other states, and wrong ones, cost in acceptance? One drafter, the same held-out samples, many stores.

    python tools/bench/compare_states.py --run runs/demo/drafter --store runs/demo/store [--samples 8] [--only NAME ...]

The drafter's held-out samples are built anew, a store for each line of the table: on the torch path; by fla's real
kernels through Triton's interpreter (``python tools/bench/fla_env.py`` installs them once, minutes for the demo's
samples); in bf16 and through lossy codecs; and with faults planted (:mod:`planted`). All are scored by what ``hstrain
eval`` calls, so tau is the serving walk on the stored text, and differences from the first line are paired over
samples. The last column says which check finds the fault in the store: the build itself, ``hscache verify``, ``hscache
verify --recompute 8``, or ``hstrain doctor`` without and with ``--target``.

A store of faults has the right text, so what is measured is a drafter that was trained on right states and is *used* on
wrong ones, as when a serving engine computes them. Nothing is said of a drafter that was trained on the wrong ones too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fla_env
import planted
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hstrain.data.packs import split
from hstrain.doctor import diagnose
from hstrain.exchange.importer import open_drafter
from hstrain.score.report import evaluate
from planted import Fault, in_kernel, in_target, shown

import hscache
from hscache.audit import compare
from hscache.audit.verify import verify
from hscache.build.run import KernelPolicy, build
from hscache.console import say, table
from hscache.errors import EnvironmentFault
from hscache.manifest import BuildManifest, parse_manifest
from hscache.store.head import load_head
from hscache.store.reader import Store

TREE = "64"
RECOMPUTED = 8
CHILD = "import fla_on_cpu, compare_states; compare_states.build_in_child()"


@dataclass(frozen=True)
class Variant:
    """One store of the held-out samples.

    Attributes:
        name: Of its line.
        fault: What is planted into the build.
        changes: Section and key of the manifest -> another value.
        fla: Version of fla whose kernels compute it; None for the torch path.
    """

    name: str
    fault: Fault = nullcontext
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    fla: str | None = None


def variants(taps: tuple[int, ...] = (), mask_token: int = 0) -> list[Variant]:
    """Return all of them.

    Args:
        taps: The drafter's.
        mask_token: The drafter's.
    """

    def target(name: str, change: planted.Change) -> Variant:
        return Variant(name, functools.partial(in_target, change))

    def kernel(name: str, op: str, wrong: Any, layer: int | None = None) -> Variant:
        return Variant(name, functools.partial(in_kernel, op, wrong, layer))

    delta, conv = "chunk_gated_delta_rule", "causal_conv1d_fn"
    return [
        Variant("built again"),
        Variant(f"fla {fla_env.NEW}", fla=fla_env.NEW),
        Variant("target in bf16", changes={"target": {"dtype": "bfloat16"}}),
        Variant("int8", changes={"store": {"codec": "int8"}}),
        Variant("int4", changes={"store": {"codec": "int4"}}),
        target("taps one block late (t+1)", planted.shifted(1)),
        target("taps one block early (t-1)", planted.shifted(-1)),
        target("taps in reverse order", planted.reversed_taps(taps)),
        target("rows one token late", shown(lambda _, states: planted.one_late(states))),
        target("states divided by their RMS", shown(lambda _, states: planted.unit(states))),
        target("states behind the final norm", shown(lambda loaded, states: loaded.norm(states))),
        target("final norm by w, not 1+w", planted.norms_by_w(all_of_them=False)),
        target("every norm by w, not 1+w", planted.norms_by_w(all_of_them=True)),
        target("mask token's embedding is another's", planted.other_embedding(mask_token, mask_token + 1)),
        kernel("q, k not normalised, block 4 only", delta, planted.without_l2norm, 4),
        kernel("q, k not normalised", delta, planted.without_l2norm),
        kernel("delta rule's state lost every 64 tokens", delta, planted.state_lost),
        kernel("conv's state lost every 64 tokens", conv, planted.conv_state_lost),
        Variant(f"fla {fla_env.OLD}", fla=fla_env.OLD),
        Variant(f"fla {fla_env.OLD}, its guard off", planted.without_guards, fla=fla_env.OLD),
        target("noise of the states' size", shown(lambda _, states: planted.noise(states))),
    ]


def main() -> None:
    names = [variant.name for variant in variants()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/demo/drafter"))
    parser.add_argument("--store", type=Path, default=Path("runs/demo/store"), help="of a hybrid target, lossless")
    parser.add_argument("--samples", type=int, default=None, help="the first so many that were held out (default all)")
    parser.add_argument("--fla-samples", type=int, default=None, help="fla's kernels: the shortest so many of them")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--stores", type=Path, default=None, help="keep the stores here; the same command goes on")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() if args.stores is None else nullcontext(args.stores) as folder:
        found = compare_states(args.run, args.store, Path(folder), args.only, args.samples, args.fla_samples)
    print_comparison(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def compare_states(
    run: Path, store: Path, folder: Path, only: list[str], samples: int | None = None, fla_samples: int | None = None
) -> dict[str, Any]:
    """Build and score.

    Args:
        run: A run of ours: it says what was held out.
        store: What it was trained on.
        folder: Gets a store for each variant, or has it already.
        only: Names of variants.
        samples: The first so many held-out samples; None for all.
        fla_samples: Of these, the shortest so many for fla's kernels; None for all.

    Returns:
        JSON-plain: ``samples``, and ``rows``: ``states``, ``refused`` (why there is no figure, or None), ``rejected``
        (reason -> samples), ``found_by``, and those of :func:`hstrain.score.report.evaluate`; the given store first.
    """
    drafter, facts = open_drafter(run, load_head(store / "target"))
    opened = hscache.open(store)
    data = facts["provenance"]["manifest"]["data"]
    train, validation, test = split(opened, data["validation"], data.get("test", 0.0))
    held = sorted(validation + test)[:samples]
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{"states": "as built", "store": store, "refused": None, "rejected": {}}]
    for variant in (v for v in variants(drafter.config.taps, drafter.config.mask_token_id) if v.name in only):
        chosen = sorted(held, key=lambda i: int(opened.n_tokens[i]))[:fla_samples] if variant.fla else held
        name = variant.name if len(chosen) == len(held) else f"{variant.name}, the {len(chosen)} shortest"
        say(f"{name}: {len(chosen)} samples")
        out = folder / re.sub(r"[^a-z0-9.]+", "-", variant.name.lower())
        corpus = write_corpus(opened, chosen, train, folder / f"{out.name}.parquet")
        rows.append({"states": name, "store": out, **build_variant(variant, changed(opened, variant, corpus), out)})
    scored = [row for row in rows if row["refused"] is None]
    figures = evaluate([run], [row["store"] for row in scored], part="held-out", samples=samples, device="cpu")["rows"]
    for row, figure in zip(scored, figures, strict=True):
        spec = opened.manifest["manifest"]["target"]
        row |= {**figure, "found_by": finders(run, row["store"], spec["path"], spec["dtype"])}
    for row in rows:
        row["store"] = str(row["store"])
    return {"run": str(run), "store": str(store), "samples": len(held), "rows": rows}


def write_corpus(store: Store, held: list[int], train: list[int], corpus: Path) -> Path:
    """Write held-out samples as a corpus, and one that was not: ``split`` leaves one to train on."""
    rows = []
    for i in [*held, min(train, key=lambda i: int(store.n_tokens[i]))]:
        sample = store.sample(i, taps=store.taps[:1])
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        rows.append({"sample_id": sample.sample_id, "input_ids": ids, "loss_mask": mask, "tag": sample.tag})
    pq.write_table(pa.Table.from_pylist(rows), corpus)
    return corpus


def changed(store: Store, variant: Variant, corpus: Path) -> BuildManifest:
    """Return the store's manifest over another corpus, with the variant's changes."""
    raw = {name: dict(section) for name, section in store.manifest["manifest"].items()}
    raw["corpus"]["path"] = str(corpus)
    for section, values in variant.changes.items():
        raw[section] |= values
    return parse_manifest(raw, variant.name)


def build_variant(variant: Variant, manifest: BuildManifest, out: Path) -> dict[str, Any]:
    """Build a variant's store; return ``refused`` and ``rejected``."""
    if variant.fla is None:
        return build_here(variant.fault, manifest, out, KernelPolicy())
    if not fla_env.is_ready(variant.fla):
        return {"refused": f"not installed: python tools/bench/fla_env.py {variant.fla}", "rejected": {}}
    guarded = "" if variant.fault is planted.without_guards else "guarded"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, manifest.model_dump_json(), str(out), guarded],
        env=fla_env.environment(variant.fla) | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def build_in_child() -> None:
    """Build with fla's kernels in this process, which has them; arguments are those of its command line."""
    manifest, out, guarded = sys.argv[1:]
    fault = nullcontext if guarded else planted.without_guards
    print(json.dumps(build_here(fault, parse_manifest(json.loads(manifest), "child"), Path(out), KernelPolicy("fla"))))


def build_here(fault: Fault, manifest: BuildManifest, out: Path, kernels: KernelPolicy) -> dict[str, Any]:
    """Build a store in this process with a fault planted; return ``refused`` and ``rejected``."""
    try:
        with fault():
            report = build(manifest, out, device="cpu", kernels=kernels)
    except EnvironmentFault as error:
        return {"refused": f"refused by build: {error.code}", "rejected": {}}
    # one sample is none of those held out
    refused = f"refused by build: {', '.join(report.rejected)}" if report.samples < 2 else None
    return {"refused": refused, "rejected": report.rejected}


def finders(run: Path, store: Path, target: str, dtype: Any) -> list[str]:
    """Return which checks find something in a store, and what."""
    found = [f"verify ({code})" for code in sorted({finding.code for finding in verify(store).findings})]
    opened = hscache.open(store)
    codec = opened.manifest["manifest"]["store"]["codec"]
    if compare.fault(compare.recompute(opened, RECOMPUTED, device="cpu"), codec):
        found.append("verify --recompute")
    facts = diagnose(run, store, target=target, dtype=dtype, device="cpu")
    names = [fact.name for fact in facts if fact.grave and not fact.same]
    # the live target is the one that the drafter was trained on: other facts differ without it as well
    return found + [f"doctor{' --target' if name == 'live states' else ''} ({name})" for name in names]


def print_comparison(found: dict[str, Any]) -> None:
    """Print the table."""
    cells = []
    for row in found["rows"]:
        if row["refused"] is not None:
            cells.append([row["states"], *[None] * 5, row["refused"]])
            continue
        less, apart = row["less_first"], [None, None]
        if less is not None:
            low, high = less["interval"]
            apart = [f"{less['tau']:+.3f} ({low:+.3f} .. {high:+.3f})", f"{less['other_walks']} of {less['samples']}"]
        figures = [row["tau"], apart[0], row["tau_all"], row["ddtree"][TREE], apart[1]]
        rejected = [f"build ({reason}: {n} rejected)" for reason, n in row["rejected"].items()]
        cells.append([row["states"], *figures, ", ".join([*rejected, *row["found_by"]]) or "nobody"])
    taus = [("tau", ".3f"), ("less as built (95 %)", ">"), ("tau_all", ".3f"), (f"DDTree-{TREE}", ".3f")]
    columns = ["states", *taus, ("other walks", ">"), "found by"]
    table(f"{found['run']} on {found['samples']} held-out samples", columns, cells)


if __name__ == "__main__":
    main()
