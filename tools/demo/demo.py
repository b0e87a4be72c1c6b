"""The main job end to end by the commands that a user types: prompts, states, a drafter, what it is worth, its export.

make demo              the trained 7M hybrid of this repository: minutes on two CPU cores
make demo-smollm2      SmolLM2-135M-Instruct: the same, with a thousand steps of training
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from demo_assets import PROMPTS, TARGET

FRESH = 16
"""Prompts that neither training nor validation sees."""


def main() -> None:
    started = time.monotonic()
    smollm2 = "smollm2" in sys.argv[1:]
    out = Path("runs/demo-smollm2" if smollm2 else "runs/demo")
    # from scratch: the demo shows a build, not a resume
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    store, run, export = str(out / "store"), str(out / "drafter"), str(out / "export")
    fresh, prompts = str(out / "fresh.jsonl"), str(out / "prompts.jsonl")
    target = short(TARGET) if smollm2 else "tools/targets/tiny_hybrid"
    build_manifest = f"manifests/build/{'demo-smollm2' if smollm2 else 'demo'}.toml"
    train_manifest = f"manifests/train/{'smollm2-135m' if smollm2 else 'demo'}.toml"
    write_prompts(smollm2, Path(prompts), Path(fresh))

    step("the target answers the prompts; token ids are kept as generated")
    generate = ["--target", target, "--out", str(out / "corpus.parquet"), "--dtype", "float32", "--batch-size", "64"]
    hscache("generate", prompts, *generate, "--max-new-tokens", "96")
    step("what a build will take, before it begins")
    hscache("plan", build_manifest, "--out", store)
    step("run the target once, keep five taps, the final state and top-64 logits")
    hscache("build", build_manifest, "--out", store)
    step("read every byte back and check it")
    hscache("verify", store)
    hscache("info", store)
    step("fit a drafter from the store; the target is not loaded any more")
    hstrain("fit", train_manifest, "--store", store, "--out", run)
    hstrain("plot", run)
    step("what it is worth on held-out samples, from the cache alone")
    hstrain("eval", run, "--store", store, "--plot", str(out / "eval.png"), "--out", str(out / "eval.json"))
    step("and live, on prompts that it never saw: the text must be the target's own")
    live = ["--store", store, "--target", target, "--prompts", fresh, "--max-new-tokens", "96", "--dtype", "float32"]
    hstrain("speculate", run, *live, "--plot", str(out / "live.png"), "--out", str(out / "live.json"))
    step("a folder for the serving engines, read back and compared")
    hstrain("export", run, "--store", store, "--out", export)
    step("all of it on one page")
    python("tools/demo/demo_summary.py", str(out))
    print(NEXT.format(store=store, out=out, export=export, seconds=time.monotonic() - started), flush=True)


NEXT = """
done in {seconds:.0f}s. Summary: {out}/summary.html. Drafter: {export}. The store opens with hscache and with zarr:

    >>> import hscache
    >>> hscache.open("{store}")[0].hidden_states.shape      # bfloat16 [tokens, taps, hidden]
    >>> import zarr
    >>> zarr.open_group("{store}/shards/00000.zarr", mode="r").tree()

next: your own target and prompts. Copy manifests/build/demo.toml and manifests/train/demo.toml, change target, taps and
shape, then the same commands. `hscache --help` and `hstrain --help` list them all."""


def write_prompts(smollm2: bool, prompts: Path, fresh: Path) -> None:
    """Write the prompts to train on, and a few to keep for the live test."""
    if smollm2:
        lines = [line for path in PROMPTS.values() for line in path.read_text(encoding="utf-8").splitlines()]
    else:
        step("prompts: the first lines of library functions that the target was not trained on")
        python("tools/targets/heldout_prompts.py", "--out", str(prompts), "--limit", "600")
        lines = prompts.read_text(encoding="utf-8").splitlines()
    assert all(json.loads(line)["prompt"] for line in lines)
    fresh.write_text("\n".join(lines[-FRESH:]) + "\n", encoding="utf-8")
    prompts.write_text("\n".join(lines[:-FRESH]) + "\n", encoding="utf-8")


def step(text: str) -> None:
    print(f"\n# {text}", flush=True)


def hscache(*args: str) -> None:
    run([str(Path(sys.executable).with_name("hscache"))], "hscache", args)


def hstrain(*args: str) -> None:
    run([str(Path(sys.executable).with_name("hstrain"))], "hstrain", args)


def python(*args: str) -> None:
    run([sys.executable], "python", args)


def run(command: list[str], name: str, args: tuple[str, ...]) -> None:
    """Show a command as typed, run it, and stop the demo if it fails."""
    print(f"$ {name} {shlex.join(args).replace(chr(39) + '~', '~').replace(chr(39), '')}", flush=True)
    done = subprocess.run([*command, *(str(Path(a).expanduser()) if a.startswith("~") else a for a in args)])
    if done.returncode:
        raise SystemExit(f"the demo stopped: exit status {done.returncode}")


def short(path: Path) -> str:
    return str(path).replace(str(Path.home()), "~", 1)


if __name__ == "__main__":
    main()
