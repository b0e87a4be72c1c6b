"""What a plan or a store looks like on one screen, and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from hscache.audit.verify import Finding, VerifyReport
from hscache.build.plan import Plan, array_bytes, manifest_specs
from hscache.build.run import BuildReport
from hscache.build.space import bytes_needed, free_bytes, target_bytes
from hscache.console import duration, facts, new_figure, say, size, table
from hscache.errors import ConfigError, IntegrityError
from hscache.manifest import ResolvedManifest
from hscache.store.index import committed_shards, load_index, read_manifest, read_shard, table_digest
from hscache.store.layout import StorePaths
from hscache.store.reader import coarsest_codec, codecs_of

if TYPE_CHECKING:
    from hscache.audit.compare import Comparison, KernelsReport, Path_
    from hscache.build.convert import ConvertReport
    from hscache.build.repair import RepairReport

_SHOWN_VERSIONS = ("transformers", "torch", "flash-linear-attention", "causal-conv1d")


def plan_json(plan: Plan, manifest: ResolvedManifest, out: Path) -> dict[str, Any]:
    """Return a plan's totals and sizes as plain JSON.

    Args:
        plan: The plan.
        manifest: With resolved taps and shape.
        out: Directory where the store would be.
    """
    arrays = array_bytes(plan, manifest_specs(manifest, manifest.target.shape.hidden_size))
    shards = len(plan.batches)
    same = _is_planned(out, plan)
    done = set(committed_shards(out)) & set(range(shards)) if same else set()
    todo, no_target = sorted(set(range(shards)) - done), not (same and StorePaths(out).target.exists())
    return {
        **plan.totals,
        "rejected_reasons": plan.reasons(),
        "arrays": [
            {"name": a.name, "bytes_per_row": a.per_row, "rows": a.axis, "bytes": a.data, "file_bytes": a.files}
            for a in arrays
        ],
        "bytes_per_token": {a.name: a.per_row for a in arrays if a.axis == "tokens"},
        "total_bytes": sum(a.data for a in arrays),
        "total_file_bytes": sum(a.files for a in arrays),
        "shards": shards,
        "shards_committed": len(done),
        "files": shards * (2 * len(arrays) + 1),
        "batches": sum(len(batches) for batches in plan.batches),
        "target_bytes": target_bytes(manifest),
        "needed_bytes": bytes_needed(plan, manifest, todo, target=no_target),
        "least_bytes": bytes_needed(plan, manifest, todo, target=no_target, least=True),
        "free_bytes": free_bytes(out),
        "taps": list(manifest.states.taps),
        "codec": manifest.store.codec,
    }


def _is_planned(out: Path, plan: Plan) -> bool:
    """Return whether a store was begun with this plan; shards of another plan do not count as committed."""
    return StorePaths(out).manifest.exists() and read_manifest(out)["plan"]["digest"] == table_digest(plan.table)


def print_plan(plan: dict[str, Any], manifest: ResolvedManifest, out: Path) -> None:
    """Print a plan's JSON form as a table."""
    rows = [
        (a["name"], f"{a['bytes_per_row']:,}", a["rows"], f"{a['bytes']:,}", size(a["file_bytes"]))
        for a in plan["arrays"]
    ]
    rows.append(("total", "", "", f"{plan['total_bytes']:,}", size(plan["total_file_bytes"])))
    rows.append(("target/", "", "", f"{plan['target_bytes']:,}", size(plan["target_bytes"])))
    table(
        f"{manifest.target.path}, taps {plan['taps']}", ("array", "bytes/row", "rows", "bytes", "on disk"), rows,
        right=(1, 3, 4),
    )  # fmt: skip
    padding = plan["padded_tokens"] / plan["tokens"] - 1
    packed = (
        "" if plan["codec"] not in ("lz4", "zstd") else f"; codec {plan['codec']} makes the states smaller than shown"
    )
    facts(
        "plan",
        [
            ("rows", f"{plan['rows']:,} ({_reasons(plan['rejected_reasons'])})"),
            ("samples", f"{plan['samples']:,}"),
            ("tokens", f"{plan['tokens']:,}, {plan['loss_tokens']:,} supervised"),
            ("forward", f"{plan['batches']:,} batches, {padding:.1%} padding"),
            ("shards", f"{plan['shards']:,} ({plan['shards_committed']:,} committed), {plan['files']:,} files"),
            ("disk", f"{size(plan['needed_bytes'])} to write, {size(plan['free_bytes'])} free at {out}{packed}"),
        ],
    )


def print_build(report: BuildReport) -> None:
    """Print what a build did."""
    rejected = sum(report.rejected.values())
    what = f"{report.built} shards built" if report.built else "nothing left to build, all shards are complete"
    rate = f", {report.tokens / report.capture_seconds:,.0f} tokens/s" if report.built == report.shards else ""
    say(f"{report.store}: {what} in {duration(report.seconds)}{rate}")
    say(
        f"{report.samples:,} samples, {report.tokens:,} tokens ({report.loss_tokens:,} supervised), "
        f"{report.shards} shards, {size(report.bytes)}"
    )
    if rejected:
        say(f"{rejected} rows rejected: {_reasons(report.rejected)}; reasons in {report.store}/index.parquet")


def print_convert(report: ConvertReport) -> None:
    """Print what a conversion did."""
    what = f"{report.built} shards converted" if report.built else "nothing left to convert, all shards are complete"
    say(f"{report.store}: {what} in {duration(report.seconds)}")
    kept = "states bit by bit those of the source" if report.exact else "hscache info shows the error of the codec"
    say(
        f"{report.samples:,} samples, {' -> '.join(report.codecs)}: {size(report.bytes_before)} -> {size(report.bytes)}"
        f" ({report.bytes_before / max(report.bytes, 1):.2f} to 1); {kept}"
    )


def print_verify(report: VerifyReport, limit: int = 20) -> None:
    """Print what a verification found."""
    for finding in report.findings[:limit]:
        say(f"{finding.code}: {finding.where}: {finding.detail}")
    if len(report.findings) > limit:
        say(f"... and {len(report.findings) - limit} more; --json lists all")
    rejected = f", {report.rejected} rejected with a reason" if report.rejected else ""
    done = f"{report.shards} shards, {report.samples:,} samples, {report.tokens:,} tokens{rejected}"
    if report.level == "full" and report.head_error_nats is not None:
        done += f"; lm_head(final state) gives the stored top-k within {report.head_error_nats:.4f} nats"
        done += f" ({report.head_rows} rows)"
    if report.ok:
        say(f"{report.store}: whole and right ({report.level}): {done}")
    else:
        shards = sorted({f.shard for f in report.findings if f.shard is not None})
        say(f"{report.store}: {len(report.findings)} findings in {len(shards)} shards ({report.level}): {done}")
        if report.level == "quick" and shards:
            say(f"hint: hscache verify {report.store} --level full")


def print_repair(report: RepairReport) -> None:
    """Print what was repaired."""
    if not report.found:
        say(f"{report.store}: nothing to repair")
        return
    found = ", ".join(f"{n} {code}" for code, n in sorted(report.found.items()))
    state = "whole and right now" if report.ok else "still damaged: hscache verify says what is left"
    say(f"{report.store}: found {found}; built {len(report.rebuilt)} shards again; {state}")


def verify_with_states(
    report: VerifyReport,
    *,
    recompute: int = 0,
    kernels: str | None = None,
    against: Path | None = None,
    samples: int = 8,
    target: Path | None = None,
    device: str | None = None,
    plot: Path | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Compare states as asked, add findings to the report, and return the comparisons as plain JSON.

    Args:
        report: Result of the integrity check; findings are added to it.
        recompute: Samples to run again.
        kernels: ``reference,candidate``.
        against: Another store.
        samples: Samples for ``kernels`` and ``against``.
        target: Checkpoint directory; None for the manifest's.
        device: Device to run on.
        plot: PNG to write for ``kernels``.
        show: Print tables to stdout.

    Raises:
        ConfigError: ``kernel-choice``.
    """
    if not (recompute or kernels or against):
        return {}
    import hscache
    from hscache.audit import compare

    store, out = hscache.open(report.store), {}
    if recompute:
        again = compare.recompute(store, recompute, target=target, device=device)
        bad = compare.fault(again, coarsest_codec(store.manifest))
        exact = min(tap.equal for tap in again.taps)
        sentence = f"recomputed {again.samples} samples alone: " + (bad or f"the stored states, {exact:.2%} bit by bit")
        out["recompute"] = {**asdict(again), "sentence": sentence}
        if bad:
            report.findings.append(Finding("recompute-differs", again.worst_sample, bad))
        if show:
            _print_distances("stored against recomputed", again)
    if kernels:
        two = compare.kernels(store, parse_kernels(kernels), samples, target=target, device=device)
        out["kernels"] = two.to_json()
        if not two.agree:
            report.findings.append(Finding("kernels-differ", kernels, two.sentence))
        if show:
            _print_kernels(two)
        if plot:
            plot_kernels(two, plot)
    if against:
        other = compare.against(store, hscache.open(against), samples)
        codecs = {coarsest_codec(document) for document in (store.manifest, read_manifest(against))}
        lossy_ones = sorted(codecs - {"raw"})  # int4, the coarser, first
        bad = compare.fault(other, [*lossy_ones, "raw"][0])
        exact = min(tap.equal for tap in other.taps)
        same = f"the same states up to the error of {' and '.join(lossy_ones)}" if lossy_ones else "the same states"
        sentence = f"against {against}, {other.samples} samples: " + (bad or f"{same}, {exact:.2%} bit by bit")
        out["against"] = {**asdict(other), "sentence": sentence}
        if bad:
            report.findings.append(Finding("stores-differ", str(against), bad))
        if show:
            _print_distances(f"{report.store} against {against}", other)
    return out


def parse_kernels(text: str) -> tuple[Path_, Path_]:
    """Return reference and candidate of ``--kernels``.

    Raises:
        ConfigError: ``kernel-choice``.
    """
    paths = tuple(text.split(","))
    if len(paths) != 2 or not set(paths) <= {"torch", "fla", "bound"}:
        raise ConfigError("kernel-choice", f"--kernels {text}: expected two of torch, fla, bound", hint="torch,fla")
    return paths  # type: ignore[return-value]


def _print_distances(title: str, comparison: Comparison, ratios: list[float] | None = None) -> None:
    columns = ["tap", "1-cos mean", "p99", "max", "rel L2", "norm ratio", "bits equal", *comparison.taps[0].by_position]
    rows: list[list[object]] = []
    for i, tap in enumerate(comparison.taps):
        numbers = [f"{x:.1e}" for x in (tap.mean, tap.p99, tap.max, tap.rel_l2)]
        by_position = [f"{x:.1e}" for x in tap.by_position.values()]
        rows.append([tap.name, *numbers, f"{tap.norm_ratio:.5f}", f"{tap.equal:.1%}", *by_position])
        if ratios is not None:
            rows[-1].append(f"{ratios[i]:.2g}")
    table(title, columns + (["x floor"] if ratios is not None else []), rows, right=range(1, len(columns) + 1))
    if comparison.top1 is not None:
        print(f"first choice equal {comparison.top1:.2%}, KL {comparison.kl_nats:.2e} nats")


def _print_kernels(report: KernelsReport) -> None:
    reference, candidate = report.paths
    if report.local:
        rows = [
            [
                c.layer_index, c.op, f"{c.total.one_minus_cos_mean:.1e}", f"{c.total.one_minus_cos_max:.1e}",
                f"{c.total.rel_frobenius:.1e}", f"{c.total.norm_ratio:.7g}",
                "ok" if c.ok else f"{', '.join(c.beyond)} heads {list(c.bad_heads)}",
            ]
            for c in report.local
        ]  # fmt: skip
        columns = ("layer", "op", "1-cos mean", "max", "rel Frobenius", "norm ratio", "")
        table(f"{candidate} against {reference}, same inputs to both", columns, rows, right=(0, 2, 3, 4, 5))
    _print_distances(f"{candidate} against {reference}, end to end", report.end_to_end, report.ratios)
    _print_distances(f"noise floor: {reference} in the store's precision against the next wider one", report.floor)


def plot_kernels(report: KernelsReport, path: Path) -> None:
    """Draw 1 - cosine per layer: local, end to end, and the noise floor.

    Args:
        report: The comparison.
        path: PNG to write.

    Raises:
        EnvironmentFault: ``dependency-missing`` without matplotlib.
    """
    figure = new_figure(8, 4)
    axes = figure.subplots()
    for op in dict.fromkeys(c.op for c in report.local):
        points = [(c.layer_index, c.total.one_minus_cos_mean) for c in report.local if c.op == op]
        axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=f"{op}, same inputs")
    for name, comparison, style in (("end to end", report.end_to_end, "s-"), ("noise floor", report.floor, "k--")):
        points = [(int(t.name.split()[1]), t.mean) for t in comparison.taps if t.name.startswith("tap ")]
        axes.plot(*zip(*points, strict=True), style, label=name)
    axes.set(
        xlabel="layer", ylabel="mean 1 - cosine", yscale="log", title=f"{report.paths[1]} against {report.paths[0]}"
    )
    axes.legend()
    figure.savefig(path, dpi=110)


def store_info(root: Path) -> dict[str, Any]:
    """Return what a store is: origin, shape, counts, sizes, provenance."""
    document, paths = read_manifest(root), StorePaths(root)
    index = load_index(root)
    good = index.filter(pc.equal(index["status"], "ok"))
    rejected = index.filter(pc.equal(index["status"], "rejected"))
    shards = committed_shards(root)
    records = [read_shard(paths.shard(shard), whole=True) for shard in shards]
    first = records[0] if records else None
    return {
        "store": str(root),
        "format_version": document["format_version"],
        "created": document["created"],
        "target": {"path": document["manifest"]["target"]["path"], **document["target"]["shape"]},
        "dtype": document["manifest"]["target"]["dtype"],
        "taps": document["manifest"]["states"]["taps"],
        "final_state": document["manifest"]["states"]["final_state"],
        "topk": document["manifest"]["logits"]["topk"],
        "codec": document["manifest"]["store"]["codec"],
        "codecs_before": codecs_of(document)[1:],
        "corpus": {"path": document["manifest"]["corpus"]["path"], **document["corpus"]},
        "shards": len(shards),
        "shards_planned": document["plan"]["shards"],
        "samples": good.num_rows,
        "tokens": pc.sum(good["n_tokens"]).as_py() or 0,
        "loss_tokens": pc.sum(good["n_loss"]).as_py() or 0,
        "tags": dict(Counter(tag for tag in good["tag"].to_pylist() if tag).most_common()),
        "rejected": dict(Counter(rejected["reason"].to_pylist())),
        "shard_bytes": sum(entry["bytes"] for record in records for entry in record["files"].values()),
        "target_bytes": sum(p.stat().st_size for p in paths.target.glob("*")) if paths.target.exists() else 0,
        "kernel_paths": sorted({record["provenance"]["kernels"]["path_id"] for record in records}),
        "provenance": first["provenance"] if first else None,
        "typical_rms": first["health"]["typical_rms"] if first else None,
        "codec_error": _codec_error([record["health"]["codec"] for record in records if record["health"].get("codec")]),
    }


def print_info(info: dict[str, Any]) -> None:
    """Print a store's facts on one screen."""
    target = info["target"]
    state = "complete" if info["shards"] == info["shards_planned"] else "UNFINISHED"
    logits = f"top-{info['topk']} with logsumexp" if info["topk"] else "none"
    pairs = [
        (
            "target",
            f"{target['path']} ({target['num_layers']} layers, H {target['hidden_size']}, V {target['vocab_size']})",
        ),
        ("states", f"taps {info['taps']}, final state {'yes' if info['final_state'] else 'no'}, logits {logits}"),
        ("corpus", f"{info['corpus']['path']}, {info['corpus']['rows']:,} rows"),
        ("samples", f"{info['samples']:,} ({_reasons(info['rejected'])})"),
        ("tokens", f"{info['tokens']:,}, {info['loss_tokens']:,} supervised"),
        ("tags", ", ".join(f"{tag} {n}" for tag, n in info["tags"].items()) or "none"),
        (
            "shards",
            f"{info['shards']} of {info['shards_planned']}, {size(info['shard_bytes'])}, codec {info['codec']}"
            + "".join(f", from {codec}" for codec in info["codecs_before"]),
        ),
        ("target/", size(info["target_bytes"])),
    ]
    if info["provenance"]:
        made = info["provenance"]
        versions = made["versions"]
        head = made["load"]
        pairs += [
            ("ran on", f"{made['device']}, {info['dtype']}, {head['attn_implementation']} attention"),
            ("kernels", f"{made['kernels']['path']} [{', '.join(info['kernel_paths'])}]"),
            ("with", ", ".join(f"{name} {versions.get(name)}" for name in _SHOWN_VERSIONS)),
            ("norm", f"{head['norm_kind']}, head scale {head['head']['scale']:g}, softcap {head['head']['softcap']}"),
            (
                "magnitude",
                " ".join(f"{x:.3g}" for x in info["typical_rms"]) + "  (typical RMS per tap, final state last)",
            ),
        ]
    if info["codec_error"]:
        error = info["codec_error"]
        kl = "" if error["kl_nats"] is None else f"; KL {error['kl_nats']:.1e} nats over {error['kl_rows']} tokens"
        pairs += [
            (
                "lossy",
                "relative L2 error " + _percents(error["rel_l2"]) + f", 99 % below {_percents(error['rel_l2_p99'])}",
            ),
            ("", "worst token's cosine " + " ".join(f"{x:.5f}" for x in error["worst_cosine"]) + kl),
        ]
    facts(f"{info['store']}: format v{info['format_version']}, {state}", pairs)


def _codec_error(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the error of a lossy codec over all shards; the 99th percentile is that of the worst shard."""
    records = [record for record in records if record["tokens"]]
    if not records:
        return None
    columns_of = {len(record["rel_l2"]) for record in records}
    if len(columns_of) > 1:
        raise IntegrityError(
            "store-damaged",
            f"shards record the codec's error for different numbers of taps: {sorted(columns_of)}",
            hint="hscache verify STORE --level full",
        )
    tokens, kl_rows = (sum(record[name] for record in records) for name in ("tokens", "kl_rows"))

    def columns(name: str) -> list[tuple[float, ...]]:
        return list(zip(*(record[name] for record in records), strict=True))

    weights = [record["tokens"] / tokens for record in records]
    kl = [record["kl_nats"] * record["kl_rows"] / kl_rows for record in records if record["kl_rows"]]
    return {
        "tokens": tokens,
        "rel_l2": [sum(x * w for x, w in zip(column, weights, strict=True)) for column in columns("rel_l2")],
        "rel_l2_p99": [max(column) for column in columns("rel_l2_p99")],
        "worst_cosine": [min(column) for column in columns("worst_cosine")],
        "kl_nats": sum(kl) if kl else None,
        "kl_rows": kl_rows,
    }


def _percents(numbers: list[float]) -> str:
    return " ".join(f"{100 * x:.2g}" for x in numbers) + " %"


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items())) if reasons else "none rejected"
