"""Drafters that others wrote: the same drafter in any of their spellings is read, and every other one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hstrain.exchange.export import export_drafter
from hstrain.exchange.importer import read_checkpoint
from safetensors.torch import load_file, save_file

from hscache.errors import HscacheError, IntegrityError
from tests.made import drafters
from tests.made.drafters import Change

FACTS = {"target": "some/target", "store": "5d1c", "kernel path": "none needed", "run": {"steps": 3}}


@pytest.fixture
def change(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that exports a drafter and changes its config or weights."""

    def run(
        layout: str = "zlab",
        kind: str = "mixed",
        config: Change | None = None,
        weights: Change | None = None,
    ) -> Path:
        folder = tmp_path / f"theirs-{len(list(tmp_path.iterdir()))}"
        export_drafter(layout, drafters.drafter(kind), drafters.head(), folder, provenance=FACTS, dtype="float32")
        return drafters.rewrite(folder, config, weights)

    return run


def code_of(path: Path, head: Any = None) -> str:
    with pytest.raises(HscacheError) as caught:
        read_checkpoint(path, head)
    assert str(path) in caught.value.message or path.name in caught.value.message
    return caught.value.code


SAME: dict[str, Change] = {
    "block size at the top only": lambda c: c["dflash_config"].pop("block_size"),
    "block size nested only": lambda c: c.pop("block_size"),
    "taps at the top": lambda c: c.update(target_layer_ids=c["dflash_config"].pop("target_layer_ids")),
    "theta at the top only": lambda c: c.pop("rope_parameters"),
    "theta in rope_parameters only": lambda c: c.pop("rope_theta"),
    "theta in rope_scaling": lambda c: c.update(rope_scaling=c.pop("rope_parameters"), rope_theta=None),
    "theta by layer type": lambda c: c.update(
        rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), c["rope_parameters"])
    ),
    "no rope_scaling": lambda c: c.update(rope_scaling=None),
    "window named in dflash_config": lambda c: c["dflash_config"].update(swa_window_size=11),
    "neutral keys": lambda c: c.update(
        dflash_config=c["dflash_config"] | {"use_swa": False, "attention_sink_bias": None}
    ),
    "Automodel's name of it": lambda c: c.update(architectures=["Qwen3DFlashDraftModel"]),
    "what a server ignores": lambda c: c.update(auto_map={"AutoModel": "x"}, torch_dtype="bfloat16", eos_token_id=3),
}


@pytest.mark.parametrize("how", SAME)
def test_the_same_drafter_said_in_another_way(change: Callable[..., Path], how: str) -> None:
    drafter, _ = read_checkpoint(change(config=SAME[how]), drafters.head())
    assert drafter.config == drafters.config("mixed")


def test_values_that_were_left_out_are_transformers_defaults_and_noted(change: Callable[..., Path]) -> None:
    drafter, facts = read_checkpoint(change(config=lambda c: [c.pop("rope_theta"), c.pop("rope_parameters")]))
    assert drafter.config == drafters.config("mixed")
    assert facts.notes == ("rope_theta = 10000.0 (absent: transformers' default)",)


@pytest.mark.parametrize(("kind", "causal"), [("full", False), ("sliding", True)])
@pytest.mark.parametrize("where", ["top", "nested"])
def test_an_override_that_changes_nothing_is_taken(
    change: Callable[..., Path], kind: str, causal: bool, where: str
) -> None:
    def say(c: dict[str, Any]) -> None:
        c["dflash_config"].update({"causal": causal}) if where == "nested" else c.update(is_causal=causal)

    assert read_checkpoint(change(kind=kind, config=say))[0].config == drafters.config(kind)


def says(flag: bool | None, *layers: str, is_causal: bool | None = None) -> Change:
    """Return a function that changes layers and flags of a speculators config."""

    def change(c: dict[str, Any]) -> None:
        c["sliding_window_non_causal"] = flag
        if flag is None:
            del c["sliding_window_non_causal"]
        c["transformer_layer_config"].update(layer_types=list(layers), is_causal=is_causal)

    return change


FULL, SLIDING = drafters.FULL, drafters.SLIDING
SERVED: dict[str, tuple[str, Change, str | None]] = {
    "full": ("full", says(True, FULL, FULL), None),
    "full, not said": ("full", says(None, FULL, FULL), None),
    "full, as speculators writes it": (
        "full",
        says(False, FULL, FULL),
        "False: vLLM will serve all of the 2 layers as causal",
    ),
    "full, settled elsewhere": ("full", says(False, FULL, FULL, is_causal=False), None),
    "sliding": ("sliding", says(False, SLIDING, SLIDING), None),
    "sliding, not said": (
        "sliding",
        says(None, SLIDING, SLIDING),
        "absent: vLLM will serve none of the 2 layers as causal",
    ),
    "sliding, settled elsewhere": ("sliding", says(None, SLIDING, SLIDING, is_causal=True), None),
    "mixed": ("sliding", says(False, SLIDING, FULL), "False: vLLM will serve all of the 2 layers as causal"),
    "mixed, not said": ("sliding", says(None, SLIDING, FULL), "absent: vLLM will serve none of the 2 layers as causal"),
}


@pytest.mark.parametrize("how", SERVED)
def test_a_note_says_that_vllm_serves_another_drafter_than_is_read(change: Callable[..., Path], how: str) -> None:
    kind, config, note = SERVED[how]
    drafter, facts = read_checkpoint(change("speculators", kind, config), drafters.head())
    if note is None:
        assert facts.notes == ()
    else:
        (said,) = facts.notes
        assert said.startswith(f"sliding_window_non_causal is {note}")
        assert f"read only sliding layers ({drafter.config.layer_types.count(SLIDING)}) as causal" in said
        assert "export it again with --format zlab" in said


UNSUPPORTED: dict[str, tuple[str, str, Change]] = {
    "another kind of drafter": ("zlab", "mixed", lambda c: c.update(architectures=["DFlash2DraftModel"])),
    "another kind of speculator": ("speculators", "sliding", lambda c: c.update(speculators_model_type="eagle3")),
    "another model type": ("zlab", "mixed", lambda c: c.update(model_type="gemma3_text")),
    "all layers causal": ("zlab", "mixed", lambda c: c.update(is_causal=True)),
    "full layers causal": ("zlab", "full", lambda c: c.update(is_causal=True)),
    "sliding layers both ways": ("zlab", "sliding", lambda c: c.update(is_causal=False)),
    "sliding layers both ways, nested": ("zlab", "mixed", lambda c: c["dflash_config"].update(causal=False)),
    "sliding both ways, speculators": ("speculators", "sliding", lambda c: c.update(sliding_window_non_causal=True)),
    "anchor predicts": ("speculators", "sliding", lambda c: c.update(sample_from_anchor=True)),
    "part of the vocabulary": ("speculators", "sliding", lambda c: c.update(draft_vocab_size=100)),
    "another width": ("speculators", "sliding", lambda c: c.update(target_hidden_size=128)),
    "chunked layers": ("zlab", "full", lambda c: c.update(layer_types=["chunked_attention"] * 2)),
    "bias": ("zlab", "mixed", lambda c: c.update(attention_bias=True)),
    "another activation": ("zlab", "mixed", lambda c: c.update(hidden_act="gelu")),
    "yarn of unknown positions": ("zlab", "mixed", lambda c: c["rope_parameters"].update(rope_type="yarn", factor=4.0)),
    "yarn with a factor of its own on attention": ("zlab", "mixed", lambda c: c["rope_parameters"].update(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=8192, attention_factor=1.5,
    )),
    "a rope stretched in another way": ("zlab", "mixed", lambda c: c["rope_parameters"].update(
        rope_type="linear", factor=4.0,
    )),
    "partial rope": ("zlab", "mixed", lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25)),
    "partial rope at the top": ("zlab", "mixed", lambda c: c.update(partial_rotary_factor=0.25)),
    "mrope": ("zlab", "mixed", lambda c: c["rope_parameters"].update(mrope_section=[4, 2, 2])),
    "two thetas": ("zlab", "mixed", lambda c: c.update(rope_theta=None, rope_parameters={
        "full_attention": {"rope_theta": 1e4, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e6, "rope_type": "default"},
    })),
    "a key that nobody here knows": ("zlab", "mixed", lambda c: c["dflash_config"].update(selector_rank=4)),
    "sinks": ("zlab", "mixed", lambda c: c["dflash_config"].update(attention_sink_bias=True)),
    "quantised": ("zlab", "mixed", lambda c: c.update(quantization_config={"bits": 4})),
    "tap of the embedding": ("speculators", "sliding", lambda c: c.update(aux_hidden_state_layer_ids=[0, 1, 2])),
    "tap of the last block": ("zlab", "mixed", lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 3])),
    "taps out of order": ("zlab", "mixed", lambda c: c["dflash_config"].update(target_layer_ids=[1, 0, 2])),
}  # fmt: skip


@pytest.mark.parametrize("how", UNSUPPORTED)
def test_a_drafter_that_computes_something_else_is_refused(change: Callable[..., Path], how: str) -> None:
    layout, kind, config = UNSUPPORTED[how]
    assert code_of(change(layout, kind, config), drafters.head()) == "drafter-unsupported"


WRONG: dict[str, tuple[str, Change]] = {
    "yarn says two things": (
        "zlab",
        lambda c: c.update(
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ),
    "yarn that stretches nothing": (
        "zlab",
        lambda c: c["rope_parameters"].update(
            rope_type="yarn",
            factor=1.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "block size says two things": ("zlab", lambda c: c.update(block_size=16)),
    "no block size": ("zlab", lambda c: [c.pop("block_size"), c["dflash_config"].pop("block_size")]),
    "block size is a word": ("speculators", lambda c: c.update(block_size="8")),
    "block of one": ("speculators", lambda c: c.update(block_size=1)),
    "no mask": ("zlab", lambda c: c["dflash_config"].pop("mask_token_id")),
    "mask beyond the vocabulary": ("zlab", lambda c: c["dflash_config"].update(mask_token_id=512)),
    "no taps": ("zlab", lambda c: c["dflash_config"].pop("target_layer_ids")),
    "taps beyond the target": ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 9])),
    "theta says two things": ("zlab", lambda c: c.update(rope_theta=500.0)),
    "no window": ("zlab", lambda c: c.update(sliding_window=None)),
    "window switched off": ("zlab", lambda c: c.update(use_sliding_window=False)),
    "window says two things": ("zlab", lambda c: c["dflash_config"].update(swa_window_size=12)),
    "layers do not add up": ("zlab", lambda c: c.update(num_hidden_layers=4)),
    "no layer config": ("speculators", lambda c: c.pop("transformer_layer_config")),
    "embeddings times nothing": ("zlab", lambda c: c["dflash_config"].update(input_embedding_scale=0)),
    "embeddings times a word": ("zlab", lambda c: c["dflash_config"].update(input_embedding_scale="8")),
    "embeddings times two things": (
        "zlab",
        lambda c: [c.update(input_embedding_scale=8), c["dflash_config"].update(input_embedding_scale=4)],
    ),
    "heads do not share evenly": ("zlab", lambda c: c.update(num_key_value_heads=3)),
    "no heads for keys": ("zlab", lambda c: c.update(num_key_value_heads=0)),
    "heads of less than nothing": ("zlab", lambda c: c.update(head_dim=-2)),
    "layers of nothing": ("zlab", lambda c: c.update(intermediate_size=0)),
    "heads beyond all bounds": ("zlab", lambda c: c.update(num_attention_heads=1 << 14, head_dim=1 << 14)),
    "widths beyond all bounds": ("zlab", lambda c: c.update(intermediate_size=10**30)),
    "an epsilon of no number": ("zlab", lambda c: c.update(rms_norm_eps=float("nan"))),
    "an epsilon below nothing": ("zlab", lambda c: c.update(rms_norm_eps=-1e-6)),
    "a theta of nothing": ("zlab", lambda c: theta(c, 0)),
    "a theta of no number": ("zlab", lambda c: theta(c, float("nan"))),
    "a theta beyond all numbers": ("zlab", lambda c: theta(c, 10**400)),
    "a theta in words": ("zlab", lambda c: theta(c, "1e4")),
    "a window behind itself": ("zlab", lambda c: c.update(sliding_window=-4)),
    "a window of nothing": ("zlab", lambda c: c.update(sliding_window=0)),
    "no positions": ("zlab", lambda c: c.update(max_position_embeddings=0)),
    "a block beyond all bounds": ("speculators", lambda c: c.update(block_size=10**9)),
    "taps of truth": ("zlab", lambda c: c["dflash_config"].update(target_layer_ids=[False, True, 2])),
    "logits times a list": ("zlab", lambda c: c["dflash_config"].update(output_multiplier=[2])),
    "a cap in words": ("zlab", lambda c: c["dflash_config"].update(final_logit_softcapping="30")),
    "a dtype that torch has not": ("zlab", lambda c: c.update(dtype="float7")),
    "the layers' dtype": ("speculators", lambda c: c["transformer_layer_config"].update(dtype="float7")),
    "labels that are a number": ("zlab", lambda c: c.update(id2label=3)),
    "speculators_config is a word": ("speculators", lambda c: c.update(speculators_config="x")),
    "speculators_config is a list": ("speculators", lambda c: c.update(speculators_config=[1])),
    "the verifier is a word": ("speculators", lambda c: c["speculators_config"].update(verifier="x")),
    "the verifier's name is a number": (
        "speculators",
        lambda c: c["speculators_config"]["verifier"].update(name_or_path=3),
    ),
}


def theta(config: dict[str, Any], value: object) -> None:
    config.update(rope_theta=value, rope_parameters={"rope_theta": value, "rope_type": "default"})


@pytest.mark.parametrize("how", WRONG)
def test_a_config_that_lacks_a_value_or_says_two_things_is_refused(change: Callable[..., Path], how: str) -> None:
    layout, config = WRONG[how]
    kind = "sliding" if layout == "speculators" else "mixed"
    assert code_of(change(layout, kind, config), drafters.head()) == "drafter-config"


@pytest.mark.parametrize("said", [None, {}, {"verifier": None}, {"verifier": {}}])
def test_a_config_need_not_name_the_target(change: Callable[..., Path], said: object) -> None:
    path = change("speculators", "sliding", lambda c: c.update(speculators_config=said))
    assert read_checkpoint(path, drafters.head())[1].verifier is None


def test_speculators_needs_the_target_to_know_its_layers(change: Callable[..., Path]) -> None:
    assert code_of(change("speculators", "full")) == "drafter-config"


WEIGHTS: dict[str, tuple[str, Change]] = {
    "missing": ("drafter-weights", lambda w: w.pop("layers.1.mlp.up_proj.weight")),
    "unexpected": ("drafter-weights", lambda w: w.update({"layers.0.self_attn.q_proj.bias": torch.zeros(64)})),
    "embedding": ("drafter-shape", lambda w: w.update({"embed_tokens.weight": torch.zeros(512, 32)})),
    "prefixed": ("drafter-weights", lambda w: [w.update({f"model.{k}": w.pop(k)}) for k in list(w)]),
    "shape": ("drafter-shape", lambda w: w.update({"fc.weight": torch.zeros(64, 128)})),
    "integers": ("drafter-shape", lambda w: w.update({"norm.weight": torch.ones(64, dtype=torch.int8)})),
    "NaN": ("drafter-damaged", lambda w: w["norm.weight"].fill_(float("nan"))),
}  # fmt: skip


@pytest.mark.parametrize("how", WEIGHTS)
def test_weights_must_be_those_of_the_config(change: Callable[..., Path], how: str) -> None:
    code, weights = WEIGHTS[how]
    assert code_of(change(weights=weights)) == code


@pytest.mark.parametrize("layout", ["speculators", "zlab"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_the_target_in_a_drafters_files_are_compared_with_it(
    change: Callable[..., Path], layout: str, dtype: torch.dtype
) -> None:
    head = drafters.head()

    def add(weights: dict[str, Any]) -> None:
        weights["embed_tokens.weight"] = head.embed.to(dtype)
        weights["lm_head.weight"] = head.lm_head.to(dtype)
        weights["verifier_norm.weight"] = head.norm.to(dtype)

    folder = change(layout, "full", weights=add)
    _, facts = read_checkpoint(folder, head)
    assert sorted(facts.notes) == [
        f"{name}.weight equals the target's: not used" for name in ("embed_tokens", "lm_head", "verifier_norm")
    ]
    assert code_of(folder, drafters.head(seed=2)) == "drafter-other-target"


@pytest.mark.parametrize("how", ["scale", "softcap"])
def test_a_head_that_makes_logits_in_another_way_is_another_target(change: Callable[..., Path], how: str) -> None:
    head = drafters.head(scale=0.5) if how == "scale" else drafters.head(softcap=30.0)
    assert code_of(change(), head) == "drafter-other-target"
    _, facts = read_checkpoint(change(config=lambda c: c["dflash_config"].update(output_multiplier=0.5)))
    assert facts.notes == ("logits {'scale': 0.5, 'softcap': None}: not compared with a target",)


def shard(folder: Path) -> dict[str, Any]:
    """Split the weights of an export into two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (i > len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def test_shards_with_an_index(change: Callable[..., Path]) -> None:
    folder = change()
    shard(folder)
    drafter, _ = read_checkpoint(folder)
    for name, tensor in drafters.drafter().state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor)


@pytest.mark.parametrize(
    "how", ["shard gone", "shard cut", "index without map", "stray weight", "outside", "config cut"]
)
def test_damaged_files_are_named(change: Callable[..., Path], how: str) -> None:
    folder = change()
    index = shard(folder)
    first, index_path = folder / "model-00001-of-00002.safetensors", folder / "model.safetensors.index.json"
    if how == "shard gone":
        first.unlink()
    elif how == "shard cut":
        first.write_bytes(first.read_bytes()[:-1])
    elif how == "index without map":
        index_path.write_text("{}")
    elif how == "stray weight":
        del index["weight_map"][next(iter(index["weight_map"]))]
        index_path.write_text(json.dumps(index))
    elif how == "outside":
        index["weight_map"]["norm.weight"] = "../x.safetensors"
        index_path.write_text(json.dumps(index))
    else:
        (folder / "config.json").write_text("{")
    with pytest.raises(IntegrityError) as caught:
        read_checkpoint(folder)
    assert caught.value.code == "drafter-damaged"


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_without_a_checkpoint(change: Callable[..., Path], file: str) -> None:
    folder = change()
    (folder / file).unlink()
    assert code_of(folder) == "drafter-missing"


def test_a_mask_with_an_embedding_of_its_own_is_refused(change: Callable[..., Path]) -> None:
    folder = change()
    (folder / "mask_embedding.pt").write_bytes(b"")
    assert code_of(folder) == "drafter-unsupported"
