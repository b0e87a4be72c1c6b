"""Write prompts for the tiny hybrid target from library files that it never trained on.

    python tools/targets/heldout_prompts.py --out prompts.jsonl

Each prompt is the first lines of a function or small class, ``{"id": "ftplib.py:188", "prompt": …, "tag": "code"}``. It
ends with a line break, at which the tokenizer always cuts, so that the continuation starts on a token boundary. The
same Python version gives the same file; another version has other sources, but files stay on their side of the split.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import stdlib_text
from tokenizers import Tokenizer

MIN_TOKENS, MAX_TOKENS = 64, 192


def cut_prompt(unit: stdlib_text.Unit, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """Return a head of the unit with a length in bounds, or None if no line ends within them.

    Something is left to write: the line after the cut is not empty.
    """
    lines = unit.text.split("\n")
    n_tokens, fitting = 0, []
    for n_lines, line in enumerate(lines[:-1], start=1):
        n_tokens += len(tokenizer.encode(line + "\n").ids)
        if MIN_TOKENS <= n_tokens <= MAX_TOKENS and line.strip() and lines[n_lines].strip():
            fitting.append(n_lines)
    heads = [head for n_lines in fitting if _in_bounds(head := stdlib_text.cut(unit, n_lines)[0], tokenizer)]
    return rng.choice(heads) if heads else None


def _in_bounds(text: str, tokenizer: Tokenizer) -> bool:
    return MIN_TOKENS <= len(tokenizer.encode(text).ids) <= MAX_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("prompts.jsonl"))
    parser.add_argument("--target", type=Path, default=Path(__file__).parent / "tiny_hybrid", help="for its tokenizer")
    parser.add_argument("--limit", type=int, default=400, help="at most this many prompts (default 400)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    rng = random.Random(args.seed)
    rows = [
        {"id": unit.name, "prompt": prompt, "tag": "code"}
        for name, text in stdlib_text.files(held_out=True)
        for unit in stdlib_text.units(name, text)
        if (prompt := cut_prompt(unit, tokenizer, rng))
    ]
    rng.shuffle(rows)  # a --limit then takes some of every file
    rows = rows[: args.limit]
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    print(f"{len(rows)} prompts of {MIN_TOKENS} to {MAX_TOKENS} tokens in {args.out}")


if __name__ == "__main__":
    main()
