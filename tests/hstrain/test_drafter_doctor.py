"""``hstrain doctor``: what costs acceptance is a finding, what does not is a remark, and what fits is the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hstrain.doctor import EFFECTS, Fact, diagnose
from hstrain.drafter.model import Drafter
from hstrain.exchange.export import export_speculators, export_zlab
from hstrain.live import target as live_target
from hstrain.run.checkpoint import load_drafter
from hstrain.train.fit import fit
from safetensors.torch import load_file, save_file

import hscache
from hscache.build.convert import Change, convert
from hscache.store.head import load_head
from tests.conftest import TINY_HYBRID
from tests.made import stores
from tests.made.hybrid import Hybrid
from tests.made.stores import HIDDEN, VOCAB, Little
from tests.made.trainers import MASK, train_manifest, training_store

SHAPE = {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": VOCAB}
SAYS: dict[str, Any] = {
    "weights": {"model.safetensors": "aa"},
    "tokenizer": {"tokenizer.json": "bb", "chat_template.jinja": "cc"},
    "shape": SHAPE,
    "class": "LittleForCausalLM",
}
OFFLINE = sorted(EFFECTS.keys() - {"live states"})


pytestmark = pytest.mark.usefixtures("no_disk")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def little(folder: Path) -> Little:
    return training_store(folder / "store", says=SAYS)


@pytest.fixture(scope="module")
def run(little: Little, folder: Path) -> Path:
    manifest = train_manifest(drafter={"taps": [0, 2]}, data={"validation": 0.0}, optim={"max_steps": 1})
    fit(manifest, little.path, folder / "run", device="cpu")
    return folder / "run"


def differing(facts: list[Fact]) -> list[str]:
    return [fact.name for fact in facts if not fact.same]


def by_name(facts: list[Fact], name: str) -> Fact:
    (fact,) = [fact for fact in facts if fact.name == name]
    return fact


def test_the_store_that_it_was_trained_on(hstrain: Any, run: Path, little: Little) -> None:
    answer = hstrain("doctor", run, "--store", little.path)
    assert answer.status == 0
    assert answer.out.count("same") >= len(OFFLINE)
    assert "DIFFERS" not in answer.out
    assert not any(effect in answer.out for effect in EFFECTS.values())
    assert "aa" not in answer.out  # digests that agree say nothing to people
    facts = hstrain("doctor", run, "--store", little.path, "--json").json
    assert sorted(fact["name"] for fact in facts) == OFFLINE
    assert all(fact["same"] and fact["effect"] == EFFECTS[fact["name"]] for fact in facts)


def test_a_store_of_the_same_corpus_with_more_samples_is_no_difference(run: Path, tmp_path: Path) -> None:
    other = training_store(tmp_path / "more", (20, 31, 18, 44, 26, 37, 15, 29), says=SAYS)
    assert differing(diagnose(run, other.path)) == []


FINDINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "weights": ("target weights", {"weights": {"model.safetensors": "ab"}}, {}),
    "a file of weights more": ("target weights", {"weights": {"model.safetensors": "aa", "more": "aa"}}, {}),
    "chat template": ("tokenizer", {"tokenizer": {"tokenizer.json": "bb", "chat_template.jinja": "cd"}}, {}),
    "norm kind": ("norm kind", {"norm_kind": "1+w"}, {}),
    "taps": ("taps", {}, {"states": {"taps": [0, 3]}}),
    "layers": ("target shape", {}, {"target": {"shape": {**SHAPE, "num_layers": 5}}}),
}


def shown(hstrain: Any, run: Path, store: Path, name: str) -> int:
    """Run the doctor, which must show one difference and its effect; return the exit status."""
    answer = hstrain("doctor", run, "--store", store)
    (line,) = [line for line in answer.out.splitlines() if "DIFFERS" in line]
    assert line.strip().startswith(name)
    assert f"{name}: {EFFECTS[name]}" in answer.out.splitlines()
    return int(answer.status)


@pytest.mark.parametrize("how", FINDINGS)
def test_another_target_is_a_finding_with_its_known_effect(hstrain: Any, run: Path, tmp_path: Path, how: str) -> None:
    name, says, sections = FINDINGS[how]
    other = training_store(tmp_path / "other", says={**SAYS, **says}, **sections)
    assert shown(hstrain, run, other.path, name) == 1
    told = hstrain("doctor", run, "--store", other.path, "--json")
    assert told.status == 1
    (fact,) = [fact for fact in told.json if not fact["same"]]
    assert (fact["name"], fact["grave"], fact["effect"]) == (name, True, EFFECTS[name])
    assert fact["trained"] != fact["store"]


@pytest.mark.parametrize("room", [-1, 0])
def test_a_block_behind_the_longest_text_must_fit(hstrain: Any, little: Little, tmp_path: Path, room: int) -> None:
    longest = int(hscache.open(little.path).n_tokens.max())
    drafter = {"taps": [0, 2], "block_size": 4, "max_position_embeddings": longest + 4 + room}
    manifest = train_manifest(drafter=drafter, data={"validation": 0.0}, optim={"max_steps": 1})
    fit(manifest, little.path, tmp_path / "run", device="cpu")
    answer = hstrain("doctor", tmp_path / "run", "--store", little.path)
    assert (answer.status, "block size: a block after" in answer.out) == ((1, True) if room else (0, False))


REMARKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "kernel path": ("kernel path", {"path": "fla"}, {}),
    "codec": ("codec", {}, {"store": {"codec": "int8", "chunk_tokens": 4, "shard_bytes": 6000}}),
    "precision": ("target precision", {}, {"target": {"dtype": "float32", "shape": SHAPE}}),
}


@pytest.mark.parametrize("how", REMARKS)
def test_what_is_usually_noise_is_a_remark(hstrain: Any, run: Path, tmp_path: Path, how: str) -> None:
    name, says, sections = REMARKS[how]
    other = training_store(tmp_path / "other", says={**SAYS, **says}, **sections)
    assert shown(hstrain, run, other.path, name) == 0
    (fact,) = [fact for fact in diagnose(run, other.path) if not fact.same]
    assert (fact.name, fact.grave) == (name, False)


def test_a_mask_token_that_stands_in_a_text_is_a_finding(hstrain: Any, run: Path, tmp_path: Path) -> None:
    def plant(row: Any, arrays: Any) -> None:
        if row.sample_id == "t7":
            arrays["input_ids"] = np.where(np.arange(len(arrays["input_ids"])) == 5, MASK, arrays["input_ids"])

    other = training_store(tmp_path / "other", edit=plant, says=SAYS)
    facts = diagnose(run, other.path)
    assert differing(facts) == ["mask token"]
    assert by_name(facts, "mask token").store == "in sample 't7'"
    assert hstrain("doctor", run, "--store", other.path).status == 1


def test_a_released_folder_says_less_and_is_compared_where_it_does(
    hstrain: Any, run: Path, little: Little, tmp_path: Path
) -> None:
    drafter, _ = load_drafter(run)
    export_zlab(drafter, load_head(little.path / "target"), tmp_path / "zlab", provenance={"target": "little"})
    facts = diagnose(tmp_path / "zlab", little.path)
    assert differing(facts) == []
    assert by_name(facts, "target weights").trained is None
    out = hstrain("doctor", tmp_path / "zlab", "--store", little.path).out
    marks = {
        name: [line for line in out.splitlines() if line.strip().startswith(name)]
        for name in ("target weights", "taps")
    }
    assert [lines[0].split()[-2:] for lines in marks.values()] == [["known", "unknown"], ["3]", "same"]]
    assert by_name(facts, "taps").trained == [0, 2]


# a released one, held against a store of another target


OTHER_SHAPE = {"num_layers": 3, "hidden_size": 16, "vocab_size": 48}


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """A store of another target than the little one's: narrower in blocks, wider in all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "HIDDEN", OTHER_SHAPE["hidden_size"])
        patch.setattr(stores, "VOCAB", OTHER_SHAPE["vocab_size"])
        sections = {"target": {"shape": OTHER_SHAPE}, "states": {"taps": [0, 1]}}
        return training_store(folder / "other", says={**SAYS, "shape": OTHER_SHAPE}, **sections).path


def alike(run: Path, kind: str) -> Drafter:
    """Return a run's drafter with layers of one kind, which speculators' layout holds."""
    drafter, _ = load_drafter(run)
    window = drafter.config.sliding_window if kind == "sliding_attention" else None
    other = Drafter(replace(drafter.config, layer_types=(kind,) * drafter.config.num_layers, sliding_window=window))
    other.load_state_dict(drafter.state_dict())
    return other


@pytest.fixture(params=["zlab", "speculators"])
def released(request: pytest.FixtureRequest, run: Path, little: Little, tmp_path: Path) -> Path:
    head, out = load_head(little.path / "target"), tmp_path / "released"
    if request.param == "zlab":
        export_zlab(load_drafter(run)[0], head, out, provenance={"target": "little"})
    else:
        export_speculators(alike(run, "sliding_attention"), head, out, provenance={"target": "little"})
    return out


@pytest.mark.parametrize(
    ("kind", "flag", "served"),
    [
        ("full_attention", False, "2 of 2"),
        ("full_attention", True, "0 of 2"),
        ("sliding_attention", None, "0 of 2"),
        ("sliding_attention", False, "2 of 2"),
    ],
)
def test_layers_that_vllm_makes_causal_against_training_are_a_finding(
    hstrain: Any, run: Path, little: Little, tmp_path: Path, kind: str, flag: bool | None, served: str
) -> None:
    out = tmp_path / "out"
    export_speculators(alike(run, kind), load_head(little.path / "target"), out, provenance={"target": "little"})
    config = json.loads((out / "config.json").read_text())
    config["sliding_window_non_causal"] = flag
    if flag is None:
        del config["sliding_window_non_causal"]
    (out / "config.json").write_text(json.dumps(config))
    answer, trained = hstrain("doctor", out, "--store", little.path), "2 of 2" if "sliding" in kind else "0 of 2"
    told = f"causal layers: {EFFECTS['causal layers']}" in answer.out.splitlines()
    assert (answer.status, told) == ((0, False) if served == trained else (1, True))
    fact = by_name(diagnose(out, little.path), "causal layers")
    assert (fact.trained, fact.live) == (f"{trained}, the sliding ones", f"vLLM: {served}")


def test_a_released_drafter_and_a_store_of_another_target_are_laid_side_by_side(
    hstrain: Any, released: Path, other: Path
) -> None:
    answer = hstrain("doctor", released, "--store", other)
    assert answer.status == 1
    assert f"target shape: {EFFECTS['target shape']}" in answer.out
    facts = {fact["name"]: fact for fact in hstrain("doctor", released, "--store", other, "--json").json}
    assert sorted(name for name, fact in facts.items() if not fact["same"]) == ["taps", "target shape"]
    # a speculators config does not say how many blocks: there are so many at least
    assert facts["target shape"]["trained"] == SHAPE
    assert facts["target shape"]["store"] == OTHER_SHAPE
    assert (facts["taps"]["trained"], facts["taps"]["store"]) == ([0, 2], [0, 1])


def test_with_a_store_of_another_target_only_the_doctor_takes_a_released_drafter(
    hstrain: Any, released: Path, other: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    commands = {
        "eval": ["--held-out", 1],
        "speculate": ["--target", TINY_HYBRID, "--prompts", prompts],
        "export": ["--out", tmp_path / "out"],
    }
    for command, options in commands.items():
        answer = hstrain(command, released, "--store", other, *options)
        assert (answer.status, answer.code) == (2, "drafter-other-target"), command


def test_other_weights_that_a_released_drafter_carries_are_a_finding(
    hstrain: Any, run: Path, little: Little, tmp_path: Path
) -> None:
    head = load_head(little.path / "target")
    export_speculators(alike(run, "sliding_attention"), head, tmp_path / "out", provenance={"target": "little"})
    weights = load_file(tmp_path / "out/model.safetensors")
    weights |= {"embed_tokens.weight": head.embed.clone(), "lm_head.weight": head.lm_head.clone()}
    weights["lm_head.weight"][3] += 1
    save_file(weights, tmp_path / "out/model.safetensors")
    (fact,) = [fact for fact in diagnose(tmp_path / "out", little.path) if not fact.same]
    assert (fact.name, fact.trained, fact.grave) == ("target weights", "contains other lm_head.weight", True)
    answer = hstrain("eval", tmp_path / "out", "--store", little.path, "--held-out", 1)
    assert (answer.status, answer.code) == (2, "drafter-other-target")


def test_other_logits_and_another_scale_of_embeddings_are_findings(run: Path, little: Little, tmp_path: Path) -> None:
    drafter, _ = load_drafter(run)
    export_zlab(drafter, load_head(little.path / "target"), tmp_path / "zlab", provenance={"target": "little"})
    says = {**SAYS, "head": {"scale": 1.0, "softcap": 30.0}, "embed_scale": 8.0}
    store = training_store(tmp_path / "store", says=says).path
    facts = diagnose(tmp_path / "zlab", store)
    assert differing(facts) == ["logits", "embedding scale"]
    assert by_name(facts, "logits").trained == {"scale": 1, "softcap": None}
    assert (by_name(facts, "embedding scale").trained, by_name(facts, "embedding scale").store) == (1.0, 8.0)
    assert differing(diagnose(run, store)) == ["embedding scale"]


def test_a_path_without_a_drafter(hstrain: Any, little: Little, tmp_path: Path) -> None:
    answer = hstrain("doctor", tmp_path, "--store", little.path)
    assert (answer.status, answer.out, answer.code) == (2, "", "not-a-checkpoint")


# with the live target


def live(hybrid: Hybrid, target: Path = TINY_HYBRID, store: Path | None = None) -> list[Fact]:
    return diagnose(hybrid.run, store or hybrid.store, target=str(target), dtype="float32", device="cpu")


def test_the_live_target_computes_the_stored_states(hstrain: Any, hybrid: Hybrid) -> None:
    at = ("--store", hybrid.store, "--target", TINY_HYBRID, "--dtype", "float32", "--device", "cpu", "--json")
    answer = hstrain("doctor", hybrid.run, *at)
    assert answer.status == 0
    facts = {fact["name"]: fact for fact in answer.json}
    assert facts.keys() == EFFECTS.keys()
    assert all(fact["same"] for fact in facts.values())
    for name in ("target shape", "target weights", "tokenizer", "norm kind", "kernel path", "target precision"):
        assert facts[name]["trained"] == facts[name]["store"] == facts[name]["live"] is not None, name
    assert facts["live states"]["live"].startswith("1-cos")


def test_a_copy_of_the_target_elsewhere_is_the_same(hybrid: Hybrid, tmp_path: Path) -> None:
    shutil.copytree(TINY_HYBRID, tmp_path / "copy")
    assert differing(live(hybrid, tmp_path / "copy")) == []


@pytest.mark.usefixtures("as_on_a_gpu")
def test_torch_in_place_of_kernels_on_a_gpu_is_a_finding(hybrid: Hybrid) -> None:
    facts = live(hybrid)
    assert differing(facts) == ["kernel path"]
    assert by_name(facts, "kernel path").grave
    assert str(by_name(facts, "kernel path").live).endswith(": a fallback on this GPU")


def test_bf16_is_a_remark(hybrid: Hybrid) -> None:
    facts = diagnose(hybrid.run, hybrid.store, target=str(TINY_HYBRID), dtype="bfloat16", device="cpu")
    assert differing(facts) == ["target precision"]


def swapped(states: torch.Tensor) -> torch.Tensor:
    return states[..., [1, 0, *range(2, states.shape[-2])], :]


PLANTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "taps in another order": swapped,
    "one tap scaled": lambda states: states * torch.tensor([1, 1, 1.05, 1, 1])[:, None],
    "one row late": lambda states: states.roll(1, dims=-3),
    "not a number": lambda states: states * torch.nan,
}


@pytest.mark.parametrize("how", PLANTED)
def test_other_live_states_are_a_finding(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    forward = live_target.LiveTarget._forward

    def planted(self: Any, ids: torch.Tensor, parents: Any = None) -> Any:
        final, states = forward(self, ids, parents)
        return final, PLANTED[how](states)

    monkeypatch.setattr(live_target.LiveTarget, "_forward", planted)
    facts = live(hybrid)
    assert differing(facts) == ["live states"]
    assert by_name(facts, "live states").grave


def test_taps_off_by_one_are_a_finding(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    original = live_target.open_target
    monkeypatch.setattr(
        live_target, "open_target", lambda path, taps, **how: original(path, [tap - 1 for tap in taps], **how)
    )
    assert differing(live(hybrid)) == ["live states"]


def test_another_model_of_the_same_shape(hstrain: Any, hybrid: Hybrid, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(TINY_HYBRID, other)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.mlp.down_proj.weight"))
    weights[name] = weights[name] * 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert differing(live(hybrid, other)) == ["target weights", "live states"]
    at = ("--store", hybrid.store, "--target", other, "--dtype", "float32", "--device", "cpu")
    answer = hstrain("doctor", hybrid.run, *at)
    assert answer.status == 1
    for name in ("target weights", "live states"):
        assert f"{name}: {EFFECTS[name]}" in answer.out


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_what_a_lossy_codec_promises_is_no_finding(hybrid: Hybrid, tmp_path: Path, codec: Any) -> None:
    convert(hybrid.store, tmp_path / codec, Change(codec=codec))
    facts = live(hybrid, store=tmp_path / codec)
    assert differing(facts) == ["codec"]


def test_a_store_without_the_taps_is_a_finding_with_a_live_target_too(hybrid: Hybrid, tmp_path: Path) -> None:
    convert(hybrid.store, tmp_path / "fewer", Change(taps=(1, 2)))
    assert differing(live(hybrid, store=tmp_path / "fewer")) == ["taps", "live states"]


def test_a_live_target_of_another_shape_is_a_finding(hybrid: Hybrid, tmp_path: Path) -> None:
    import tiny_targets

    other = tiny_targets.save("qwen3", tmp_path / "qwen3", num_hidden_layers=8, head_dim=16)
    facts = live(hybrid, other)
    found = differing(facts)
    assert {"target shape", "target weights", "live states"} <= set(found)
    assert by_name(facts, "live states").live == "not comparable"


def test_a_live_target_without_the_taps_is_a_finding(hybrid: Hybrid, tmp_path: Path) -> None:
    import tiny_targets

    facts = live(hybrid, tiny_targets.save("qwen3", tmp_path / "qwen3"))
    assert {"target shape", "taps", "live states"} <= set(differing(facts))
    assert by_name(facts, "taps").live == "4 blocks"
    assert by_name(facts, "live states").live == "not comparable"


def test_json_of_a_diagnosis_is_plain(hybrid: Hybrid) -> None:
    from hstrain.doctor import to_json

    facts = to_json(live(hybrid))
    assert json.loads(json.dumps(facts)) == facts
