"""Checkpoints that others read: what is written reads back bit by bit, and what is not ours is refused by name."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hstrain.exchange import export
from hstrain.exchange.export import export_drafter
from hstrain.exchange.importer import open_drafter, read_checkpoint
from safetensors.torch import load_file

from hscache.errors import ConfigError, ConflictError, IntegrityError
from tests.made import drafters

LAYOUTS = ("zlab", "speculators")
FACTS = {"target": "some/target", "store": "5d1c", "kernel path": "none needed", "run": {"steps": 3}}


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize(("layout", "kind"), [*product(LAYOUTS, ("full", "sliding")), ("zlab", "mixed")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_reads_back_bit_by_bit(tmp_path: Path, layout: str, dtype: Any, kind: str) -> None:
    drafter, head = drafters.drafter(kind), drafters.head()
    done = export_drafter(layout, drafter, head, tmp_path / "out", provenance=FACTS, dtype=dtype)
    again, facts = read_checkpoint(tmp_path / "out", head)
    assert again.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.to(getattr(torch, dtype)).float()), name
    assert (facts.layout, facts.config.taps, facts.dtypes, facts.notes) == (layout, (0, 1, 2), (dtype,), ())
    assert facts.verifier == ("some/target" if layout == "speculators" else None)
    assert done.size_bytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert done.parameters == sum(p.numel() for p in drafter.parameters())
    assert again.fc.weight.requires_grad
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_speculators_layout_needs_the_name_of_the_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        export_drafter(
            "speculators", drafters.drafter("full"), drafters.head(), tmp_path / "out", provenance={"target": ""}
        )
    assert refused.value.code == "export-unsupported"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "flag"), [("full", True), ("sliding", False)])
def test_speculators_layout_has_one_flag_for_all_layers(tmp_path: Path, kind: str, flag: bool) -> None:
    """vLLM makes all layers causal where it is false: see tests/oracle/test_vllm.py."""
    export_drafter("speculators", drafters.drafter(kind), drafters.head(), tmp_path / "out", provenance=FACTS)
    assert read(tmp_path / "out")["sliding_window_non_causal"] is flag


def test_sliding_and_full_layers_together_are_refused_in_speculators_layout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        export_drafter("speculators", drafters.drafter("mixed"), drafters.head(), tmp_path / "out", provenance=FACTS)
    assert refused.value.code == "export-unsupported"
    assert "2 of 3 layers are sliding" in refused.value.message
    assert "--format zlab" in str(refused.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_the_taps_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_drafter("zlab", drafters.drafter(), drafters.head(), tmp_path / "out", provenance=FACTS)
    open_drafter(tmp_path / "out", drafters.head())
    assert "taps [0, 1, 2]" in capsys.readouterr().err.splitlines()[-1]


def test_zlab_says_where_every_reader_looks(tmp_path: Path) -> None:
    export_drafter(
        "zlab", drafters.drafter("mixed"), drafters.head(scale=0.5, softcap=30.0), tmp_path / "out", provenance=FACTS
    )
    config = read(tmp_path / "out")
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (config["model_type"], config["block_size"], config["num_target_layers"]) == ("qwen3", 8, 4)
    assert config["dflash_config"] == {
        "block_size": 8, "mask_token_id": 7, "target_layer_ids": [0, 1, 2],
        "output_multiplier": 0.5, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 11)
    assert config["layer_types"] == list(drafters.KINDS["mixed"])
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert all(tensor.dtype == torch.bfloat16 for tensor in load_file(tmp_path / "out/model.safetensors").values())


def test_speculators_counts_taps_from_one_and_leaves_the_targets_weights_out(tmp_path: Path) -> None:
    export_drafter("speculators", drafters.drafter("full"), drafters.head(), tmp_path / "out", provenance=FACTS)
    config = read(tmp_path / "out")
    assert config["aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["speculators_config"]["verifier"] == {
        "architectures": ["Qwen3ForCausalLM"],
        "name_or_path": "some/target",
    }
    assert load_file(tmp_path / "out/model.safetensors").keys() == drafters.drafter("full").state_dict().keys()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_yarn_changes_the_config_and_what_is_read_back_from_it(tmp_path: Path, layout: str) -> None:
    drafter, head = drafters.drafter("full"), drafters.head()
    for name, yarn in (("plain", None), ("long", (4.0, 8192)), ("own", (2.0, None))):
        export_drafter(layout, drafter, head, tmp_path / name, provenance=FACTS, dtype="float32", yarn=yarn)
    ours = read(tmp_path / "plain"), read(tmp_path / "long")
    plain, long = ours if layout == "zlab" else (one["transformer_layer_config"] for one in ours)
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8192}
    assert long["rope_parameters"] == long["rope_scaling"] == rope
    assert long == {**plain, "rope_parameters": rope, "rope_scaling": rope, "max_position_embeddings": 32768}
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "long")]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    again, _ = read_checkpoint(tmp_path / "long", head)
    changed = {"yarn_factor": 4.0, "yarn_positions": 8192, "max_position_embeddings": 32768}
    assert again.config == dataclasses.replace(drafter.config, **changed)
    assert read_checkpoint(tmp_path / "own", head)[0].config.max_position_embeddings == 65536
    card = (tmp_path / "long/README.md").read_text()
    assert "| positions | 32,768: YaRN stretches 8,192 by 4, in short texts too" in card
    assert "YaRN" not in (tmp_path / "plain/README.md").read_text()
    # a drafter that has it already, a factor that stretches nothing, and more positions than any reader takes
    for made, yarn in ((again, (2.0, None)), (drafter, (1.0, None)), (drafter, (1e4, None))):
        with pytest.raises(ConfigError) as refused:
            export_drafter(layout, made, head, tmp_path / "out", provenance=FACTS, yarn=yarn)
        assert refused.value.code == "export-unsupported"


@pytest.mark.parametrize(
    ("kind", "served"), [("full", "-md out.gguf"), ("sliding", "-md out.gguf"), ("mixed", "fewer")]
)
def test_llama_cpp_is_told_that_all_layers_are_causal_where_they_are(tmp_path: Path, kind: str, served: str) -> None:
    """It has one flag for all layers; the card says so of a drafter with both kinds."""
    export_drafter("zlab", drafters.drafter(kind), drafters.head(), tmp_path / "out", provenance=FACTS)
    assert read(tmp_path / "out").get("is_causal") is (True if kind == "sliding" else None)
    card = (tmp_path / "out/README.md").read_text()
    assert served in card.partition("llama.cpp")[2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_card_says_what_it_is_how_to_serve_it_and_where_it_comes_from(tmp_path: Path, layout: str) -> None:
    export_drafter(layout, drafters.drafter("sliding"), drafters.head(), tmp_path / "out", provenance=FACTS)
    card = (tmp_path / "out/README.md").read_text()
    for text in ("some/target", "5d1c", "none needed", '{"steps": 3}', "[0, 1, 2]", "vllm serve", "window 11 tokens"):
        assert text in card, text
    assert json.loads((tmp_path / "out/provenance.json").read_text()) == FACTS


def test_an_export_never_replaces_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConflictError) as caught:
        export_drafter("zlab", drafters.drafter(), drafters.head(), tmp_path / "out", provenance=FACTS)
    assert caught.value.code == "export-exists"
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tap_at_the_last_block_is_refused(tmp_path: Path, layout: str) -> None:
    drafter = drafters.drafter("full", taps=(0, 1, 3))
    with pytest.raises(ConfigError) as caught:
        export_drafter(layout, drafter, drafters.head(), tmp_path / "out", provenance=FACTS)
    assert caught.value.code == "export-unsupported"
    assert list(tmp_path.iterdir()) == []


def test_speculators_cannot_say_that_logits_are_capped(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        export_drafter(
            "speculators", drafters.drafter("full"), drafters.head(softcap=30.0), tmp_path / "out", provenance=FACTS
        )
    assert caught.value.code == "export-unsupported"


def test_the_scale_of_the_embedding_goes_out_and_comes_back(tmp_path: Path) -> None:
    drafter, head = drafters.drafter("full", embed_scale=59.75), drafters.head()
    head.facts["embed_scale"] = 59.75
    export_drafter("zlab", drafter, head, tmp_path / "out", provenance=FACTS)
    assert read(tmp_path / "out")["dflash_config"]["input_embedding_scale"] == 59.75
    assert read_checkpoint(tmp_path / "out", head)[0].config == drafter.config
    assert "the embedding's rows times 59.75" in (tmp_path / "out/README.md").read_text()
    with pytest.raises(ConfigError) as caught:
        export_drafter("speculators", drafter, head, tmp_path / "theirs", provenance=FACTS)
    assert caught.value.code == "export-unsupported"


def test_without_a_scale_the_rows_are_read_as_they_are_and_a_note_says_so(tmp_path: Path) -> None:
    export_drafter("zlab", drafters.drafter(), drafters.head(), tmp_path / "out", provenance=FACTS)
    assert "input_embedding_scale" not in (tmp_path / "out/config.json").read_text()
    assert "times" not in (tmp_path / "out/README.md").read_text()
    head = drafters.head()
    head.facts["embed_scale"] = 8.0
    drafter, facts = read_checkpoint(tmp_path / "out", head)
    assert drafter.config.embed_scale == 1.0
    assert [note for note in facts.notes if "multiplies its embeddings by 8" in note] == list(facts.notes) != []


@pytest.mark.parametrize("what", ["weight", "config"])
def test_what_reads_back_as_another_drafter_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def wrong(path: Path, head: Any) -> Any:
        drafter, facts = read_checkpoint(path, head)
        if what == "config":
            return drafters.drafter(rope_theta=500.0), facts
        with torch.no_grad():
            drafter.norm.weight[3] += 1e-3
        return drafter, facts

    monkeypatch.setattr(export, "read_checkpoint", wrong)
    with pytest.raises(IntegrityError) as caught:
        export_drafter("zlab", drafters.drafter(), drafters.head(), tmp_path / "out", provenance=FACTS)
    assert caught.value.code == "export-differs"
    assert list(tmp_path.iterdir()) == []
