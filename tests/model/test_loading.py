"""Loading assumes nothing: each weight has its place, all Auto classes agree, head and norm are measured."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_targets
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import hscache
from hscache.build.run import build
from hscache.errors import EnvironmentFault
from hscache.manifest import TargetSpec, parse_manifest
from hscache.model.facts import read_shape
from hscache.model.loading import HeadRelation, LoadedTarget, load_target
from hscache.store.head import load_head

IDS = torch.arange(2 * 70).reshape(2, 70) % 500
Tensors = dict[str, torch.Tensor]

DENSE = tiny_targets._dense()
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        # 30 is what is released: logits of a few units pass under it almost unchanged
        {"head_dim": 16, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16},
    ),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {"head_dim": 16}),
    "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM, {"logits_scaling": 8.0}),
    "hyperclovax": (transformers.HyperCLOVAXConfig, transformers.HyperCLOVAXForCausalLM, {"logits_scaling": 4.0}),
    "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM, {"logit_scale": 0.0625}),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, {}),
    "stablelm": (transformers.StableLmConfig, transformers.StableLmForCausalLM, {}),
    "olmo": (transformers.OlmoConfig, transformers.OlmoForCausalLM, {}),
}
"""Dense families that differ in the norm or in what follows the head."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("targets")

    def make(kind: str) -> Path:
        path = root / kind
        if path.exists():
            return path
        if kind in tiny_targets.KINDS:
            return tiny_targets.save(kind, path)
        config, cls, changes = FAMILIES[kind]
        model = tiny_targets._init(0, lambda: cls(config(**(DENSE | changes))))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:  # at their initial value 1 + w and w, or w and nothing, would look alike
                    parameter.add_(torch.linspace(-0.4, 0.4, parameter.numel()).view_as(parameter))
        model.save_pretrained(path)
        return path

    return make


def changed(
    source: Path,
    out: Path,
    weights: Callable[[Tensors], object] = lambda _: None,
    config: Callable[[dict[str, Any]], object] = lambda _: None,
) -> Path:
    """Copy a checkpoint with other weights or another config."""
    shutil.copytree(source, out)
    tensors, facts = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    weights(tensors)
    config(facts)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(facts))
    return out


def load(directory: Path, attn: str = "sdpa") -> LoadedTarget:
    spec = TargetSpec(path=str(directory), dtype="float32", attn_implementation=attn)
    return load_target(spec, read_shape(spec, directory), directory, torch.device("cpu"))


def refused(directory: Path) -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        load(directory)
    return caught.value


def states(backbone: nn.Module, layers: nn.ModuleList) -> list[torch.Tensor]:
    """Return the output of every block, and the final state."""
    seen: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _a, out: seen.append(out)) for layer in layers]
    with torch.inference_mode():
        seen.append(backbone(input_ids=IDS, use_cache=False).last_hidden_state)
    for hook in hooks:
        hook.remove()
    return seen


# --- keys


@pytest.fixture(scope="module")
def text(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text checkpoint with the weights of the vision-language one."""
    tensors = load_file(checkpoint("qwen3_5_vlm") / "model.safetensors")
    renamed = {k.replace("model.language_model.", "model."): v for k, v in tensors.items() if "visual" not in k}

    def replace(own: Tensors) -> None:
        assert own.keys() == renamed.keys()
        own.update(renamed)

    return changed(checkpoint("qwen3_5"), tmp_path_factory.mktemp("text") / "text", replace)


def test_every_auto_class_gives_the_text_models_states_of_a_vlm_checkpoint(
    checkpoint: Callable[[str], Path], text: Path
) -> None:
    target = load(text)
    wanted = states(target.backbone, target.layers)
    assert len(wanted) == 9
    vlm = checkpoint("qwen3_5_vlm")
    ours = load(vlm)
    assert ours.report["class"] == "Qwen3_5ForCausalLM"
    found = {"hscache": (ours.backbone, ours.layers)}
    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModel")
    for name in names:
        if hasattr(transformers, name):
            decoder = getattr(transformers, name).from_pretrained(vlm, dtype=torch.float32).eval().get_decoder()
            found[name] = (decoder, decoder.layers)
    assert len(found) >= 4
    for name, parts in found.items():
        for layer, (a, b) in enumerate(zip(wanted, states(*parts), strict=True)):
            assert torch.equal(a, b), (name, layer)
    assert torch.equal(ours.head.weight, target.head.weight)  # type: ignore[arg-type]


TEXT_KEY = "model.language_model.layers.0.mlp.up_proj.weight"
FOO = "model.language_model.layers.0.linear_attn.foo.weight"
NINTH = "model.language_model.layers.8.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(TEXT_KEY), "weights missing: model.layers.0.mlp.up_proj.weight;"),
        (
            lambda w: w.update({FOO: torch.ones(3)}),
            "that the model does not use: model.layers.0.linear_attn.foo.weight;",
        ),
        (
            lambda w: w.update({NINTH: torch.ones(128, 64)}),
            "that the model does not use: model.layers.8.mlp.up_proj.weight;",
        ),
        (
            lambda w: w.update({TEXT_KEY: w[TEXT_KEY][:3].contiguous()}),
            "of another shape: model.layers.0.mlp.up_proj.weight [3, 64], expected [128, 64];",
        ),
    ],
    ids=["missing", "extra", "ninth layer", "shape"],
)
def test_a_text_weight_without_its_place_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    error = refused(changed(checkpoint("qwen3_5_vlm"), tmp_path / "t", change))
    assert (error.code, error.exit_code) == ("target-keys", 3)
    assert message in error.message
    assert error.hint


def test_draft_layers_and_towers_of_other_senses_may_be_left_over(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    extra = {"mtp.fc.weight": torch.ones(3), "mtp.layers.0.mlp.up_proj.weight": torch.ones(3)}
    assert load(changed(checkpoint("qwen3_5_vlm"), tmp_path / "qwen", lambda w: w.update(extra)))
    # Llama's class names no keys to ignore: here it is hscache that lets them pass, and says so
    extra |= {"model.visual.blocks.0.norm.weight": torch.ones(3), "vision_tower.patch.weight": torch.ones(3)}
    left = load(changed(checkpoint("llama"), tmp_path / "llama", lambda w: w.update(extra)))
    assert left.report["unexpected_keys"] == sorted(extra)
    # draft layers in the manner of DeepSeek: numbered on after the last one, and declared
    drafts = {"model.layers.4.eh_proj.weight": torch.ones(3)}
    declared = changed(
        checkpoint("llama"), tmp_path / "n", lambda w: w.update(drafts), lambda c: c.update(num_nextn_predict_layers=1)
    )
    assert load(declared).report["unexpected_keys"] == list(drafts)
    assert refused(changed(checkpoint("llama"), tmp_path / "m", lambda w: w.update(drafts))).code == "target-keys"


@pytest.mark.parametrize("inner", [False, None], ids=["false", "absent"])
def test_a_tie_flag_on_the_wrong_level_raises_instead_of_a_random_head(
    checkpoint: Callable[[str], Path], tmp_path: Path, inner: bool | None
) -> None:
    def flags(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True
        config["text_config"].pop("tie_word_embeddings", None)
        if inner is not None:
            config["text_config"]["tie_word_embeddings"] = inner

    error = refused(changed(checkpoint("qwen3_5_vlm"), tmp_path / "t", lambda w: w.pop("lm_head.weight"), flags))
    assert error.code == "target-keys"
    assert "weights missing: lm_head.weight" in error.message
    assert "tie_word_embeddings" in (error.hint or "")


def test_a_tie_flag_on_the_level_of_the_text_model_ties(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def flags(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = False, True

    tied = load(changed(checkpoint("qwen3_5_vlm"), tmp_path / "t", lambda w: w.pop("lm_head.weight"), flags))
    assert tied.head.weight is tied.model.get_input_embeddings().weight  # type: ignore[operator]


# --- files


def test_weights_that_are_no_safetensors_are_refused_clearly(
    checkpoint: Callable[[str], Path], tmp_path: Path, corpus_file: Path
) -> None:
    pickled = tmp_path / "t"
    shutil.copytree(checkpoint("llama"), pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    error = refused(pickled)
    assert error.code == "target-missing"
    assert "model.safetensors" in error.message
    with pytest.raises(EnvironmentFault) as caught:
        store(pickled, tmp_path / "store", corpus_file)
    assert caught.value.code == "target-missing"
    assert "no *.safetensors weights" in caught.value.message
    assert "save_pretrained" in (caught.value.hint or "")
    assert not (tmp_path / "store").exists() or not list((tmp_path / "store").glob("shards/*"))


def test_a_truncated_file_is_the_targets_fault(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    cut = tmp_path / "t"
    shutil.copytree(checkpoint("llama"), cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-10])
    assert refused(cut).code == "target-missing"


def test_an_attention_that_the_family_lacks_has_a_hint(checkpoint: Callable[[str], Path]) -> None:
    assert refused(checkpoint("gemma2")).hint == "--set target.attn_implementation=eager"


# --- head and norm


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.parquet"
    rows = [
        {"id": f"r{i}", "input_ids": [int(x) for x in IDS[0, i : i + 20]], "loss_mask": [0] * 8 + [1] * 12}
        for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def store(target: Path, out: Path, corpus: Path, attn: str = "sdpa") -> hscache.store.reader.Store:
    spec = {"path": str(target), "dtype": "float32", "attn_implementation": attn}
    raw = {"target": spec, "states": {"taps": [0, 2]}, "corpus": {"path": str(corpus)}, "logits": {"topk": 4}}
    build(parse_manifest(raw, "test"), out, device="cpu")
    return hscache.open(out)


@pytest.mark.parametrize(
    ("kind", "relation", "norm"),
    [
        ("gemma2", HeadRelation(1.0, 30.0), "1+w"),
        ("granite", HeadRelation(0.125, None), "w"),
        ("hyperclovax", HeadRelation(4.0, None), "w"),
        ("cohere", HeadRelation(0.0625, None), "other"),
        ("llama", HeadRelation(), "w"),
        ("qwen3_5_vlm", HeadRelation(), "1+w"),
    ],
)
def test_the_stores_target_folder_gives_the_models_own_logits(
    checkpoint: Callable[[str], Path], tmp_path: Path, corpus_file: Path, kind: str, relation: HeadRelation, norm: str
) -> None:
    attn = "eager" if kind == "gemma2" else "sdpa"
    made = store(checkpoint(kind), tmp_path / "store", corpus_file, attn)
    head = load_head(made.path / "target")
    assert HeadRelation(**head.facts["head"]) == relation
    assert head.facts["norm_kind"] == norm
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(kind), dtype=torch.float32, attn_implementation=attn
    ).eval()
    with torch.inference_mode():
        final = model.get_decoder()(input_ids=IDS, use_cache=False).last_hidden_state
        logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.std() > 0.05
    torch.testing.assert_close(head.logits(final), logits, rtol=1e-5, atol=1e-5)
    # and from what is stored, within the rounding of the final state
    sample = made[0]
    logprobs = torch.log_softmax(head.logits(sample.final_state[sample.logits.positions - 1]), dim=-1)
    error = logprobs.gather(-1, sample.logits.ids.long()) - sample.logits.logprobs.float()
    assert error.abs().max() < 0.1


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [("llama", "w"), ("qwen3", "w"), ("qwen3_5", "1+w"), ("gemma", "1+w"), ("stablelm", "other")],
)
def test_the_kind_of_the_final_norm_is_measured(checkpoint: Callable[[str], Path], kind: str, wanted: str) -> None:
    target = load(checkpoint(kind))
    assert target.norm_kind == target.report["norm_kind"] == wanted


def test_logits_that_the_config_does_not_explain_are_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = transformers.LlamaForCausalLM.forward

    def scaled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        out.logits = out.logits * 0.9
        return out

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", scaled)
    error = refused(checkpoint("llama"))
    assert error.code == "target-head"
    assert "LlamaForCausalLM" in error.message


def test_a_head_with_a_bias_is_refused_since_a_store_keeps_weights_alone(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    biased = changed(checkpoint("phi"), tmp_path / "t", lambda w: w.update({"lm_head.bias": torch.linspace(0, 1, 512)}))
    assert refused(biased).code == "target-head"


def test_a_final_norm_without_weights_is_refused(checkpoint: Callable[[str], Path]) -> None:
    assert refused(checkpoint("olmo")).code == "target-structure"
