"""Draw one sample of a store: magnitude of its states per tap and token, supervision, the target's confidence.

python tools/demo/picture_store.py runs/demo-smollm2/store tools/pictures/store.png [SAMPLE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np

import hscache

mpl.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    store = hscache.open(sys.argv[1])
    sample = store.sample(int(sys.argv[3]) if len(sys.argv) > 3 else 0, kind="numpy")
    rows = np.concatenate([sample.hidden_states, sample.final_state[:, None]], axis=1)
    rms = np.sqrt(np.square(rows, dtype=np.float64).mean(-1))
    names = [f"tap {tap}" for tap in store.taps] + ["final state"]
    tokens = np.arange(len(rms))
    figure, (states, sure) = plt.subplots(
        2, 1, figsize=(10, 4.4), sharex=True, height_ratios=(3, 1.3), layout="constrained"
    )
    image = states.pcolormesh(tokens, np.arange(len(names)), np.log10(rms.T), cmap="viridis", shading="nearest")
    states.set_yticks(np.arange(len(names)), names)
    states.set_title(f"{sample.sample_id}: {len(tokens)} tokens, {int(sample.loss_mask.sum())} supervised", loc="left")
    figure.colorbar(image, ax=states, label="log10 RMS of the state")
    sure.fill_between(tokens, 0, 1, where=sample.loss_mask == 1, step="mid", color="0.9", label="supervised")
    top = np.exp(sample.logits.logprobs[:, 0].astype(np.float32))
    sure.plot(
        sample.logits.positions, top, ".", markersize=3, color="C3", label="probability of the target's first choice"
    )
    sure.set(ylim=(0, 1.02), xlim=(-0.5, len(tokens) - 0.5), xlabel="token")
    sure.legend(loc="lower left", frameon=False, fontsize=8)
    out = Path(sys.argv[2])
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
