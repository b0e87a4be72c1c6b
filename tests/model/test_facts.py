"""Facts of a target's directory: the tokens at which generation stops, from each source and in each form."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hscache.corpus.generate import Sampling, generate_corpus
from hscache.corpus.readers import read_corpus
from hscache.corpus.tokenize import load_tokenizer, tokenize_files
from hscache.errors import EnvironmentFault
from hscache.model.facts import end_token_ids
from hscache.rows import Sample
from tests.conftest import TINY_HYBRID

FORMS: list[tuple[Any, Any, Any, Any, set[int]]] = [
    (1, None, None, None, {1}),
    (None, 2, None, None, {2}),
    (None, [2, 3], None, None, {2, 3}),
    (None, None, 4, None, {4}),
    (None, None, [4], None, {4}),
    (None, None, None, 5, {5}),
    (None, None, None, [5, 6], {5, 6}),
    (1, 2, [3, 4], [1, 6], {1, 2, 3, 4, 6}),
    (None, None, None, None, set()),
]
"""End token of tokenizer, config, text_config and generation_config -> all of them."""


def write(folder: Path, config: Any, text: Any, generation: Any) -> None:
    folder.mkdir(exist_ok=True)
    nested = {"eos_token_id": text} if text is not None else None
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config, "text_config": nested}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))


@pytest.mark.parametrize(("tokenizer", "config", "text", "generation", "ends"), FORMS)
def test_end_tokens_of_all_sources_are_united(
    tmp_path: Path, tokenizer: Any, config: Any, text: Any, generation: Any, ends: set[int]
) -> None:
    write(tmp_path, config, text, generation)
    assert end_token_ids(tmp_path, SimpleNamespace(eos_token_id=tokenizer)) == ends


def test_files_that_are_not_there_give_none(tmp_path: Path) -> None:
    assert end_token_ids(tmp_path) == set()


@pytest.mark.parametrize("wrong", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, true]}'])
def test_a_file_that_is_not_valid_is_refused(tmp_path: Path, wrong: str) -> None:
    (tmp_path / "generation_config.json").write_text(wrong)
    with pytest.raises(EnvironmentFault) as caught:
        end_token_ids(tmp_path)
    assert caught.value.code == "target-config"
    assert "generation_config.json" in caught.value.message


def test_generate_tokenize_and_speculate_stop_at_the_same_tokens(tmp_path: Path) -> None:
    """A token that only config.json names ends a generated answer, and a supervised run."""
    from hstrain.live.target import open_target

    prompt = {"prompt": "x = "}
    (tmp_path / "p.jsonl").write_text(json.dumps(prompt))
    generate_corpus([tmp_path / "p.jsonl"], TINY_HYBRID, tmp_path / "a.parquet", Sampling(8), dtype="float32")
    (first,) = read_corpus(tmp_path / "a.parquet")
    assert isinstance(first, Sample)
    answer = first.input_ids[first.loss_mask == 1].tolist()
    end = answer[3]

    target = tmp_path / "target"
    target.mkdir()
    for file in TINY_HYBRID.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    config = json.loads((TINY_HYBRID / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "eos_token_id": [config["eos_token_id"], end]}))
    generate_corpus([tmp_path / "p.jsonl"], target, tmp_path / "b.parquet", Sampling(8), dtype="float32")
    (stopped,) = read_corpus(tmp_path / "b.parquet")
    assert isinstance(stopped, Sample)
    assert stopped.input_ids[stopped.loss_mask == 1].tolist() == answer[: answer.index(end) + 1]
    assert stopped.finish_reason == "stop"

    text = load_tokenizer(target).decode(answer)
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "x = "}], "completion": text}))
    tokenize_files([tmp_path / "q.jsonl"], target, tmp_path / "c.parquet")
    (run,) = read_corpus(tmp_path / "c.parquet")
    assert isinstance(run, Sample)
    assert run.input_ids[run.loss_mask == 1].tolist()[-1] == end

    with open_target(str(target), [1], dtype="float32") as (live, _):
        assert end in live.eos_ids
