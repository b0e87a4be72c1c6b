"""Speed and memory of `hscache tokenize` on a large ShareGPT file that is cut in the middle of a row.

    python tools/bench/bench_tokenize.py --target ~/.cache/hscache/targets/SmolLM2-135M-Instruct --megabytes 1000

The peer is the tokenizer's own batch call over the same texts, rendered before: no JSON, no masks, no corpus.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from hscache.console import table
from hscache.corpus.tokenize import load_tokenizer

_BATCH = 256
_PEER_ROWS = 4000
WORDS = [
    "the",
    "a",
    "of",
    "model",
    "state",
    "draft",
    "token",
    "and",
    "is",
    "cache",
    "layer",
    "42",
    "return",
    "x",
    "=",
    "def",
    "not",
    "with",
    "for",
    "hidden",
    "code,",
    "block.",
]


def write_rows(path: Path, n_bytes: int, seed: int = 0) -> None:
    """Write conversations of two to eight messages, and cut the last one in the middle."""
    rng = random.Random(seed)
    with open(path, "w", encoding="utf-8") as file:
        n = 0
        while file.tell() < n_bytes:
            turns = []
            for i in range(2 * rng.randint(1, 4)):
                text = " ".join(rng.choices(WORDS, k=rng.randint(20, 300)))
                turns.append({"from": "gpt" if i % 2 else "human", "value": text})
            file.write(json.dumps({"id": f"row-{n}", "conversations": turns}) + "\n")
            n += 1
        file.truncate(file.tell() - 200)


def peer_speed(target: Path, source: Path) -> float:
    """Return tokens a second of the tokenizer's batch call alone."""
    tokenizer = load_tokenizer(target)
    roles = {"human": "user", "gpt": "assistant"}
    texts = []
    with open(source, encoding="utf-8") as file:
        for line in islice(file, _PEER_ROWS):
            if not line.endswith("\n"):
                break
            turns = json.loads(line)["conversations"]
            messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in turns]
            texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    started, tokens = time.perf_counter(), 0
    for first in range(0, len(texts), _BATCH):
        batch = tokenizer(texts[first : first + _BATCH], add_special_tokens=False)["input_ids"]
        tokens += sum(map(len, batch))
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=1000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source, out = Path(scratch) / "rows.jsonl", Path(scratch) / "corpus.parquet"
        write_rows(source, args.megabytes * 1_000_000)
        before = peer_speed(args.target.expanduser(), source)
        command = [Path(sys.executable).with_name("hscache"), "tokenize", source, "--target", args.target, "-o", out]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if done.returncode != 1:
            raise SystemExit(f"exit status {done.returncode}, expected 1 for the cut row\n{done.stderr}")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        after = peer_speed(args.target.expanduser(), source)
        ids = pq.ParquetFile(out)
        tokens = sum(len(batch.column("input_ids").flatten()) for batch in ids.iter_batches(64, columns=["input_ids"]))
        peer = (before + after) / 2
        rows = [[f"{source.stat().st_size / 1e6:,.0f}", ids.metadata.num_rows, tokens, tokens / seconds, peer]]
        rows[0] += [tokens / seconds / peer, peak]
        columns = {"MB": ">", "samples": ",d", "tokens": ",d", "tokens/s": ",.0f", "bare tokenizer": ",.0f"}
        table("hscache tokenize", [*columns.items(), ("ratio", ".2f"), ("peak MiB", ",.0f")], rows)
        print(out.with_suffix(".rejected.jsonl").read_text(encoding="utf-8"), end="")


if __name__ == "__main__":
    main()
