"""The main job end to end on a real small model: prompts to a verified store, by the commands that a user types.

make demo
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from demo_assets import PROMPTS, TARGET

MANIFEST = "manifests/build/demo.toml"
OUT = Path("runs/demo")
STORE = OUT / "store"
CORPUS = OUT / "corpus.parquet"


def main() -> None:
    started = time.monotonic()
    # from scratch: the demo shows a build, not a resume
    shutil.rmtree(OUT, ignore_errors=True)
    prompts = [short(path) for path in PROMPTS.values()]
    generate = ["generate", *prompts, "--target", short(TARGET), "--out", str(CORPUS), "--dtype", "float32"]
    step("the target answers 24 HumanEval and 24 MT-Bench prompts; token ids are kept as generated")
    hscache(*generate, "--limit", "24", "--max-new-tokens", "96")
    step("what a build will take, before it begins")
    hscache("plan", MANIFEST, "--out", str(STORE))
    step("run the target once, keep five taps, the final state and top-64 logits")
    hscache("build", MANIFEST, "--out", str(STORE))
    step("read every byte back and check it")
    hscache("verify", str(STORE))
    step("what was made")
    hscache("info", str(STORE))
    print(NEXT.format(store=STORE, seconds=time.monotonic() - started), flush=True)


NEXT = """
done in {seconds:.0f}s. The store opens with hscache and with plain zarr:

    >>> import hscache
    >>> hscache.open("{store}")[0].hidden_states.shape      # bfloat16 [tokens, taps, hidden]
    >>> import zarr
    >>> zarr.open_group("{store}/shards/00000.zarr", mode="r").tree()

next: your own target and prompts. Copy manifests/build/demo.toml, change target.path, states.taps and corpus.path, then
hscache generate, plan, build, verify as above. `hscache --help` lists all commands."""


def step(text: str) -> None:
    print(f"\n# {text}", flush=True)


def hscache(*args: str) -> None:
    """Show a command as typed, run it, and stop the demo if it fails."""
    print(f"$ hscache {shlex.join(args).replace(chr(39) + '~', '~').replace(chr(39), '')}", flush=True)
    command = Path(sys.executable).with_name("hscache")
    done = subprocess.run([str(command), *(str(Path(a).expanduser()) if a.startswith("~") else a for a in args)])
    if done.returncode:
        raise SystemExit(f"the demo stopped: exit status {done.returncode}")


def short(path: Path) -> str:
    return str(path).replace(str(Path.home()), "~", 1)


if __name__ == "__main__":
    main()
