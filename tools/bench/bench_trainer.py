"""How fast is a training step, in how much memory, and what does it teach, against speculators 0.9.0?

Both sides begin with the same weights and see the same states, anchors and optimizer. A step is what it is in training:
forward, loss, backward, gradient clipping, AdamW. Each measurement is a process of its own; sides take turns, and
ratios are between the processes of one turn: of wall time, and of processor time, which other work on the machine
disturbs less. Memory is the process's peak while it steps, and its growth since before.

    python tools/bench/oracle_env.py                                                  # once
    python tools/bench/bench_trainer.py [--rounds 5] [--threads 2] [--json FILE]      # step time and memory
    python tools/bench/bench_trainer.py --train MANIFEST STORE [--at 0,100,200] [--set KEY=VALUE] [--json FILE]

The last one compares what both learn: tau of held-out samples after the same steps on the same batches.

Speed does not depend on the numbers: random states and heads, in the shape of a small real target. Losses: ``kl`` is
KL to the target's whole distribution on both sides, and that their first losses agree is checked; ``default`` is what
either does when not told otherwise (ours ``ce`` on the sample's tokens with exponential weights, theirs ``ce`` on the
target's argmax with D-PACE).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import oracle_env

ROOT = Path(__file__).resolve().parents[2]
OURS, SDPA, EAGER = "hscache", "speculators sdpa", "speculators eager"
LOSSES = {"kl": ("kl-exact", "exp", "kl_div", "fixed-exp-decay"), "default": ("ce", "exp", "ce", "dpace")}
"""Case -> our kind and weights, their loss and weights."""
CLIP = 1.0


@dataclass(frozen=True)
class Work:
    """One step's work; by default SmolLM2-135M's shape with a drafter of three layers."""

    hidden_size: int = 576
    vocab_size: int = 49152
    layers: int = 3
    taps: int = 5
    block_size: int = 8
    intermediate_size: int = 1536
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    anchors: int = 64
    tokens: int = 512
    gamma: float = 4.0
    lr: float = 6e-4


def make(work: Work) -> tuple[Any, Any, Any]:
    """Return drafter, head and one sample (states, final states, ids, mask, anchors), the same in every process."""
    import torch
    from hstrain.drafter.model import Drafter, DrafterConfig, initialise

    from hscache.store.head import TargetHead

    made = torch.Generator().manual_seed(0)
    T, H, V = work.tokens, work.hidden_size, work.vocab_size
    config = DrafterConfig(
        hidden_size=H, vocab_size=V, taps=tuple(range(work.taps)), num_target_layers=work.taps + 1,
        layer_types=("full_attention",) * work.layers, intermediate_size=work.intermediate_size,
        num_heads=work.num_heads, num_kv_heads=work.num_kv_heads, head_dim=work.head_dim, block_size=work.block_size,
        mask_token_id=3,
    )  # fmt: skip
    drafter = Drafter(config)
    initialise(drafter, 0)
    embed = (torch.randn(V, H, generator=made) * 0.05).bfloat16()
    facts = {"head": {"scale": 1.0, "softcap": None}, "norm_kind": "w", "tied": True}
    head = TargetHead(embed, embed, torch.rand(H, generator=made) + 0.5, facts)
    states = torch.randn(T, work.taps, H, generator=made).bfloat16()
    final = torch.nn.functional.rms_norm(torch.randn(T, H, generator=made), (H,)) * head.norm
    ids = torch.randint(0, V, (T,), generator=made, dtype=torch.int32)
    mask = torch.ones(T, dtype=torch.uint8)
    # no block reaches beyond the end, so that every slot trains on both sides
    anchors = torch.randperm(T - work.block_size - 1, generator=made)[: work.anchors].sort().values + 1
    return drafter, head, (states, final.bfloat16(), ids, mask, anchors)


def our_side(work: Work, case: str, precision: str) -> tuple[Callable[[], Any], list[Any]]:
    """Return what makes our loss, and the parameters."""
    import numpy as np
    import torch
    from hstrain.data.anchors import slot_tokens
    from hstrain.drafter.attention import Blocks
    from hstrain.drafter.losses import Head, SlotTargets, head_loss
    from hstrain.drafter.model import block_inputs

    drafter, target, (states, final, ids, mask, anchors) = make(work)
    kind, weights, _, _ = LOSSES[case]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    head, config, seen = Head(target, "cpu", dtype), drafter.config, int(anchors[-1])
    tokens = torch.from_numpy(slot_tokens(ids.numpy(), mask.numpy(), anchors.numpy(), config.block_size))
    rows = anchors[:, None] + torch.arange(config.block_size - 1)
    targets = SlotTargets(tokens, rows, final_states=final)
    assert np.all(tokens.numpy() >= 0)

    def loss() -> Any:
        blocks = Blocks(anchors, torch.zeros_like(anchors), anchors, config.block_size, seen)
        inputs = block_inputs(ids[anchors].long(), head.embed_VH, config)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            hidden = drafter(states[:seen], torch.arange(seen), inputs, blocks)
        hidden = hidden.view(len(anchors), config.block_size, -1)[:, 1:]
        found = head_loss(hidden, head, targets, kind=kind, weights=weights, gamma=work.gamma)  # type: ignore[arg-type]
        return found.loss_sum / found.weight_sum

    return loss, list(drafter.parameters())


def their_side(work: Work, case: str, precision: str, attention: str) -> tuple[Callable[[], Any], list[Any]]:
    """Return what makes their loss, and the parameters."""
    import torch
    from trainer_peer import Speculators, join

    drafter, target, sample = make(work)
    _, _, loss_name, weights = LOSSES[case]
    peer = Speculators(drafter, target, attention=attention, loss=loss_name, weights=weights, gamma=work.gamma)
    batch = join([sample], work.block_size)

    def loss() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return peer.loss(batch)

    return loss, peer.parameters()


def measure(side: str, work: Work, case: str, precision: str, steps: int) -> dict[str, Any]:
    """Run steps in this process and return what they took."""
    import torch

    if side == OURS:
        loss, parameters = our_side(work, case, precision)
    else:
        loss, parameters = their_side(work, case, precision, side.split()[1])
    optimizer = torch.optim.AdamW(parameters, lr=work.lr, weight_decay=0.0, fused=True)
    before, losses, seconds, cpu_seconds = memory("VmRSS"), [], [], []
    forget_peak()
    for _ in range(steps + 1):  # the first one warms up
        started, cpu_started = time.perf_counter(), time.process_time()
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        losses.append(float(value.detach()))
    peak = memory("VmHWM")
    return {
        "seconds": statistics.median(seconds[1:]),
        "cpu_seconds": statistics.median(cpu_seconds[1:]),
        "peak_mib": peak / 1024,
        "growth_mib": (peak - before) / 1024,
        "losses": losses,
        "trained": sum(p.numel() for p in parameters),
    }


def memory(what: str) -> int:
    """Return a line of this process's status in KiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[what].split()[0])


def forget_peak() -> None:
    """Begin the peak of resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def in_process(job: dict[str, Any], threads: int) -> dict[str, Any]:
    """Do a job in a process of its own and return its answer."""
    tools = Path(__file__).resolve().parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tools), str(ROOT)])}
    env |= {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--job", json.dumps(job)],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{job}:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def bench(work: Work, *, rounds: int, steps: int, threads: int, sides: list[str], precisions: list[str]) -> Any:
    """Return (case, precision) -> side -> figures; sides take turns."""
    result: dict[str, Any] = {}
    for precision in precisions:
        for case in LOSSES:
            turns: list[dict[str, Any]] = []
            for k in range(rounds):
                order = sides if k % 2 else sides[::-1]
                job = {"do": "measure", "work": asdict(work), "case": case, "precision": precision, "steps": steps}
                turns.append({side: in_process({**job, "side": side}, threads) for side in order})
            if (case, precision) == ("kl", "fp32"):
                check_same_loss(work, turns[0])
            cells = result[f"{case}, {precision}"] = {side: summary(side, turns) for side in sides}
            say(f"{case}, {precision}: " + "; ".join(f"{side} {c['seconds']:.2f}s" for side, c in cells.items()))
    return result


def check_same_loss(work: Work, turn: dict[str, Any]) -> None:
    """Hold the first losses together; theirs is divided by the slots, ours by the sum of their weights."""
    slots = range(work.block_size - 1)
    factor = len(slots) / sum(math.exp(-k / work.gamma) for k in slots)
    for side, cell in turn.items():
        loss = cell["losses"][0] * (1 if side == OURS else factor)
        if not math.isclose(loss, turn[OURS]["losses"][0], rel_tol=1e-4):
            sys.exit(f"{side} computes another loss: {loss}, ours {turn[OURS]['losses'][0]}")


def summary(side: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {"losses": turns[0][side]["losses"]}
    for what in ("seconds", "cpu_seconds", "peak_mib", "growth_mib"):
        ratios = [turn[side][what] / turn[OURS][what] for turn in turns]
        figures[what] = statistics.median(turn[side][what] for turn in turns)
        figures[f"{what}_times_ours"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return figures


def show(result: dict[str, Any]) -> None:
    work = result["work"]
    print(
        f"{work['anchors']} blocks of {work['block_size']}, {work['tokens']} tokens, {work['layers']} layers, "
        f"H {work['hidden_size']}, V {work['vocab_size']:,}; {result['threads']} threads, {result['rounds']} turns, "
        f"load {result['load'][0]:.1f} to {result['load'][1]:.1f}"
    )
    print(f"{'loss, precision':15}{'':19}" + "".join(f"{x:>27}" for x in ("wall / ours", "processor / ours")), end="")
    print("".join(f"{x:>18}" for x in ("peak / ours", "growth / ours")))
    for case, cells in result["steps"].items():
        for side, c in cells.items():
            line = f"{case:15}{side:19}"
            for what in ("seconds", "cpu_seconds"):
                middle, low, high = c[f"{what}_times_ours"]
                line += f"{c[what]:8.2f}s{middle:6.2f} ({low:.2f}-{high:.2f})"
            for what in ("peak_mib", "growth_mib"):
                line += f"{c[what]:8.0f} MiB{c[f'{what}_times_ours'][0]:6.2f}"
            print(line)


def learning(manifest: str, store: str, overrides: list[str], at: list[int], threads: int) -> dict[str, Any]:
    """Return side -> scores of the training comparison."""
    result = {}
    for side in ("hscache", "speculators", "speculators, own start"):
        job = {"do": "learn", "side": side, "manifest": manifest, "overrides": overrides, "store": store, "at": at}
        result[side] = in_process(job, threads)
        say(f"{side}: " + ", ".join(f"step {s['step']} tau {s['tau']:.3f}" for s in result[side]["scores"]))
    return result


def show_learning(result: dict[str, Any]) -> None:
    steps = [score["step"] for score in result["hscache"]["scores"]]
    print(f"{'tau (tau_all) after steps':26}" + "".join(f"{step:>16}" for step in steps) + f"{'processor':>12}")
    for side, found in result.items():
        cells = "".join(f"{s['tau']:9.3f}{'({:.3f})'.format(s['tau_all']):>7}" for s in found["scores"])
        print(f"{side:26}{cells}{found['seconds']:11.0f}s")
    low, high = result["hscache"]["scores"][-1]["tau_interval"]
    samples = result["hscache"]["scores"][-1]["samples"]
    print(f"{samples} held-out samples; hscache at the end: 95 % interval {low:.2f} to {high:.2f}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    if job["do"] == "measure":
        return measure(job["side"], Work(**job["work"]), job["case"], job["precision"], job["steps"])
    from trainer_learning import learn

    return learn(job["side"], job["manifest"], job["overrides"], job["store"], job["at"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of one process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16"), help="both by default")
    parser.add_argument("--peer", action="append", choices=("sdpa", "eager"), help="their attention; both by default")
    for name, value in asdict(Work()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--train", nargs=2, metavar=("MANIFEST", "STORE"), help="compare what both learn")
    parser.add_argument("--at", default="0,100,200,300", help="steps at which to score")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the manifest")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(run_job(args.job)))
        return
    if not oracle_env.is_ready():
        sys.exit("the peer is not installed: python tools/bench/oracle_env.py")
    before = os.getloadavg()[0]
    result: dict[str, Any] = {"threads": args.threads, "cores": len(os.sched_getaffinity(0))}
    if args.train:
        at = [int(step) for step in args.at.split(",")]
        overrides = [*args.set, f"optim.max_steps={at[-1]}"]
        result["train"], result["manifest"] = args.train, {"file": args.train[0], "set": overrides}
        result["learning"] = learning(*args.train, overrides, at, args.threads)
        show_learning(result["learning"])
    else:
        work = Work(**{name: getattr(args, name) for name in asdict(Work())})
        sides = [OURS, *(f"speculators {peer}" for peer in args.peer or ("sdpa", "eager"))]
        result |= {"work": asdict(work), "rounds": args.rounds}
        result["steps"] = bench(
            work, rounds=args.rounds, steps=args.steps, threads=args.threads, sides=sides,
            precisions=args.precision or ["fp32", "bf16"],
        )  # fmt: skip
        show(result | {"load": [before, os.getloadavg()[0]]})
    result["load"] = [before, os.getloadavg()[0]]
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
