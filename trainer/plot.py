"""``hstrain plot``: a run's curves as one picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hscache.errors import EnvironmentFault, InputError
from trainer.checkpoint import RunPaths


def read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training and the validation records of a run.

    Raises:
        InputError: ``not-a-checkpoint``: no ``metrics.jsonl`` there.
    """
    path = RunPaths(run).metrics
    if not path.exists():
        raise InputError("not-a-checkpoint", f"{run}: no metrics.jsonl", hint="hstrain fit writes one into its --out")
    # a run that is going on may be in the middle of its last line
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    records = [json.loads(line) for line in lines]
    return [r for r in records if r["kind"] == "train"], [r for r in records if r["kind"] == "validation"]


def plot_run(run: Path, out: Path) -> None:
    """Draw loss, tau, accuracy by slot and the share of time spent waiting for data.

    Args:
        run: Run directory.
        out: Picture to write.

    Raises:
        InputError: ``not-a-checkpoint``.
        EnvironmentFault: ``dependency-missing``.
    """
    train, held = read_metrics(run)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault(
            "dependency-missing", "matplotlib is not installed", hint="pip install 'hscache[report]'"
        ) from error
    figure = Figure(figsize=(11, 7), layout="constrained")
    loss, tau, slots, wait = figure.subplots(2, 2).flat
    steps = [r["step"] for r in train]
    loss.plot(steps, [r["loss"] for r in train])
    loss.set(title="training loss, mean over slots", xlabel="step", ylabel="nats")
    tau.plot(steps, [r["tau"] for r in train], color="0.75", label="training blocks")
    at = [r["step"] for r in held]
    tau.plot(at, [r["tau"] for r in held], "o-", label="validation tau (serving walk)")
    tau.fill_between(at, *zip(*(r["tau_interval"] for r in held), strict=True), alpha=0.2) if held else None
    tau.plot(at, [r["tau_all"] for r in held], "s--", label="validation tau_all")
    tau.plot(at, [r["ddtree"]["8"] for r in held], "^:", label="validation DDTree-8")
    tau.set(title="acceptance length", xlabel="step", ylabel="tokens a step")
    tau.legend()
    for k in range(len(held[0]["acc"]) if held else 0):
        slots.plot(at, [r["acc"][k] for r in held], "o-", markersize=3, label=f"slot {k + 1}")
    slots.set(title="validation accuracy by slot", xlabel="step", ylim=(0, None))
    slots.legend(ncols=2, fontsize="small") if held else None
    wait.plot(steps, [100 * r["wait"] for r in train])
    wait.set(title="waiting for data", xlabel="step", ylabel="% of the time", ylim=(0, None))
    figure.suptitle(str(run))
    figure.savefig(out, dpi=110)
