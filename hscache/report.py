"""What a plan, a store or a comparison looks like on one screen: only printing and drawing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hscache.console import duration, facts, new_figure, say, size, table

if TYPE_CHECKING:
    from hscache.audit.compare import Comparison, KernelsReport
    from hscache.audit.verify import VerifyReport
    from hscache.build.convert import ConvertReport
    from hscache.build.repair import RepairReport
    from hscache.build.run import BuildReport
    from hscache.manifest import ResolvedManifest

_SHOWN_VERSIONS = ("transformers", "torch", "flash-linear-attention", "causal-conv1d")


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


def show_comparison(title: str, found: Comparison | KernelsReport, *, tables: bool = True, plot: Path | None) -> None:
    """Show the distance of two sets of states, or of two kernel paths.

    Args:
        title: What was compared with what.
        found: The comparison.
        tables: Print tables.
        plot: PNG to write for kernel paths.
    """
    from hscache.audit.compare import Comparison

    if isinstance(found, Comparison):
        if tables:
            _print_distances(title, found)
        return
    if tables:
        _print_kernels(title, found)
    if plot is not None:
        plot_kernels(found, plot)


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


def _print_kernels(title: str, report: KernelsReport) -> None:
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
        table(f"{title}, same inputs to both", columns, rows, right=(0, 2, 3, 4, 5))
    _print_distances(f"{title}, end to end", report.end_to_end, report.ratios)
    floor = f"noise floor: {report.paths[0]} in the store's precision against the next wider one"
    _print_distances(floor, report.floor)


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


def _percents(numbers: list[float]) -> str:
    return " ".join(f"{100 * x:.2g}" for x in numbers) + " %"


def _reasons(reasons: dict[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(reasons.items())) if reasons else "none rejected"
