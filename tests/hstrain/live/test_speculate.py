"""The report over prompts: figures that add up, texts compared, and a target that is the drafter's."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hstrain.drafter.model import Drafter
from hstrain.live.decode import Decoded, Draft, decode
from hstrain.live.speculate import difference, print_speculation, speculate_prompts, summary
from hstrain.live.target import LiveTarget, Sampling, load_tokenizer, read_prompts

from hscache.corpus.generate import generate_corpus
from hscache.corpus.readers import read_corpus
from hscache.errors import HscacheError
from tests.conftest import TINY_HYBRID
from tests.made.live import Oracle, head_of, live, random_drafter

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


LIMIT = 7 * 4 * 2.0**-7


@pytest.mark.parametrize(
    ("gap", "moved", "token", "kind"),
    [
        (0.0, 0.0, 6, "tie"), (0.0, 0.0, 7, "noise"), (0.1, 0.1, 7, "noise"), (0.1, 0.1, 6, "noise"),
        (0.0, LIMIT + 0.01, 6, "unexplained"), (0.1, LIMIT + 0.01, 7, "unexplained"), (0.1, 3.0, 7, "unexplained"),
    ],
)  # fmt: skip
def test_a_difference_is_a_tie_noise_or_a_fault(gap, moved, token, kind):
    """A tie is one of these two tokens: 5 and 6 are the plain side's best. What counts is a pass over the whole text:
    that both sides move alike, from the first token on, excuses neither."""
    truth, read = torch.zeros(9), []
    truth[5], truth[6], truth[7], truth[8] = 7.0, 7.0 - gap, 7.0, 7.0 - gap
    plain = decoded([3, 4, 5, 6], [9.0, 8.0, 7.0 + moved, 1.0], [1.0, 1.0, 7.0 - gap + moved, 0.0])
    drafted = decoded([3, 4, token, 1], [9.0 + moved, 8.0, 7.0 + moved, 3.0], [1.0, 1.0, 7.0 - gap + moved, 0.0])

    def alone(ids: list[int]) -> torch.Tensor:
        read.append(ids)
        return truth

    found = difference(drafted, plain, alone, "bfloat16")
    assert found is not None
    assert read == [[3, 4]]
    assert (found["position"], found["kind"]) == (2, kind)
    assert found["limit"] == LIMIT
    assert (found["drafted"]["token"], found["plain"]["token"]) == (token, 5)
    assert found["plain"]["top_logits"] == [7.0 + moved, 7.0 - gap + moved]


def test_a_token_that_the_target_finds_less_likely_is_a_fault():
    """Neither side's two logits are far from the truth, but one of them has not seen the truth's best token."""
    truth = torch.zeros(9)
    truth[5], truth[7], truth[8] = 7.0, 4.0, 1.0
    plain, drafted = (decoded([token], [best], [best - 3]) for token, best in ((5, 7.0), (7, 4.0)))
    truth[6] = 4.0
    found = difference(drafted, plain, lambda ids: truth, "bfloat16")
    assert found is not None
    assert (found["kind"], found["noise"]) == ("unexplained", 3.0)


def test_equal_texts_do_not_differ_and_a_shorter_one_does():
    def alone(ids: list[int]) -> torch.Tensor:
        raise AssertionError(ids)

    whole, cut = decoded([3, 4], [2.0, 2.0], [1.0, 1.0]), decoded([3], [2.0], [1.0])
    assert difference(whole, whole, alone, "float32") is None
    found = difference(cut, whole, alone, "float32")
    assert found is not None
    assert (found["position"], found["kind"]) == (1, "unexplained")


def not_put_back(self: Any, draft: Any, rows: list[int]) -> None:
    self._settle(max(map(len, draft.paths)) - len(rows))


def not_cropped(self: Any, draft: Any, rows: list[int]) -> None:
    kept = [
        (layer, layer.keys, layer.values) for layer in self.cache.layers if getattr(layer, "keys", None) is not None
    ]
    right(self, draft, rows)
    for layer, keys, values in kept:  # with a row that was rejected
        n = self.length + len(rows) + 1
        layer.keys, layer.values = keys[..., :n, :], values[..., :n, :]


def one_row_too_few(self: Any, draft: Any, rows: list[int]) -> None:
    short = {index: (hidden[:, : max(len(rows) - 1, 0)], others) for index, (hidden, others) in draft.inputs.items()}
    if len(rows) > 1:
        right(self, dataclasses.replace(draft, inputs=short), rows)
        return
    self._settle(max(map(len, draft.paths)) - len(rows))
    for index, states in draft.linear.items():
        for name, value in states.items():
            setattr(self.cache.layers[index], name, value)


right = LiveTarget._keep_path


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("fault", [not_put_back, not_cropped, one_row_too_few])
def test_a_target_that_is_put_back_wrongly_is_found(drafter_and_head, prompts, monkeypatch, fault, dtype):
    monkeypatch.setattr(LiveTarget, "_keep_path", fault)
    report = run(drafter_and_head, prompts, Sampling(max_new_tokens=24), dtype=dtype)
    lossless = report["lossless"]
    assert lossless["equal"] < lossless["compared"]
    assert lossless["unexplained"] > 0
    if dtype == "float32":
        assert lossless["unexplained"] == lossless["compared"] - lossless["equal"]


@pytest.mark.thorough
def test_bf16_parts_only_where_it_rounds(drafter_and_head, prompts):
    report = run(drafter_and_head, prompts, Sampling(max_new_tokens=24), dtype="bfloat16")
    assert report["lossless"]["unexplained"] == 0


@pytest.mark.parametrize("what", ["logits", "states"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.8}, {"tree_size": 4}, {"from_row": 20}, {"plain": False}])
def test_a_target_that_computes_no_numbers_is_refused(drafter_and_head, prompts, monkeypatch, what, how):
    """The most likely of NaN is token 0 on both sides: a near-perfect drafter, and a text that is equal."""
    how, first = dict(how), how.get("from_row", 0)
    forward = LiveTarget._forward

    def poisoned(self: Any, ids: torch.Tensor, parents: Any = None) -> Any:
        final, states = forward(self, ids, parents)
        if self.length >= first:
            final, states = (final * torch.nan, states) if what == "logits" else (final, states * torch.inf)
        return final, states

    monkeypatch.setattr(LiveTarget, "_forward", poisoned)
    how.pop("from_row", None)
    sampling = Sampling(max_new_tokens=24, temperature=how.pop("temperature", 0.0))
    with pytest.raises(HscacheError) as refused:
        run(drafter_and_head, prompts, sampling, limit=1, **how)
    assert (refused.value.code, refused.value.exit_code) == ("not-finite", 3)
    assert refused.value.message.startswith("the target")


@pytest.mark.parametrize("how", [{}, {"tree_size": 4}, {"temperature": 0.8}])
def test_a_drafter_that_computes_no_numbers_is_refused(drafter_and_head, prompts, how):
    drafter, head = copy.deepcopy(drafter_and_head[0]), drafter_and_head[1]
    drafter.norm.weight.data[0] = torch.nan
    sampling = Sampling(max_new_tokens=8, temperature=how.get("temperature", 0.0))
    with pytest.raises(HscacheError) as refused:
        run((drafter, head), prompts, sampling, limit=1, tree_size=how.get("tree_size"))
    assert refused.value.code == "not-finite"
    assert refused.value.message.startswith("the drafter")


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


@pytest.mark.thorough
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
