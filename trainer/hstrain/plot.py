"""Pictures of a run's curves, of an evaluation, and of live decoding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hscache.console import new_figure
from hscache.errors import InputError
from hstrain.run.folder import RunPaths, read_lines
from hstrain.score.ddtree import SIZES


def read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training and the validation records of a run.

    Raises:
        InputError: ``not-a-checkpoint``: no ``metrics.jsonl`` there.
        IntegrityError: ``checkpoint-damaged`` for a line that is not a valid record.
    """
    path = RunPaths(run).metrics
    if not path.exists():
        raise InputError("not-a-checkpoint", f"{run}: no metrics.jsonl", hint="hstrain fit writes one into its --out")
    records = [record for _, record in read_lines(path)]
    return [r for r in records if r["kind"] == "train"], [r for r in records if r["kind"] == "validation"]


@contextmanager
def _picture(
    out: Path, width: float, height: float, rows: int, columns: int, title: str | None = None
) -> Iterator[Any]:
    """Give the axes of a new figure, and write the picture when they are drawn."""
    figure = new_figure(width, height)
    yield figure.subplots(rows, columns).flat
    if title is not None:
        figure.suptitle(title)
    figure.savefig(out, dpi=110)


def plot_run(run: Path, out: Path) -> None:
    """Draw loss, tau, accuracy by slot and the share of time spent waiting for data.

    Args:
        run: Run directory.
        out: Picture to write.

    Raises:
        InputError: ``not-a-checkpoint``.
        IntegrityError: ``checkpoint-damaged``.
        EnvironmentFault: ``dependency-missing``.
    """
    train, held = read_metrics(run)
    with _picture(out, 11, 7, 2, 2, str(run)) as (loss, tau, slots, wait):
        steps = [r["step"] for r in train]
        loss.plot(steps, [r["loss"] for r in train])
        loss.set(title="training loss, mean over slots", xlabel="step", ylabel="nats")
        tau.plot(steps, [r["tau"] for r in train], color="0.75", label="training blocks")
        at = [r["step"] for r in held]
        tau.plot(at, [r["tau"] for r in held], "o-", label="validation tau (serving walk)")
        tau.fill_between(at, *zip(*(r["tau_interval"] for r in held), strict=True), alpha=0.2) if held else None
        tau.plot(at, [r["tau_all"] for r in held], "s--", label="validation tau_all")
        tau.plot(at, [r["ddtree"]["8"] for r in held], "^:", label="validation DDTree-8")
        tau.set(title="acceptance length", xlabel="step", ylabel="tokens per step")
        tau.legend()
        for k in range(len(held[0]["acc"]) if held else 0):
            slots.plot(at, [r["acc"][k] for r in held], "o-", markersize=3, label=f"slot {k + 1}")
        slots.set(title="validation accuracy by slot", xlabel="step", ylim=(0, None))
        slots.legend(ncols=2, fontsize="small") if held else None
        wait.plot(steps, [100 * r["wait"] for r in train])
        wait.set(title="waiting for data", xlabel="step", ylabel="% of the time", ylim=(0, None))


def plot_evaluation(found: dict[str, Any], out: Path) -> None:
    """Draw accuracy by slot, the histogram of walk steps, and tau by the size of the draft tree.

    Args:
        found: From :func:`hstrain.score.report.evaluate`.
        out: Picture to write.

    Raises:
        EnvironmentFault: ``dependency-missing``.
    """
    rows, width = found["rows"], 0.8 / len(found["rows"])
    with _picture(out, 13, 4, 1, 3) as (slots, steps, trees):
        for i, row in enumerate(rows):
            name = f"{row['checkpoint']} ({row['store']})"
            slots.plot(range(1, len(row["acc"]) + 1), row["acc"], "o-", label=name)
            share = np.array(row["histogram"]) / max(sum(row["histogram"]), 1)
            steps.bar(np.arange(1, len(share) + 1) + (i - (len(rows) - 1) / 2) * width, share, width)
            trees.plot(["chain", *map(str, SIZES)], [row["tau"], *(row["ddtree"][str(n)] for n in SIZES)], "o-")
        slots.set(title="accuracy by slot", xlabel="slot", ylim=(0, 1))
        slots.legend(fontsize="x-small")
        steps.set(title="tokens per step of the serving walk", xlabel="tokens", ylabel="share of steps")
        trees.set(title="tau by nodes of the draft tree", xlabel="nodes", ylabel="tokens per step")


def plot_speculation(found: dict[str, Any], out: Path) -> None:
    """Draw the histogram of steps, tau of each prompt, and what a step costs and yields.

    Args:
        found: From :func:`hstrain.live.speculate.speculate_prompts`.
        out: Picture to write.

    Raises:
        EnvironmentFault: ``dependency-missing``.
    """
    title = f"{found['target']}, {found['dtype']} on {found['device']}"
    with _picture(out, 13, 4, 1, 3, title) as (steps, prompts, cost):
        accepted = [tokens for entry in found["prompts"] for tokens in entry["accepted"]]
        share = np.bincount(accepted, minlength=found["block_size"] + 1)[1:] / max(len(accepted), 1)
        steps.bar(range(1, len(share) + 1), share)
        steps.set(title="tokens per step", xlabel="tokens", ylabel="share of steps")
        taus = sorted(entry["tau"] for entry in found["prompts"] if entry["tau"] is not None)
        prompts.plot(taus, "o-", markersize=3)
        prompts.set(title="tau by prompt, ascending", xlabel="prompts", ylabel="tokens per step")
        plain, bottom = found["tokens_per_s"]["plain"], 0.0
        # in seconds if the speed of plain decoding is not known
        scale, unit = (plain, "tokens without a drafter") if plain else (1.0, "seconds")
        for part, seconds in found["step_s"].items():
            cost.bar(["a step costs"], [seconds * scale], bottom=bottom, label=part)
            bottom += seconds * scale
        if plain and found["tau"] is not None:
            cost.bar(["a step yields"], [found["tau"]], color="0.6")
        cost.set(title="cost and yield of a step", ylabel=unit)
        cost.legend()
