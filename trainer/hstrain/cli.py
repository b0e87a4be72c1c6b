"""The command line of hstrain."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hscache.console import (
    command_line,
    duration,
    emit_json,
    facts,
    new_figure,
    resumable,
    run_command,
    say,
    size,
    write_json,
)

if TYPE_CHECKING:
    from hscache.store.head import TargetHead
    from hstrain.score.walk import Cost

app = command_line("hstrain", "Fit a DFlash drafter from an hscache store, without the target.")


def _picture(path: Path | None) -> Path | None:
    if path is not None and path.suffix.lower() not in _PICTURES:
        raise typer.BadParameter(f"{path}: expected a file name that ends in {', '.join(_PICTURES)}")
    return path


def _finite(value: float) -> float:
    if not math.isfinite(value):  # NaN passes the checks of a range
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


_PICTURES = (".png", ".svg", ".pdf")
Manifest = Annotated[Path, typer.Argument(help="Training manifest (TOML).")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override one key: optim.lr=1e-3.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Checkpoint = Annotated[Path, typer.Argument(help="Run, checkpoint or released drafter.")]
Plot = Annotated[Path | None, typer.Option(help="Picture to write.", callback=_picture)]
Figures = Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write all figures to.")]
Device = Annotated[str | None, typer.Option(help="Such as cuda:0; default: CUDA if there is one.")]
DtypeOption = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option("--dtype", help="Precision of the target; auto: bfloat16 where the device has it in hardware."),
]
StoreOption = Annotated[Path, typer.Option("--store", help="Store that holds the target's embedding and head.")]


@app.command()
def config(manifest: Manifest, set_: Set = None) -> None:
    """Print the resolved training manifest, every default written out.

    Example: hstrain config manifests/train/demo.toml --set optim.lr=1e-3
    """
    from hscache.manifest import to_toml
    from hstrain.manifest import load_train_manifest

    print(to_toml(load_train_manifest(manifest, set_ or ())), end="")


@app.command()
def fit(
    manifest: Manifest,
    store: Annotated[Path, typer.Option("--store", help="Store directory, complete.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory; new, or started with this manifest.")
    ] = None,
    set_: Set = None,
    device: Device = None,
    overfit: Annotated[int, typer.Option(min=0, help="Overfit this many samples, as a check, and stop.")] = 0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write the figures for TensorBoard.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show parameters, memory, steps and hours; train nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a drafter from a store, or resume a stopped run; use torchrun for several devices.

    Example: hstrain fit manifests/train/demo.toml --store runs/demo/store --out runs/demo/drafter
    """
    from hstrain.manifest import load_train_manifest
    from hstrain.train.parallel import first_rank

    parsed = load_train_manifest(manifest, set_ or ())
    if dry_run:
        from hstrain.train.estimate import dry_run as estimate

        numbers = estimate(parsed, store, device=device)
        if first_rank():
            emit_json(numbers) if json else _print_estimate(numbers)
        return
    if out is None:
        raise typer.BadParameter("--out is needed, except with --dry-run")
    from hstrain.train.fit import fit as run_fit

    with resumable("a checkpoint is written", quiet=not first_rank()):
        report = run_fit(parsed, store, out, device=device, overfit=overfit, tensorboard=tensorboard)
    if first_rank():
        if json:
            emit_json(report)
        say(report.text())
    if overfit and report.overfit_at is None:
        raise typer.Exit(1)


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Picture; default: curves.png in the run.", callback=_picture)
    ] = None,
) -> None:
    """Draw a run's curves: loss, tau, accuracy by slot, time spent waiting for data.

    Example: hstrain plot runs/demo/drafter
    """
    from hstrain.plot import plot_run

    picture = out or run / "curves.png"
    plot_run(run, picture)
    say(f"{picture}")


@app.command(name="eval")
def eval_(
    checkpoints: Annotated[list[Path], typer.Argument(help="Runs, checkpoints or released drafters.")],
    store: Annotated[list[Path], typer.Option("--store", help="Store with held-out samples; repeat it to compare.")],
    held_out: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share to hold out; default: samples no checkpoint trained on; 1: all."),
    ] = None,
    part: Annotated[
        Literal["test", "validation", "held-out"] | None,
        typer.Option(
            help="Held-out samples to score: those that no validation reads (data.test), those that it may read, or "
            "all; default: test if every training has such samples, else all."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Score only the first N of these samples.")] = None,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="Precision of the drafter.")] = "fp32",
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="draft=X,verify=Y[,keep=Z][,row=W]",
            help="Predict speeds by drafted tokens; costs in plain tokens, as hstrain speculate prints them.",
        ),
    ] = None,
    device: Device = None,
    plot: Plot = None,
    out: Figures = None,
    json: Json = False,
) -> None:
    """Score drafters from the cache alone: tau by the serving walk, tau_all, accuracy, DDTree, by tag and position.

    Example: hstrain eval runs/demo/drafter --store runs/demo/store
    """
    from hstrain.plot import plot_evaluation
    from hstrain.score.report import evaluate, print_evaluation

    _check_writable(out, plot)
    found = evaluate(
        checkpoints, store, held_out=held_out, part=part, samples=samples, precision=precision, device=device,
        cost=_cost(cost),
    )  # fmt: skip
    _show(found, print_evaluation, plot_evaluation, plot=plot, out=out, json=json)


def _cost(text: str | None) -> Cost | None:
    from hstrain.score.walk import Cost

    if text is None:
        return None
    form = r"draft=(?P<draft>[0-9.]+),verify=(?P<verify>[0-9.]+)(?:,keep=(?P<keep>[0-9.]+))?(?:,row=(?P<row>[0-9.]+))?"
    match = re.fullmatch(form, text.replace(" ", ""))
    try:
        given = {name: float(value) for name, value in match.groupdict().items() if value} if match else {}
        found = Cost(**given) if match else None
    except ValueError:
        found = None
    if found is None or found.verify < 1:
        raise typer.BadParameter(
            f"--cost {text}: expected draft=X,verify=Y[,keep=Z][,row=W] with Y of at least 1, in plain tokens"
        )
    return found


@app.command()
def speculate(
    checkpoint: Checkpoint,
    target: Annotated[str, typer.Option("--target", help="Checkpoint directory or hub id of the target.")],
    prompts: Annotated[list[Path], typer.Option("--prompts", help="JSONL(.gz) or parquet; as for hscache generate.")],
    store: StoreOption,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a completion.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.", callback=_finite)] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus, when sampling.", callback=_finite)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    draft_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Verify only the first N drafted tokens of a block; several: compare their speeds. Default: all.",
        ),
    ] = None,
    tree: Annotated[int | None, typer.Option(min=1, help="Verify a draft tree of this many nodes.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt's text as it is: no chat template.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first N prompts of each file.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Also score the greedy texts of this OpenAI-compatible server (vLLM, SGLang, llama.cpp; key from "
            "OPENAI_API_KEY); --tree applies to them too; not with a --temperature above 0.",
        ),
    ] = None,
    reference_model: Annotated[
        str | None, typer.Option(help="The model's name on that server; default: its only model.")
    ] = None,
    dtype: DtypeOption = "auto",
    device: Device = None,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Let torch references run on a GPU.")
    ] = False,
    plot: Plot = None,
    out: Figures = None,
    json: Json = False,
) -> None:
    """Decode live with the target, with and without the drafter: tau, tokens/s, and whether the texts are equal.

    Example: hstrain speculate runs/demo/drafter --store runs/demo/store --target DIR --prompts prompts.jsonl
    """
    import hscache
    from hstrain.exchange.importer import open_drafter, warn_of_other_target
    from hstrain.live.server import Server
    from hstrain.live.speculate import print_speculation, speculate_prompts
    from hstrain.live.target import Sampling
    from hstrain.plot import plot_speculation

    if reference is None and reference_model is not None:
        raise typer.BadParameter("--reference-model needs --reference")
    if draft_tokens is not None and (tree is not None or not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", draft_tokens)):
        raise typer.BadParameter(f"--draft-tokens {draft_tokens}: expected numbers such as 1,3,7, and no --tree")
    _check_writable(out, plot)
    head = _head(store)
    drafter, facts = open_drafter(checkpoint, head)
    warn_of_other_target(checkpoint, facts, hscache.open(store))
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    server = None if reference is None else Server(reference, reference_model)
    found = speculate_prompts(
        drafter, head, target, prompts, sampling, draft_tokens=[int(n) for n in (draft_tokens or "").split(",") if n],
        tree_size=tree, raw=raw, limit=limit, reference=server, dtype=dtype, device=device,
        allow_fallback=allow_fallback,
    )  # fmt: skip
    _show(found, print_speculation, plot_speculation, plot=plot, out=out, json=json)
    if any(row["lossless"]["unexplained"] for row in found["by_draft_tokens"]):
        raise typer.Exit(1)


@app.command(name="import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="Released drafter: folder with config.json and safetensors.")],
    store: Annotated[Path, typer.Option("--store", help="Store of its target, with its taps.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Training manifest (TOML) to write, for hstrain fit.")
    ] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Show what a released drafter is and whether a store fits it, and write the manifest that fine-tunes it.

    Example: hstrain import runs/released --store runs/demo/store --out runs/tune.toml --set optim.lr=1e-4
    """
    from hstrain.exchange.importer import import_drafter

    found = import_drafter(checkpoint, store, out, set_ or ())
    emit_json(found) if json else _print_import(found)
    if out is not None:
        say(f"{out}: hstrain fit {out} --store {store} --out RUN continues its training")


@app.command()
def export(
    checkpoint: Checkpoint,
    store: StoreOption,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; must not exist.")],
    format_: Annotated[
        Literal["zlab", "speculators"],
        typer.Option("--format", help="Layout; speculators: only if all layers are full or all are sliding."),
    ] = "zlab",
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type of the weights.")] = "bfloat16",
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            metavar="yarn:factor=F[,original=N]",
            help="Let engines stretch the drafter's N positions (default: its own max_position_embeddings) to F times "
            "as many with YaRN; it was trained without.",
        ),
    ] = None,
    evaluation: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            help="JSON of hstrain eval --out, whose tau of this drafter the card shows; default: the validation of the "
            "checkpoint's step, if its run is at hand.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a drafter for serving engines, read it back and compare the two.

    Example: hstrain export runs/demo/drafter --store runs/demo/store --out runs/demo/export
    """
    from dataclasses import asdict

    from hscache.errors import ConflictError
    from hscache.store.index import read_manifest
    from hstrain.exchange.export import evaluation_of, export_drafter
    from hstrain.exchange.importer import open_drafter, target_differences

    yarn = _yarn(rope_scaling)
    head, manifest = _head(store), read_manifest(store)
    drafter, facts = open_drafter(checkpoint, head)
    provenance = facts.get("provenance", {})
    if parts := target_differences(facts, manifest):
        there = provenance["store"]["target"]
        what = f"{checkpoint} was trained for {there}: its {' and '.join(parts)} differ from those of {store}"
        raise ConflictError("target-other", what, hint="give a store of the target that the drafter was trained for")
    # a released drafter may name its target; if not, take the target of the store whose head it fits
    named = provenance["store"]["target"] if provenance else facts["imported"].verifier
    target = named or manifest["manifest"]["target"]["path"]
    card = {"target": target, "checkpoint": facts["path"], **provenance}
    if (measured := evaluation_of(drafter, facts, evaluation)) is not None:
        card["evaluation"] = measured
    done = export_drafter(format_, drafter, head, out, provenance=card, dtype=dtype, yarn=yarn)
    if json:
        emit_json({**asdict(done), "path": str(done.path)})
    say(f"{out}: {done.layout} layout, {done.parameters:,} parameters, {size(done.size_bytes)}; read back and compared")


def _yarn(text: str | None) -> tuple[float, int | None] | None:
    if text is None:
        return None
    match = re.fullmatch(r"yarn:factor=(\d+(?:\.\d+)?)(?:,original=([1-9]\d{0,7}))?", text.replace(" ", ""))
    if match is None or not 1 < float(match[1]) < math.inf:
        raise typer.BadParameter(f"--rope-scaling {text}: expected yarn:factor=F[,original=N], F above 1, N positions")
    return float(match[1]), None if match[2] is None else int(match[2])


@app.command()
def doctor(
    checkpoint: Checkpoint,
    store: StoreOption,
    target: Annotated[str | None, typer.Option("--target", help="Also compare with this live target.")] = None,
    dtype: DtypeOption = "auto",
    device: Device = None,
    json: Json = False,
) -> None:
    """Compare what a drafter was trained on with a store and a live target; name the effect of each difference.

    Example: hstrain doctor runs/demo/drafter --store runs/demo/store
    """
    from hstrain.doctor import diagnose, print_diagnosis, to_json

    found = diagnose(checkpoint, store, target=target, dtype=dtype, device=device)
    emit_json(to_json(found)) if json else print_diagnosis(found)
    if any(fact.grave and not fact.same for fact in found):
        raise typer.Exit(1)


def _show(
    found: dict[str, Any],
    text: Callable[[dict[str, Any]], None],
    picture: Callable[[dict[str, Any], Path], None],
    *,
    plot: Path | None,
    out: Path | None,
    json: bool,
) -> None:
    """Write the figures in every requested form; if one fails, the others are still written."""
    try:
        if out is not None:
            write_json(found, out)
    finally:
        try:
            emit_json(found) if json else text(found)
        finally:
            if plot is not None:
                picture(found, plot)


def _check_writable(out: Path | None, plot: Path | None) -> None:
    """Fail before hours of work if a file cannot be written or a picture cannot be drawn."""
    from hscache.store.durable import disk_errors

    for path in (out, plot):
        if path is None:
            continue
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
    if plot is not None:
        new_figure(1, 1)


def _head(store: Path) -> TargetHead:
    from hscache.store.head import load_head
    from hscache.store.index import read_manifest
    from hscache.store.layout import StorePaths

    read_manifest(store)  # distinguishes a path without a store from a damaged store
    return load_head(StorePaths(store).target)


def _print_import(found: dict[str, Any]) -> None:
    shape = found["drafter"]
    verifier = "" if found["verifier"] is None else f", for {found['verifier']}"
    window = "no window" if shape["sliding_window"] is None else f"window {shape['sliding_window']:,} tokens"
    kinds = [kind.removesuffix("_attention") for kind in shape["layer_types"]]
    yarn = f", YaRN by {shape['yarn_factor']:g}" if shape["yarn_positions"] else ""
    pairs: list[tuple[str, object]] = [
        ("layout", found["layout"] + verifier),
        ("taps", f"{list(shape['taps'])} of {shape['num_target_layers']} blocks, counted from 0; the store has them"),
        ("block", f"{shape['block_size']} tokens: the anchor and {shape['block_size'] - 1} drafted"),
        ("mask token", shape["mask_token_id"]),
        ("layers", f"{len(kinds)}: {', '.join(kinds)}; {window}"),
        ("widths", f"{shape['hidden_size']:,}, feed-forward {shape['intermediate_size']:,}"),
        ("heads", f"{shape['num_heads']} of {shape['head_dim']}, {shape['num_kv_heads']} for keys and values"),
        ("rope", f"theta {shape['rope_theta']:g}, {shape['max_position_embeddings']:,} positions{yarn}"),
        ("norms", f"epsilon {shape['rms_norm_eps']:g}"),
        ("parameters", f"{found['parameters']:,} in {found['tensors']} tensors, {', '.join(found['dtypes'])}"),
        *(("note", note) for note in found["notes"]),
    ]
    facts(f"{found['checkpoint']}: a drafter for {found['store']}", pairs)


def _print_estimate(numbers: dict[str, Any]) -> None:
    memory, host = size(numbers["memory_bytes"]), size(numbers["host_memory_bytes"])
    hours = duration(numbers["hours"] * 3600)
    facts(
        "this run would take",
        [
            ("drafter", f"{numbers['parameters']:,} parameters in {numbers['tensors']} tensors"),
            (
                "samples",
                f"{numbers['train_samples']:,} to train on, {numbers['validation_samples']:,} to validate on, "
                f"{numbers['test_samples']:,} to test on",
            ),
            ("an epoch", f"{numbers['tokens_an_epoch']:,} tokens in {numbers['packs_an_epoch']:,} packs"),
            ("steps", f"{numbers['steps']:,}"),
            ("memory", f"{memory} counted, {size(numbers['measured_peak_bytes'])} at the peak here"),
            ("on the host", f"{host} counted for the first rank" if numbers["host_memory"] else None),
            ("time", f"{numbers['seconds_a_step']:.2f} s a step, {hours} without validation"),
        ],
    )


def main() -> None:
    """Run the command line."""
    run_command(app)
