"""``hstrain`` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hscache import __version__
from hscache.console import emit_json, facts, run_command

app = typer.Typer(
    name="hstrain",
    help="Fit a DFlash drafter from an hscache store, without the target.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"hstrain {__version__}")
        raise typer.Exit


@app.command()
def inspect(
    store: Annotated[Path, typer.Argument(help="Store directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
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
