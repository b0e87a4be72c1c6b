"""One page about a demo run: what the drafter is worth, how that was measured, and where everything lies.

    python tools/demo/demo_summary.py runs/demo

It reads what the demo's commands wrote there (``store/``, ``drafter/``, ``eval.json``, ``live.json``, the pictures,
``export/``) and writes ``summary.html``, which has the pictures inside.
"""

from __future__ import annotations

import base64
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

from hstrain.plot import read_metrics

import hscache
from hscache.console import say, size

PICTURES = (
    ("drafter/curves.png", "training and validation"),
    ("eval.png", "held-out samples, from the cache alone"),
    ("live.png", "fresh prompts, decoded live"),
)
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 66rem; padding: 0 1rem; color: #222 }
.headline { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.5rem 0 }
.headline b { display: block; font-size: 2.2rem; line-height: 1.2 }
table { border-collapse: collapse } th { text-align: left; font-weight: 600; padding-right: 2rem; vertical-align: top }
td, th { border-bottom: 1px solid #ddd; padding-top: .2rem; padding-bottom: .2rem } img { width: 100% }
"""


def main() -> None:
    root = Path(sys.argv[1])
    page = summary(root)
    (root / "summary.html").write_text(page, encoding="utf-8")
    say(f"{root / 'summary.html'}")


def summary(root: Path) -> str:
    """Return the page as HTML."""
    store, offline, live = hscache.open(root / "store"), read(root / "eval.json")["rows"][0], read(root / "live.json")
    trained, _ = read_metrics(root / "drafter")
    low, high = offline["tau_interval"]
    lossless = live["lossless"]
    headline = (
        (
            f"{offline['tau']:.2f}",
            f"tau on {offline['samples']} held-out samples, from the cache (95 %: {low:.2f} to {high:.2f})",
        ),
        (f"{live['tau']:.2f}", f"tau live, on {len(live['prompts'])} prompts that training never saw"),
        (f"{offline['ddtree']['64']:.2f}", "tau with draft trees of 64 nodes, from the cache"),
        (f"{lossless['equal']} of {lossless['compared']}", "texts equal to the target's own, token for token"),
    )
    tokens, supervised = int(store.n_tokens.sum()), int(store.n_loss.sum())
    files = [f"{path.name} ({size(path.stat().st_size)})" for path in sorted((root / "export").iterdir())]
    rows = [
        ("target", f"{live['target']}, {live['dtype']} on {live['device']}; {live['kernels']}"),
        (
            "store",
            f"{len(store)} samples, {tokens:,} tokens, {supervised:,} of them supervised; taps {list(store.taps)}",
        ),
        ("drafter", f"blocks of {live['block_size']} tokens, {trained[-1]['step']:,} steps of training"),
        ("also from the cache", f"tau_all {offline['tau_all']:.3f}, streak {offline['streak']:.3f}"),
        ("speed", speed(live)),
        ("export", ", ".join(files)),
    ]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(str(root))}</title><style>{STYLE}</style>",
        f"<h1>A drafter for {escape(live['target'])}</h1><div class=headline>",
        *(f"<div><b>{escape(number)}</b>{escape(text)}</div>" for number, text in headline),
        "</div><table>",
        *(f"<tr><th>{escape(name)}<td>{escape(text)}" for name, text in rows),
        "</table>",
        *(
            f"<h2>{escape(title)}</h2><img alt='{escape(title)}' src='{inline(root / name)}'>"
            for name, title in PICTURES
        ),
    ]
    return "\n".join(parts) + "\n"


def speed(live: dict[str, Any]) -> str:
    """Say what a step costs and yields, both in tokens of plain decoding."""
    plain = live["tokens_per_s"]["plain"]
    cost = ", ".join(f"{part} {seconds * plain:.2f}" for part, seconds in live["step_s"].items())
    return f"{live['speedup']:.2f} times plain decoding here; a step yields {live['tau']:.2f} tokens and costs {cost}"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def inline(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


if __name__ == "__main__":
    main()
