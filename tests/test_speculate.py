"""The report over prompts: figures that add up, texts compared, and a target that is the drafter's."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hscache.corpus.generate import generate_corpus
from hscache.corpus.readers import read_corpus
from hscache.errors import HscacheError
from tests.conftest import TINY_HYBRID
from tests.live import Oracle, head_of, live, random_drafter
from trainer.decode import Decoded, Draft, decode
from trainer.drafter import Drafter
from trainer.live_target import Sampling, load_tokenizer, read_prompts
from trainer.speculate import difference, print_speculation, speculate_prompts, summary

ROWS: list[Any] = [
    {"id": "a", "prompt": "def add(a, b):\n", "tag": "code"},
    {"id": "b", "messages": [{"role": "user", "content": "import os\n\ndef size(path):\n"}], "tag": "code"},
    {"id": "c", "turns": ["class Queue:\n    def __init__(self):\n", "and then"]},
    {"id": "d", "text": "no prompt"},
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "not json\n")
    return path


@pytest.fixture(scope="module")
def drafter_and_head() -> tuple[Drafter, Any]:
    with live(TINY_HYBRID, (1, 3, 6)) as target:
        return random_drafter(target), head_of(target)


def run(drafter_and_head: tuple[Drafter, Any], prompts: Path, sampling: Sampling, **options: Any) -> dict[str, Any]:
    drafter, head = drafter_and_head
    options = {"dtype": "float32", "device": "cpu", **options}
    return speculate_prompts(drafter, head, str(TINY_HYBRID), [prompts], sampling, **options)


@pytest.fixture(scope="module")
def report(drafter_and_head, prompts) -> dict[str, Any]:
    return run(drafter_and_head, prompts, Sampling(max_new_tokens=24))


def test_the_report_is_plain_json_and_adds_up(report):
    assert json.loads(json.dumps(report)) == report
    assert [entry["id"] for entry in report["prompts"]] == ["a", "b", "c"]
    assert [(r["row"], r["reason"]) for r in report["rejected"]] == [(3, "bad-row"), (4, "bad-json")]
    for entry in report["prompts"]:
        assert sum(entry["accepted"]) + 1 == len(entry["ids"]) <= 24
        assert entry["anchors"][0] == entry["prompt_tokens"]
        assert len(entry["anchors"]) == len(entry["accepted"]) == len(entry["streaks"])
        assert entry["drafted"]["tokens"] == len(entry["ids"])
    steps = [tokens for entry in report["prompts"] for tokens in entry["accepted"]]
    assert report["tau"] == sum(steps) / len(steps)
    assert report["steps"] == len(steps) == sum(report["streaks"])
    assert report["tau_by_tag"].keys() == {"code"}
    assert report["tokens_per_s"]["drafted"] > 0
    assert report["tokens_per_s"]["plain"] > 0
    assert "chunk_gated_delta_rule: torch" in report["kernels"]


def test_float32_is_lossless(report):
    assert report["lossless"] == {"compared": 3, "equal": 3, "tie": 0, "noise": 0, "unexplained": 0}
    assert all(entry["lossless"] and entry["difference"] is None for entry in report["prompts"])


def test_the_text_is_what_generate_writes(report, prompts, tmp_path):
    generate_corpus([prompts], TINY_HYBRID, tmp_path / "c.parquet", Sampling(24), dtype="float32", device="cpu")
    rows = list(read_corpus(tmp_path / "c.parquet"))
    for row, entry in zip(rows, report["prompts"], strict=True):
        assert row.input_ids is not None
        assert row.input_ids.tolist()[entry["prompt_tokens"] :] == entry["ids"]


@pytest.mark.parametrize("tree_size", [None, 8])
def test_sampled_text_has_no_peer_to_equal(drafter_and_head, prompts, tree_size):
    options = {"tree_size": tree_size, "limit": 2, "plain": tree_size is None}
    sampling = Sampling(max_new_tokens=8, temperature=0.8, seed=3)
    report = run(drafter_and_head, prompts, sampling, **options)
    assert report["lossless"]["compared"] == 0
    assert (report["speedup"] is None) == (tree_size == 8)
    again = run(drafter_and_head, prompts, sampling, **options)
    assert [entry["ids"] for entry in again["prompts"]] == [entry["ids"] for entry in report["prompts"]]


def test_a_prompt_that_ends_at_once_has_no_steps(drafter_and_head, prompts):
    report = run(drafter_and_head, prompts, Sampling(max_new_tokens=1), limit=1)
    assert report["tau"] is None
    assert report["steps"] == 0
    assert report["streaks"] == []
    assert report["speedup"] is None


def test_without_a_usable_prompt_it_refuses(drafter_and_head, tmp_path):
    (tmp_path / "none.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(HscacheError) as refused:
        run(drafter_and_head, tmp_path / "none.jsonl", Sampling(4))
    assert refused.value.code == "corpus-empty"


def test_a_prompt_without_room_is_rejected(drafter_and_head, prompts):
    with pytest.raises(HscacheError) as refused:
        run(drafter_and_head, prompts, Sampling(max_new_tokens=1 << 30))
    assert refused.value.code == "corpus-empty"


def altered(name: str, drafter: Drafter, head: Any) -> tuple[Drafter, Any]:
    if name == "shape":
        config = dataclasses.replace(drafter.config, num_target_layers=9)
        return Drafter(config), head
    weight = head.lm_head.clone()
    weight[0] += 1
    changed = {"lm_head": weight} if name == "head" else {"embed": weight}
    return drafter, dataclasses.replace(head, **changed)


@pytest.mark.parametrize("name", ["shape", "head", "embedding"])
def test_another_target_is_refused(drafter_and_head, prompts, name):
    with pytest.raises(HscacheError) as refused:
        run(altered(name, *drafter_and_head), prompts, Sampling(4))
    assert refused.value.code == "target-other"
    assert name.replace("shape", "layers") in refused.value.message


def decoded(ids: list[int], best: list[float], second: list[float]) -> Decoded:
    logits = [list(pair) for pair in zip(best, second, strict=True)]
    return Decoded(ids, [[token, token + 1] for token in ids], logits)


@pytest.mark.parametrize(
    ("gap", "noise", "token", "kind"),
    [
        (0.0, 0.0, 6, "tie"), (0.0, 0.0, 7, "unexplained"), (0.0, 0.01, 7, "noise"), (0.02, 0.01, 7, "noise"),
        (0.5, 0.01, 6, "unexplained"), (0.5, 0.01, 7, "unexplained"),
    ],
)  # fmt: skip
def test_a_difference_is_a_tie_noise_or_a_fault(gap, noise, token, kind):
    """A tie is one of these two tokens: 5 and 6 are the plain side's best."""
    plain = decoded([3, 4, 5, 6], [9.0, 8.0, 7.0, 1.0], [1.0, 1.0, 7.0 - gap, 0.0])
    drafted = decoded([3, 4, token, 1], [9.0 + noise, 8.0, 7.0, 3.0], [1.0, 1.0, 7.0 - gap, 0.0])
    found = difference(drafted, plain)
    assert found is not None
    assert (found["position"], found["kind"]) == (2, kind)
    assert (found["gap"], found["noise"]) == pytest.approx((gap, noise))
    assert (found["drafted"]["token"], found["plain"]["token"]) == (token, 5)
    assert found["plain"]["top_logits"] == [7.0, 7.0 - gap]


def test_equal_texts_do_not_differ_and_a_shorter_one_does():
    whole, cut = decoded([3, 4], [2.0, 2.0], [1.0, 1.0]), decoded([3], [2.0], [1.0])
    assert difference(whole, whole) is None
    found = difference(cut, whole)
    assert found is not None
    assert (found["position"], found["kind"]) == (1, "unexplained")


def test_differences_are_counted_by_kind():
    entry = {
        "id": "a", "tag": None, "accepted": [1, 3], "streaks": [0, 2], "lossless": False,
        "difference": {"kind": "tie"},
        "drafted": {"tokens": 5, "decode_s": 2.0, "step_s": {"draft": 0.5, "verify": 1.0, "keep": 0.25}},
        "plain": {"tokens": 5, "decode_s": 4.0},
    }  # fmt: skip
    figures = summary([entry, {**entry, "lossless": True, "difference": None}])
    assert figures["lossless"] == {"compared": 2, "equal": 1, "tie": 1, "noise": 0, "unexplained": 0}
    assert figures["streaks"] == [2, 0, 2]
    assert figures["tau"] == 2.0
    assert figures["tokens_per_s"] == {"drafted": 2.0, "plain": 1.0}
    assert figures["speedup"] == 2.0
    assert figures["step_s"] == {"draft": 0.25, "verify": 0.5, "keep": 0.125}


@pytest.mark.parametrize("tree_size", [None, 8])
def test_the_parts_of_a_step_make_up_its_time(drafter_and_head, prompts, tree_size, capsys):
    report = run(drafter_and_head, prompts, Sampling(max_new_tokens=8), tree_size=tree_size, limit=2)
    for entry in report["prompts"]:
        parts = entry["drafted"]["step_s"]
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) < entry["drafted"]["decode_s"]
    print_speculation(report)
    assert re.search(
        r"step +costs [\d.]+ tokens without a drafter: draft [\d.]+, verify [\d.]+, keep [\d.]+",
        capsys.readouterr().out,
    )


def test_on_a_real_model_every_length_is_accepted(smollm2):
    tokenizer = load_tokenizer(smollm2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours."}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    with live(smollm2, (1, 14, 27)) as target:
        plain = decode(target, prompt, Sampling(max_new_tokens=32)).ids
        told = Oracle([*prompt, *plain, *[0] * 8], target.loaded.shape.vocab_size, [0, 5, 1, 4, 2, 3])
        for tree_size in (None, 16):
            out = decode(target, prompt, Sampling(max_new_tokens=32), told, tree_size)
            assert out.ids == plain
        chain = decode(target, prompt, Sampling(max_new_tokens=32), told)
        assert set(range(5)) <= {step.streak for step in chain.steps}
        draft = Draft(random_drafter(target), head_of(target), target.device)
        assert decode(target, prompt, Sampling(max_new_tokens=8), draft).ids == plain[:8]


@pytest.mark.slow
@pytest.mark.parametrize("tree_size", [None, 16])
def test_many_real_prompts_are_lossless(smollm2, tree_size):
    paths = [Path.home() / f".cache/hscache/prompts/{name}.jsonl" for name in ("humaneval", "mtbench")]
    with live(smollm2, (1, 8, 14, 20, 27)) as target:
        drafter, head = random_drafter(target), head_of(target)
    options = {"limit": 3, "dtype": "float32", "device": "cpu", "tree_size": tree_size}
    report = speculate_prompts(drafter, head, str(smollm2), paths, Sampling(max_new_tokens=32), **options)
    assert report["lossless"] == {"compared": 6, "equal": 6, "tie": 0, "noise": 0, "unexplained": 0}


def test_prompts_are_those_of_generate(prompts):
    rejected: list[str] = []
    tokenizer = load_tokenizer(TINY_HYBRID)
    read = list(read_prompts([prompts], tokenizer, lambda *args: rejected.append(args[2]), raw=False, limit=None))
    assert [prompt.sample_id for prompt in read] == ["a", "b", "c"]
    assert rejected == ["bad-row", "bad-json"]
    assert torch.tensor(read[0].ids).max() < 2048
