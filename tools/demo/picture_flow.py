"""Draw the flow of the whole job: prompts, store, drafter, engine, and the command of each step.

python tools/demo/picture_flow.py tools/pictures/flow.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

BOXES = [
    ("Prompts", "what you will serve,\nas JSONL or parquet", "#f1efe8"),
    ("Store", "the target's hidden states,\nloss masks and top-k logits\nin sharded Zarr", "#dcebf7"),
    ("Drafter", "a small DFlash model,\ntrained from the store\nwithout the target", "#e2f1e1"),
    ("Engine", "SGLang or vLLM serves\nthe target with it", "#f1efe8"),
]
STEPS = ["hscache generate\nhscache build", "hstrain fit", "hstrain export"]
CHECKS = [
    "",
    "hscache verify\nreads every byte back\nand recomputes samples",
    "hstrain eval\nmeasures tau from the store,\nhstrain speculate live",
    "",
]
WIDTH, HEIGHT, GAP, BOTTOM, TOP = 2.7, 1.36, 1.95, 1.0, 2.5
GREY, DARK = "#5c5c5c", "#333333"


def main() -> None:
    total = len(BOXES) * WIDTH + len(STEPS) * GAP
    figure, axes = plt.subplots(figsize=(14, 14 * TOP / total))
    figure.subplots_adjust(0.005, 0, 0.995, 1)
    axes.set(xlim=(-0.05, total + 0.05), ylim=(0, TOP))
    axes.set_aspect("equal")
    axes.axis("off")
    middle = BOTTOM + HEIGHT / 2
    for i, (title, text, colour) in enumerate(BOXES):
        left = i * (WIDTH + GAP)
        axes.add_patch(
            FancyBboxPatch(
                (left + 0.1, BOTTOM + 0.1), WIDTH - 0.2, HEIGHT - 0.2, boxstyle="round,pad=0.1", fc=colour, ec="#8a8a8a"
            )
        )
        axes.text(left + WIDTH / 2, BOTTOM + HEIGHT - 0.2, title, ha="center", va="top", size=15, weight="bold")
        axes.text(left + WIDTH / 2, BOTTOM + HEIGHT - 0.52, text, ha="center", va="top", size=10.5, linespacing=1.3)
        axes.text(left + WIDTH / 2, BOTTOM - 0.18, CHECKS[i], ha="center", va="top", size=11, color=GREY)
    for i, step in enumerate(STEPS):
        left = (i + 1) * WIDTH + i * GAP
        ends = (left + 0.08, middle), (left + GAP - 0.08, middle)
        arrow = FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=20, lw=1.6, color=DARK, shrinkA=0, shrinkB=0)
        axes.add_patch(arrow)
        axes.text(left + GAP / 2, middle + 0.14, step, ha="center", va="bottom", size=10.5, family="monospace")
    axes.text(WIDTH + GAP / 2, middle - 0.14, "the target\nruns here", ha="center", va="top", size=11, color=GREY)
    out = Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=100)


if __name__ == "__main__":
    main()
