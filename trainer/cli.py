"""``hstrain`` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hscache import __version__
from hscache.console import Interrupted, duration, emit_json, facts, run_command, say, size

app = typer.Typer(
    name="hstrain",
    help="Fit a DFlash drafter from an hscache store, without the target.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


Manifest = Annotated[Path, typer.Argument(help="Training manifest (TOML).")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override one key: optim.lr=1e-3.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"hstrain {__version__}")
        raise typer.Exit


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="Store directory.")],
    json: Json = False,
) -> None:
    """Show what a drafter can be trained on from a store: context taps, target head, losses, tokens.

    Example: hstrain inspect runs/demo/store
    """
    numbers = training_facts(store)
    if json:
        emit_json(numbers)
        return
    head = numbers["head"]
    facts(
        f"{store}: a drafter can be trained on",
        [
            ("context", f"taps {numbers['taps']}, {numbers['context_width']} numbers a token"),
            ("samples", f"{numbers['samples']:,}, {numbers['tokens']:,} tokens, {numbers['loss_tokens']:,} supervised"),
            ("head", f"[{head['vocab_size']}, {head['hidden_size']}] {head['dtype']}, tied {head['tied']}"),
            ("norm", f"scales by {head['norm_kind']}"),
            ("losses", ", ".join(numbers["losses"])),
        ],
    )


@app.command()
def config(manifest: Manifest, set_: Set = None) -> None:
    """Print the resolved training manifest, every default written out.

    Example: hstrain config manifests/train/demo.toml --set optim.lr=1e-3
    """
    from hscache.manifest import to_toml
    from trainer.manifest import load_train_manifest

    print(to_toml(load_train_manifest(manifest, set_ or ())), end="")


@app.command()
def fit(
    manifest: Manifest,
    store: Annotated[Path, typer.Option("--store", help="Store directory, complete.")],
    out: Annotated[Path | None, typer.Option("--out", help="Run directory; new, or begun with this manifest.")] = None,
    set_: Set = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda:0; default: CUDA if there is one.")] = None,
    overfit: Annotated[int, typer.Option(min=0, help="Learn so many samples by heart, as a check, and stop.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show parameters, memory, steps and hours; train nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a drafter from a store, or go on where a run was stopped; under torchrun on many devices.

    Example: hstrain fit manifests/train/demo.toml --store runs/demo/store --out runs/demo/drafter
    """
    from dataclasses import asdict

    from trainer.manifest import load_train_manifest

    parsed = load_train_manifest(manifest, set_ or ())
    if dry_run:
        from trainer.estimate import dry_run as estimate

        _print_estimate(estimate(parsed, store, device=device), json=json)
        return
    if out is None:
        raise typer.BadParameter("--out is needed, but for a --dry-run")
    from trainer.fit import fit as run_fit

    try:
        report = run_fit(parsed, store, out, device=device, overfit=overfit)
    except Interrupted as stop:
        say(f"{stop}: a checkpoint is written. The same command goes on from there")
        raise typer.Exit(128 + stop.signum) from None
    if json:
        emit_json(asdict(report))
    say(report.text())
    if overfit and report.overfit_at is None:
        raise typer.Exit(1)


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Picture; default: curves.png in the run.")] = None,
) -> None:
    """Draw a run's curves: loss, tau, accuracy by slot, waiting for data.

    Example: hstrain plot runs/demo/drafter
    """
    from trainer.plot import plot_run

    picture = out or run / "curves.png"
    plot_run(run, picture)
    say(f"{picture}")


def _print_estimate(numbers: dict[str, Any], *, json: bool) -> None:
    if json:
        emit_json(numbers)
        return
    facts(
        "this run would take",
        [
            ("drafter", f"{numbers['parameters']:,} parameters in {numbers['tensors']} tensors"),
            ("samples", f"{numbers['train_samples']:,} to train on, {numbers['validation_samples']:,} to validate"),
            ("an epoch", f"{numbers['tokens_an_epoch']:,} tokens in {numbers['packs_an_epoch']:,} packs"),
            ("steps", f"{numbers['steps']:,}"),
            (
                "memory",
                f"{size(numbers['memory_bytes'])} counted, {size(numbers['measured_peak_bytes'])} at the peak here",
            ),
            (
                "time",
                f"{numbers['seconds_a_step']:.2f} s a step, {duration(numbers['hours'] * 3600)} without validation",
            ),
        ],
    )


def training_facts(store: Path) -> dict[str, Any]:
    """Return what a store offers to a trainer; loads the head but never the target.

    Args:
        store: Store directory.

    Raises:
        HscacheError: When the store or its ``target/`` cannot be used.
    """
    import hscache
    from hscache.store.head import load_head
    from hscache.store.layout import StorePaths

    opened = hscache.open(store)
    head = load_head(StorePaths(store).target)
    losses = ["ce"]
    if "logit_ids" in opened.specs:
        losses += ["ce-argmax", "kl-topk"]
    if "final_state" in opened.specs:
        losses += ["kl-exact"]
    return {
        "samples": len(opened),
        "complete": opened.complete,
        "tokens": int(opened.n_tokens.sum()),
        "loss_tokens": int(opened.n_loss.sum()),
        "taps": opened.taps,
        "context_width": len(opened.taps) * head.embed.shape[1],
        "head": {
            "vocab_size": head.lm_head.shape[0],
            "hidden_size": head.lm_head.shape[1],
            "dtype": str(head.lm_head.dtype).removeprefix("torch."),
            "tied": head.facts["tied"],
            "norm_kind": head.facts["norm_kind"],
        },
        "losses": losses,
    }


def main() -> None:
    """Run the command line."""
    run_command(app)
