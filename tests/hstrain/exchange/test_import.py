"""Released drafters go on training: what is read is what training begins from, shape and weights, or nothing is."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hstrain.drafter.model import DrafterConfig
from hstrain.exchange import importer
from hstrain.exchange.export import export_drafter
from hstrain.exchange.importer import read_checkpoint
from hstrain.exchange.layouts import Layout, read_config, speculators_config, zlab_config
from hstrain.manifest import TrainManifest, drafter_config, drafter_in, load_train_manifest, tuning_manifest
from hstrain.run.checkpoint import load_drafter, weights_digest
from hstrain.run.folder import RunPaths
from hstrain.train.fit import fit
from hstrain.train.parallel import World
from hstrain.train.step import Trainer
from hypothesis import given
from hypothesis import strategies as st

import hscache
from hscache.errors import ConfigError, ConflictError, InputError
from hscache.manifest import check_fields, to_toml
from hscache.store.head import TargetHead, load_head
from tests.hstrain.train.test_fit import Killed, die, during_step, last, metrics, same_checkpoint, terminate
from tests.made import drafters
from tests.made.drafters import Change
from tests.made.hybrid import Hybrid
from tests.made.stores import HIDDEN, VOCAB, Little
from tests.made.trainers import SHAPE, little_config, little_drafter, train_manifest, training_store

TAPS = (0, 2)
"""Of the little store, those that an export can hold: its third is the target's last block."""
pytestmark = pytest.mark.usefixtures("no_disk")


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Little:
    shape = {"num_layers": 4, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    says = {"shape": shape, "class": "LittleForCausalLM", "tied": False}
    return training_store(tmp_path_factory.mktemp("import") / "store", says=says)


@pytest.fixture
def release(little: Little, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a drafter for the little store as others do, and changes its files."""

    def run(
        layout: str = "zlab", config: Change | None = None, weights: Change | None = None, seed: int = 0, **shape: Any
    ) -> Path:
        folder = tmp_path / f"released-{len(list(tmp_path.iterdir()))}"
        drafter = little_drafter(dataclasses.replace(little_config(taps=TAPS), **shape), seed)
        head = load_head(little.path / "target")
        export_drafter(layout, drafter, head, folder, provenance={"target": "little"}, dtype="float32")
        return drafters.rewrite(folder, config, weights)

    return run


# the shape


@st.composite
def shapes(draw: st.DrawFn) -> DrafterConfig:
    """Every field drawn, by its name."""
    whole = st.integers(1, 1 << 20)
    layers = draw(st.integers(2, 99))
    kinds = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1, max_size=6))
    taps = draw(st.sets(st.integers(0, layers - 2), min_size=1, max_size=6))
    heads = draw(st.integers(1, 8))
    fields = {
        "hidden_size": draw(whole),
        "vocab_size": draw(st.integers(9, 1 << 18)),
        "taps": tuple(sorted(taps)),
        "num_target_layers": layers,
        "layer_types": tuple(kinds),
        "intermediate_size": draw(whole),
        "num_heads": heads * draw(st.integers(1, 8)),
        "num_kv_heads": heads,
        "head_dim": 2 * draw(st.integers(1, 256)),
        "block_size": draw(st.integers(2, 64)),
        "mask_token_id": draw(st.integers(0, 8)),
        "rope_theta": draw(st.floats(1, 1e12)),
        "rms_norm_eps": draw(st.floats(1e-12, 1e-2)),
        "sliding_window": draw(st.integers(1, 1 << 16)) if "sliding_attention" in kinds else None,
        "max_position_embeddings": draw(whole),
        "embed_scale": draw(st.floats(0.01, 100)),
        "yarn_factor": 1.0,  # a manifest has none
        "yarn_positions": None,
    }
    assert fields.keys() == {field.name for field in dataclasses.fields(DrafterConfig)}
    return DrafterConfig(**fields)


@given(shapes(), st.sampled_from(["zlab", "speculators"]))
def test_a_shape_comes_through_config_and_manifest_whole(config: DrafterConfig, layout: Layout) -> None:
    if layout == "speculators":  # has no place for a scale, nor for sliding and full layers together
        kind = config.layer_types[0]
        window = config.sliding_window if kind == "sliding_attention" else None
        config = dataclasses.replace(
            config, embed_scale=1.0, layer_types=(kind,) * config.num_layers, sliding_window=window
        )
    target = {
        "num_layers": config.num_target_layers, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size,
    }  # fmt: skip
    facts = {"shape": target, "head": {"scale": 1.0, "softcap": None}, "class": "LittleForCausalLM"}
    facts["embed_scale"] = config.embed_scale
    head = TargetHead(torch.ones(1), torch.ones(1), torch.ones(1), facts)
    if layout == "zlab":
        written = zlab_config(config, head, "bfloat16")
    else:
        written = speculators_config(config, head, "bfloat16", "little")
    read = read_config(Path("theirs"), json.loads(json.dumps(written)), head)
    assert read.notes == ()
    text = to_toml(tuning_manifest(read.config, Path('/a "b"')))
    spec = check_fields(tomllib.loads(text), TrainManifest, "test").drafter
    assert spec.start == '/a "b"'
    # a store may have more taps than the drafter reads
    assert drafter_config(spec, taps=range(config.num_target_layers), **target, embed_scale=head.embed_scale) == config


def test_a_shape_that_the_manifest_would_lose_is_refused(
    hstrain: Any, little: Little, release: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(config: DrafterConfig, *rest: Any) -> TrainManifest:
        return tuning_manifest(dataclasses.replace(config, max_position_embeddings=32768), *rest)

    folder = release(max_position_embeddings=4096)
    monkeypatch.setattr(importer, "tuning_manifest", forgetful)
    answer = hstrain("import", folder, "--store", little.path, "--out", tmp_path / "m.toml")
    assert (answer.status, answer.out, answer.code) == (2, "", "start-other-shape")
    assert "max_position_embeddings is 4096, expected 32768" in answer.err
    assert not (tmp_path / "m.toml").exists()


# the command


def test_import_prints_facts_and_writes_nothing_unasked(
    hstrain: Any, little: Little, release: Callable[..., Path], tmp_path: Path
) -> None:
    folder = release(config=lambda c: c.update(attention_dropout=0.1))
    answer = hstrain("import", folder, "--store", little.path)
    assert (answer.status, answer.err) == (0, "")
    title, *lines = answer.out.splitlines()
    assert title == f"{folder}: a drafter for {little.path}"
    said = {line[:14].strip(): line[14:] for line in lines}
    drafter, _ = read_checkpoint(folder)
    assert said == {
        "layout": "zlab",
        "taps": "[0, 2] of 4 blocks, counted from 0; the store has them",
        "block": "4 tokens: the anchor and 3 drafted",
        "mask token": "31",
        "layers": "2: sliding, full; window 6 tokens",
        "widths": "8, feed-forward 16",
        "heads": "4 of 4, 2 for keys and values",
        "rope": "theta 10000, 32,768 positions",
        "norms": "epsilon 1e-06",
        "parameters": f"{sum(p.numel() for p in drafter.parameters()):,} in 25 tensors, float32",
        "note": "attention_dropout 0.1 not used",
    }
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_import_says_that_vllm_serves_another_drafter(
    hstrain: Any, little: Little, release: Callable[..., Path]
) -> None:
    folder = release(
        "speculators",
        lambda c: c.update(sliding_window_non_causal=False),
        layer_types=("full_attention",) * 2,
        sliding_window=None,
    )
    answer = hstrain("import", folder, "--store", little.path)
    assert (answer.status, answer.err) == (0, "")
    (note,) = [line[14:] for line in answer.out.splitlines() if line.strip().startswith("note")]
    assert note.startswith("sliding_window_non_causal is False: vLLM will serve all of the 2 layers as causal")
    assert hstrain("import", folder, "--store", little.path, "--json").json["notes"] == [note]


@pytest.mark.parametrize("where", ["both", "top", "nested"])
def test_import_writes_a_manifest_of_that_drafter(
    hstrain: Any,
    little: Little,
    release: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    def change(content: dict[str, Any]) -> None:
        if where != "both":
            (content["dflash_config"] if where == "top" else content).pop("block_size")

    folder, out = release(config=change), tmp_path / "m.toml"
    monkeypatch.chdir(tmp_path)  # the manifest may be used from elsewhere
    answer = hstrain("import", folder.name, "--store", little.path, "--out", out, "--set", "optim.lr=1e-4", "--json")
    assert (answer.status, answer.json["manifest"]) == (0, str(out))
    assert f"hstrain fit {out} --store {little.path}" in answer.err
    manifest = load_train_manifest(out)
    assert hstrain("config", out).out == out.read_text()
    assert manifest.drafter.layer_types == ("sliding_attention", "full_attention")
    assert (manifest.drafter.start, manifest.drafter.block_size, manifest.optim.lr) == (str(folder), 4, 1e-4)
    shape = drafter_in(manifest.drafter, hscache.open(little.path), load_head(little.path / "target"))
    assert shape == little_config(taps=TAPS)
    assert answer.json["drafter"] == json.loads(json.dumps(dataclasses.asdict(shape)))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a weight that is missing": ("drafter-weights", {"weights": lambda w: w.pop("norm.weight")}),
    "a weight of another shape": (
        "drafter-shape", {"weights": lambda w: w.update({"fc.weight": torch.zeros(HIDDEN, HIDDEN)})},
    ),
    "two block sizes": ("drafter-config", {"config": lambda c: c.update(block_size=8)}),
    "causal full layers beside sliding ones": ("drafter-unsupported", {"config": lambda c: c.update(is_causal=True)}),
    "another target": ("drafter-other-target", {"config": lambda c: c.update(num_target_layers=5)}),
    "a tap that the store lacks": ("taps-invalid", {"taps": (0, 1)}),
    "what no manifest may say": ("drafter-config", {"config": lambda c: c.update(rms_norm_eps=0.0)}),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_import_refuses(hstrain: Any, little: Little, release: Callable[..., Path], tmp_path: Path, how: str) -> None:
    code, changes = REFUSED[how]
    folder = release(**changes)
    answer = hstrain("import", folder, "--store", little.path, "--out", tmp_path / "m.toml")
    assert (answer.status, answer.out, answer.code) == (2, "", code)
    assert str(folder) in answer.err
    assert not (tmp_path / "m.toml").exists()
    if code == "taps-invalid":
        assert "lacks [1]: it has [0, 2, 3]" in answer.err
        assert "hint: build a store with states.taps = [0, 1]" in answer.err


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("drafter.rope_theta=5e5", "start-other-shape"),
        ("drafter.start=elsewhere", "start-other-shape"),
        ("optim.l_r=1e-4", "manifest-unknown-key"),
        ("optim.lr", "set-syntax"),
    ],
)
def test_import_sets_what_is_not_the_drafters(
    hstrain: Any, little: Little, release: Callable[..., Path], tmp_path: Path, override: str, code: str
) -> None:
    answer = hstrain("import", release(), "--store", little.path, "--out", tmp_path / "m.toml", "--set", override)
    assert (answer.status, answer.out, answer.code) == (2, "", code)
    assert not (tmp_path / "m.toml").exists()


def test_import_wants_a_drafter_and_a_store_and_never_replaces(
    hstrain: Any, little: Little, release: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = release(), tmp_path / "m.toml"
    answer = hstrain("import", tmp_path, "--store", little.path, "--out", out)
    assert (answer.status, answer.code) == (2, "drafter-missing")
    answer = hstrain("import", folder, "--store", tmp_path, "--out", out)
    assert (answer.status, answer.code) == (2, "not-a-store")
    answer = hstrain("import", folder, "--store", little.path, "--out", tmp_path / "gone/m.toml")
    assert (answer.status, answer.code) == (3, "disk-error")
    out.write_text("mine")
    answer = hstrain("import", folder, "--store", little.path, "--out", out)
    assert (answer.status, answer.out, answer.code) == (4, "", "manifest-exists")
    assert out.read_text() == "mine"


# from an export to a run


@pytest.mark.parametrize(
    ("layout", "dtype", "precision"), [("zlab", "float32", "fp32"), ("speculators", "bfloat16", "bf16")]
)
def test_fine_tuning_begins_where_the_released_drafter_is(
    hstrain: Any, hybrid: Hybrid, sliding_run: Path, tmp_path: Path, layout: str, dtype: str, precision: str
) -> None:
    source = hybrid.run if layout == "zlab" else sliding_run
    released, toml, run, again = (tmp_path / name for name in ("released", "m.toml", "run", "again"))
    at = ("--store", hybrid.store)
    assert hstrain("export", source, *at, "--out", released, "--format", layout, "--dtype", dtype).status == 0
    sets = [f"run.precision={precision}", "data.validation=0.8", "data.max_tokens=256", "optim.max_steps=2"]
    words = [word for text in sets for word in ("--set", text)]
    answer = hstrain("import", released, *at, "--out", toml, *words, "--json")
    assert answer.status == 0
    trained, _ = load_drafter(source)
    rounded = {name: tensor.to(getattr(torch, dtype)).float() for name, tensor in trained.state_dict().items()}
    assert answer.json["weights"] == weights_digest(rounded)
    assert answer.json["drafter"] == json.loads(json.dumps(dataclasses.asdict(trained.config)))
    assert answer.json["layout"] == layout

    report = hstrain("fit", toml, *at, "--out", run, "--device", "cpu", "--json")
    assert report.status == 0
    assert f"starting from the weights of {released}" in report.err
    scoring = ("--held-out", 0.8, "--precision", precision, "--device", "cpu", "--json")
    (scored,) = hstrain("eval", released, *at, *scoring).json["rows"]
    before, *_ = metrics(run)
    assert (before["kind"], before["step"], scored["samples"]) == ("validation", 0, 5)
    assert before["tau"] == report.json["first_tau"] == scored["tau"] > 1.2
    for name in ("tau_all", "acc", "streak", "histogram", "tau_interval", "by_tag"):
        assert before[name] == scored[name], name

    start = {"path": str(released), "weights": weights_digest(rounded), "start": None}
    assert json.loads(RunPaths(run).manifest.read_bytes())["start"] == start
    tuned, facts = load_drafter(run)
    assert facts["provenance"]["start"] == start
    assert tuned.config == trained.config
    assert not torch.equal(tuned.fc.weight, rounded["fc.weight"])
    assert hstrain("export", run, *at, "--out", again).status == 0
    card = (again / "README.md").read_text()
    assert f"Fine-tuned from the drafter `{released}`, offline by hstrain" in card
    assert start["weights"] in card


def test_the_card_of_a_drafter_that_was_never_trained_here_says_so(
    hstrain: Any, little: Little, release: Callable[..., Path], tmp_path: Path
) -> None:
    assert hstrain("export", release(), "--store", little.path, "--out", tmp_path / "out").status == 0
    card = (tmp_path / "out/README.md").read_text()
    assert "which did not train it" in card
    assert "Trained offline" not in card


# drafter.start


def tuning(start: Path, **sections: dict[str, Any]) -> TrainManifest:
    sections["drafter"] = {"taps": TAPS, "start": str(start), **sections.get("drafter", {})}
    return train_manifest(**{"optim": {"max_steps": 8}, **sections})


def test_the_weights_are_taken_as_they_are(little: Little, release: Callable[..., Path]) -> None:
    folder = release()
    trainer = Trainer(tuning(folder, drafter={"logit_std": 0.25}), little.path, World.join("cpu"))
    assert trainer.begin() is not None
    for name, tensor in read_checkpoint(folder)[0].state_dict().items():
        assert torch.equal(trainer.drafter.state_dict()[name], tensor), name


def test_a_run_begins_from_a_run_and_tells_of_all_before_it(
    little: Little, release: Callable[..., Path], tmp_path: Path
) -> None:
    released, first, second = release(), tmp_path / "first", tmp_path / "second"
    report = fit(tuning(released, optim={"max_steps": 3}), little.path, first, device="cpu")
    again = fit(tuning(first, optim={"max_steps": 3}), little.path, second, device="cpu")
    assert again.first_tau == report.tau
    drafter, facts = load_drafter(first)
    start = json.loads(RunPaths(second).manifest.read_bytes())["start"]
    assert start["path"] == facts["path"] == str(last(first))
    assert start["weights"] == weights_digest(drafter.state_dict())
    assert (start["start"]["path"], start["start"]["start"]) == (str(released), None)
    assert start["start"]["weights"] != start["weights"]


def test_a_run_goes_on_bit_by_bit_when_its_start_is_gone(
    little: Little, release: Callable[..., Path], tmp_path: Path
) -> None:
    folder = release()
    one = tuning(folder)
    fit(one, little.path, tmp_path / "whole", device="cpu")
    with during_step(2, terminate), pytest.raises(BaseException, match="SIGTERM"):
        fit(one, little.path, tmp_path / "cut", device="cpu")
    start = json.loads(RunPaths(tmp_path / "cut").manifest.read_bytes())["start"]
    shutil.rmtree(folder)
    fit(one, little.path, tmp_path / "cut", device="cpu")
    assert same_checkpoint(last(tmp_path / "whole"), last(tmp_path / "cut"))
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert load_drafter(last(tmp_path / "cut"))[1]["provenance"]["start"] == start
    with pytest.raises(InputError) as caught:  # without a checkpoint it is needed
        fit(one, little.path, tmp_path / "new", device="cpu")
    assert caught.value.code == "not-a-checkpoint"
    assert not (tmp_path / "new").exists()


def test_a_run_refuses_to_go_on_from_another_start(
    little: Little, release: Callable[..., Path], tmp_path: Path
) -> None:
    folder, other, out = release(), release(seed=1), tmp_path / "run"
    with during_step(1, die), pytest.raises(Killed):
        fit(tuning(folder), little.path, out, device="cpu")
    assert RunPaths(out).steps() == []
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(ConflictError) as caught:
        fit(tuning(folder), little.path, out, device="cpu")
    assert caught.value.code == "run-other-manifest"
    assert "start.weights was" in caught.value.message
    weights.write_bytes(before)
    fit(tuning(folder), little.path, out, device="cpu")
    for another in (tuning(other), train_manifest(drafter={"taps": TAPS}, optim={"max_steps": 8})):
        with pytest.raises(ConflictError) as caught:
            fit(another, little.path, out, device="cpu")
        assert "manifest.drafter.start was" in caught.value.message


@pytest.mark.parametrize("kind", ["released", "run"])
def test_a_start_of_another_shape_is_refused_before_anything_is_written(
    hstrain: Any, little: Little, release: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    start = release()
    if kind == "run":
        start, released = tmp_path / "begun", start
        fit(tuning(released, optim={"max_steps": 1}), little.path, start, device="cpu")
    toml = tmp_path / "m.toml"
    toml.write_text(to_toml(tuning(start, drafter={"num_kv_heads": 4, "sliding_window": 8})))
    for words in (("--out", tmp_path / "run"), ("--dry-run",)):
        answer = hstrain("fit", toml, "--store", little.path, "--device", "cpu", *words)
        assert (answer.status, answer.out, answer.code) == (2, "", "start-other-shape")
        assert f"{start}: " in answer.err
        assert "num_kv_heads is 2, expected 4; sliding_window is 6, expected 8" in answer.err
    assert not (tmp_path / "run").exists()


def test_a_start_is_a_path_and_home_is_expanded(
    little: Little, release: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = release()
    monkeypatch.setenv("HOME", str(tmp_path))
    found = Trainer(tuning(Path(f"~/{folder.name}")), little.path, World.join("cpu")).begin()
    assert found is not None
    assert found["path"] == str(folder)
    with pytest.raises(ConfigError) as caught:
        check_fields({"drafter": {**SHAPE, "start": ""}}, TrainManifest, "test")
    assert caught.value.code == "manifest-value"


def test_the_digest_tells_names_shapes_types_and_values_apart() -> None:
    weights = dict(drafters.drafter("full").state_dict())
    name = "norm.weight"
    changed = [
        weights | {name: weights[name].nextafter(torch.tensor(math.inf))},
        weights | {name: weights[name].bfloat16()},
        weights | {name: weights[name][None]},
        weights | {"hidden_norm.weight": weights[name], name: weights["hidden_norm.weight"]},
    ]
    digests = {weights_digest(one) for one in (weights, *changed)}
    assert len(digests) == 5
    assert weights_digest(dict(reversed(weights.items()))) == weights_digest(weights)
