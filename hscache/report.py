"""What a plan, a store or a comparison looks like on one screen: only printing and drawing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hscache.build.space import PACKED
from hscache.console import Column, counts, duration, facts, figures, new_figure, say, size, table

if TYPE_CHECKING:
    from hscache.audit.compare import Comparison, KernelsReport
    from hscache.audit.verify import VerifyReport
    from hscache.build.convert import ConvertReport
    from hscache.build.repair import RepairReport
    from hscache.build.run import BuildReport
    from hscache.manifest import ResolvedManifest

_SHOWN_VERSIONS = ("transformers", "torch", "flash-linear-attention", "causal-conv1d")


def print_inspection(found: dict[str, Any], what: str) -> None:
    """Print what :func:`hscache.audit.inspect.inspect` returned."""
    share = found["supervised"] / found["tokens"]
    facts(
        what,
        [
            ("samples", f"{found['samples']:,} ({_rejected(found['rejected'])})"),
            ("tokens", f"{found['tokens']:,}, {found['supervised']:,} supervised ({share:.0%})"),
            ("lengths", figures(found["lengths"], ",")),
            ("runs", f"{found['runs']:,}"),
            ("repeats", f"{found['repeats']:.1%} of the supervised tokens"),
            ("cut off", f"{found['cut']:,} answers" if found["cut"] else None),
            ("duplicates", f"{found['duplicates']:,}" if found["duplicates"] else None),
            ("tags", counts(found["tags"]) or None),
        ],
    )
    for name, title in (("before", "before a run"), ("after", "its first tokens"), ("last", "its last token")):
        table(title, ["text", ("runs", ",d")], [(repr(text), n) for text, n in found[name].items()])
    for finding in found["findings"]:
        print(f"{finding['code']}: {finding['detail']}")
    print(f"{what}: " + (f"{len(found['findings'])} findings" if found["findings"] else "nothing stands out"))


def print_plan(plan: dict[str, Any], manifest: ResolvedManifest, out: Path) -> None:
    """Print a plan's JSON form as a table."""
    rows = [(a["name"], a["bytes_per_row"], a["rows"], a["bytes"], size(a["file_bytes"])) for a in plan["arrays"]]
    rows.append(("total", None, None, plan["total_bytes"], size(plan["total_file_bytes"])))
    rows.append(("target/", None, None, plan["target_bytes"], size(plan["target_bytes"])))
    columns: list[Column] = ["array", ("bytes/row", ","), "rows", ("bytes", ","), ("on disk", ">")]
    table(f"{manifest.target.path}, taps {plan['taps']}", columns, rows)
    padding, codec = plan["padded_tokens"] / plan["tokens"] - 1, plan["codec"]
    packed = f"; codec {codec} makes the states smaller than shown" if codec in PACKED else ""
    facts(
        "plan",
        [
            ("rows", f"{plan['rows']:,} ({_rejected(plan['rejected_reasons'])})"),
            ("samples", f"{plan['samples']:,}"),
            ("tokens", f"{plan['tokens']:,}, {plan['loss_tokens']:,} supervised"),
            ("repeats", _repeats(plan)),
            ("forward", f"{plan['batches']:,} batches, {padding:.1%} padding"),
            ("shards", f"{plan['shards']:,} ({plan['shards_committed']:,} committed), {plan['files']:,} files"),
            ("disk", f"{size(plan['needed_bytes'])} to write, {size(plan['free_bytes'])} free at {out}{packed}"),
        ],
    )


def print_build(report: BuildReport) -> None:
    """Print what a build did."""
    what = f"{report.built} shards built" if report.built else "nothing left to build, all shards are complete"
    rate = f", {report.tokens / report.capture_seconds:,.0f} tokens/s" if report.built == report.shards else ""
    say(f"{report.store}: {what} in {duration(report.seconds)}{rate}")
    say(
        f"{report.samples:,} samples, {report.tokens:,} tokens ({report.loss_tokens:,} supervised), "
        f"{report.shards} shards, {size(report.bytes)}"
    )
    if report.rejected:
        n = sum(report.rejected.values())
        say(f"{n} rows rejected: {counts(report.rejected)}; reasons in {report.store}/index.parquet")


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
    state = "whole and right now" if report.ok else "still damaged: hscache verify says what is left"
    say(f"{report.store}: found {counts(report.found)}; built {len(report.rebuilt)} shards again; {state}")


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
    taps = comparison.taps
    small = ("1-cos mean", "p99", "max", "rel L2")
    columns: list[Column] = ["tap", *((name, ".1e") for name in small), ("norm ratio", ".5f")]
    columns += [("bits equal", ".1%"), *((name, ".1e") for name in taps[0].by_position)]
    rows: list[list[object]] = [
        [t.name, t.mean, t.p99, t.max, t.rel_l2, t.norm_ratio, t.equal, *t.by_position.values()] for t in taps
    ]
    if ratios is not None:
        columns.append(("x floor", ".2g"))
        rows = [[*row, ratio] for row, ratio in zip(rows, ratios, strict=True)]
    table(title, columns, rows)
    if comparison.top1 is not None:
        print(f"first choice equal {comparison.top1:.2%}, KL {comparison.kl_nats:.2e} nats")


def _print_kernels(title: str, report: KernelsReport) -> None:
    if report.local:
        forms = {"1-cos mean": ".1e", "max": ".1e", "rel Frobenius": ".1e", "norm ratio": ".7g"}
        rows = [
            [
                c.layer_index, c.op, c.total.one_minus_cos_mean, c.total.one_minus_cos_max, c.total.rel_frobenius,
                c.total.norm_ratio, "ok" if c.ok else f"{', '.join(c.beyond)} heads {list(c.bad_heads)}",
            ]
            for c in report.local
        ]  # fmt: skip
        table(f"{title}, same inputs to both", [("layer", "d"), "op", *forms.items(), ""], rows)
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
    target, corpus = info["target"], info["corpus"]
    state = "complete" if info["shards"] == info["shards_planned"] else "UNFINISHED"
    shape = f"{target['num_layers']} layers, H {target['hidden_size']}, V {target['vocab_size']}"
    logits = f"top-{info['topk']} with logsumexp" if info["topk"] else "none"
    codecs = ", from ".join([info["codec"], *info["codecs_before"]])
    pairs: list[tuple[str, object]] = [
        ("target", f"{target['path']} ({shape})"),
        ("states", f"taps {info['taps']}, final state {'yes' if info['final_state'] else 'no'}, logits {logits}"),
        ("corpus", f"{corpus['path']}, {corpus['rows']:,} rows"),
        ("samples", f"{info['samples']:,} ({_rejected(info['rejected'])})"),
        ("tokens", f"{info['tokens']:,}, {info['loss_tokens']:,} supervised"),
        ("repeats", _repeats(info)),
        ("tags", figures(info["tags"]) or "none"),
        ("shards", f"{info['shards']} of {info['shards_planned']}, {size(info['shard_bytes'])}, codec {codecs}"),
        ("target/", size(info["target_bytes"])),
    ]
    if made := info["provenance"]:
        load = made["load"]
        versions = {name: str(made["versions"].get(name)) for name in _SHOWN_VERSIONS}
        pairs += [
            ("ran on", f"{made['device']}, {info['dtype']}, {load['attn_implementation']} attention"),
            ("kernels", f"{made['kernels']['path']} [{', '.join(info['kernel_paths'])}]"),
            ("with", figures(versions)),
            ("norm", f"{load['norm_kind']}, head scale {load['head']['scale']:g}, softcap {load['head']['softcap']}"),
            ("magnitude", f"{_row(info['typical_rms'], '.3g')}  (typical RMS per tap, final state last)"),
        ]
    if error := info["codec_error"]:
        rel_l2, p99 = (_row((100 * x for x in error[name]), ".2g") for name in ("rel_l2", "rel_l2_p99"))
        kl = "" if error["kl_nats"] is None else f"; KL {error['kl_nats']:.1e} nats over {error['kl_rows']} tokens"
        pairs += [
            ("lossy", f"relative L2 error {rel_l2} %, 99 % below {p99} %"),
            ("", f"worst token's cosine {_row(error['worst_cosine'], '.5f')}{kl}"),
        ]
    facts(f"{info['store']}: format v{info['format_version']}, {state}", pairs)


def _row(numbers: Iterable[float], form: str) -> str:
    return " ".join(format(number, form) for number in numbers)


def _repeats(numbers: dict[str, Any]) -> str | None:
    """Return how much of a plan's or a store's text repeats, and how many answers were cut off."""
    if numbers["repeated_tokens"] is None:
        return None
    share, cut = numbers["repeated_tokens"] / max(numbers["loss_tokens"], 1), numbers["cut"]
    return f"{share:.1%} of the supervised tokens" + (f"; {cut:,} answers cut off" if cut else "")


def _rejected(reasons: dict[str, int]) -> str:
    return counts(reasons) or "none rejected"
