"""What llama.cpp's server writes greedily, against our own generation in float32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llama_cpp_env
import pyarrow.parquet as pq
import pytest
from hstrain.live.target import LiveTarget
from serve_llama_cpp import TIE, parting

from hscache.corpus.generate import Sampling, generate_corpus
from tests.engines.conftest import SLOTS

pytestmark = pytest.mark.engines
EACH, NEW_TOKENS = 12, 64


def test_the_server_writes_what_transformers_writes(
    endpoint: str, live: LiveTarget, smollm2: Path, prompts: list[Path], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.parquet"
    how = {"limit": EACH, "dtype": "float32", "device": "cpu", "batch_size": 4}
    generate_corpus(prompts, smollm2, corpus, Sampling(NEW_TOKENS), **how)  # type: ignore[arg-type]
    rows = pq.read_table(corpus).to_pylist()
    asked = [row["input_ids"][: row["loss_mask"].index(1)] for row in rows]
    with ThreadPoolExecutor(SLOTS) as pool:
        answers = list(pool.map(lambda ids: llama_cpp_env.complete(endpoint, ids, NEW_TOKENS), asked))
    parted = []
    for row, prompt, answer in zip(rows, asked, answers, strict=True):
        ours, theirs = row["input_ids"][len(prompt) :], answer["tokens"]
        if (found := parting(live, prompt, ours, theirs)) is not None:
            parted.append(found[1])
            print(f"{row['sample_id']}: {found[0]}")
    assert len(rows) == 2 * EACH
    assert len(parted) <= 0.05 * len(rows)
    assert all(gap <= TIE for gap in parted)
