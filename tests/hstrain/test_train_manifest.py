"""Training manifests: what is shipped loads, what is wrong is refused by name, and every field is explained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hstrain.manifest import (
    DataSpec,
    DrafterSpec,
    OptimSpec,
    RunSpec,
    TrainManifest,
    drafter_config,
    load_train_manifest,
)
from pydantic import BaseModel, ValidationError

from hscache.errors import ConfigError
from hscache.manifest import BuildManifest, load_manifest, to_toml
from tests.made.trainers import SHAPE, little_config, train_manifest, write_manifest

ROOT = Path(__file__).parents[2] / "manifests"
SHIPPED = sorted((ROOT / "train").glob("*.toml"))


WHOLE_NUMBERS = [
    f"{section}.{name}"
    for section, model in (("drafter", DrafterSpec), ("data", DataSpec), ("optim", OptimSpec), ("run", RunSpec))
    for name, field in model.model_fields.items()
    if field.annotation is int or "int" in str(field.annotation)
    if name not in ("taps", "seed")
]


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_train_manifest(path, overrides)
    return caught.value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_manifest(tmp_path / "m.toml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_manifest_loads_and_fits_the_build_manifest_of_its_name(path: Path) -> None:
    manifest = load_train_manifest(path)
    build = load_manifest(ROOT / "build" / path.name)  # its store is what the manifest's first line names
    assert build.target.shape is not None
    assert isinstance(build.states.taps, tuple)
    shape = build.target.shape
    config = drafter_config(
        manifest.drafter,
        taps=build.states.taps,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
    )
    assert config.taps == build.states.taps


def test_there_are_shipped_manifests() -> None:
    assert {path.name for path in SHIPPED} >= {"demo.toml", "smollm2-135m.toml", "qwen3.6-27b.toml"}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_resolved_form_loads_again(path: Path, tmp_path: Path) -> None:
    manifest = load_train_manifest(path)
    (tmp_path / "resolved.toml").write_text(to_toml(manifest))
    assert load_train_manifest(tmp_path / "resolved.toml") == manifest


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("optim.learning_rate=1", "optim.learning_rate", None),
        ("optim.l_r=1e-3", "optim.l_r", "optim.lr"),
        ("drafter.block=8", "drafter.block", "drafter.block_size"),
        ("drafter.mask_token=8", "drafter.mask_token", "drafter.mask_token_id"),
        ("data.pack_token=8", "data.pack_token", "data.pack_tokens"),
        ("loss.kinds=ce", "loss.kinds", "loss.kind"),
        ("run.checkpoint_evry=8", "run.checkpoint_evry", "run.checkpoint_every"),
        ("optimizer.lr=1", "optimizer", "optim"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_name(file: Path, override: str, key: str, nearest: str | None) -> None:
    error = refusal(file, override)
    assert error.code == "manifest-unknown-key"
    assert f"unknown key {key}" in error.message
    if nearest:
        assert error.hint == f"did you mean {nearest}?"


@pytest.mark.parametrize(
    ("override", "value"),
    [("optim.lr=6e-4", 6e-4), ("optim.lr=1", 1.0), ("optim.lr=0.5", 0.5), ("drafter.rope_theta=10000000", 1e7)],
)
def test_numbers_may_be_written_whole(file: Path, override: str, value: float) -> None:
    section, key = override.split("=")[0].split(".")
    got = getattr(getattr(load_train_manifest(file, [override]), section), key)
    assert got == value
    assert isinstance(got, float)


@pytest.mark.parametrize(
    "override",
    [
        'optim.lr="6e-4"',
        "optim.lr=0",
        "optim.lr=-1e-3",
        "optim.lr=nan",
        "optim.lr=inf",
        "optim.lr=true",
        "optim.epochs=1.5",
        "optim.epochs=0",
        'optim.epochs="6"',
        "optim.name=sgd",
        "optim.schedule=step",
        "optim.warmup=1",
        "optim.warmup=-0.1",
        "optim.clip=0",
        "optim.max_steps=0",
        "data.validation=1.0",
        "data.test=-0.1",
        "data.test=0.95",
        "data.max_tokens=1",
        "data.noise=-0.1",
        "data.anchors=0",
        "data.max_bad_samples=-1",
        "loss.kind=mse",
        "loss.weights=linear",
        "loss.gamma=0",
        "run.precision=fp16",
        "run.parallel=tp",
        "run.seed=0.5",
        "run.gradient_checkpointing=1",
        "run.keep=0",
        "drafter.block_size=1",
        "drafter.head_dim=5",
        "drafter.layer_types=[]",
        'drafter.layer_types=["linear_attention"]',
        "drafter.mask_token_id=-1",
        "drafter.taps=[]",
        "drafter.logit_std=-1",
        "drafter.sliding_window=0",
        "run.seed=99999999999999999999",
        "run.seed=-99999999999999999999",
        "data.max_tokens=2",
        *(f"{name}=99999999999999999999" for name in WHOLE_NUMBERS),
    ],
)
def test_wrong_type_or_range_is_refused_with_the_key(file: Path, override: str) -> None:
    error = refusal(file, override)
    assert error.code == "manifest-value"
    assert override.split("=")[0] in error.message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["drafter.num_kv_heads=3"], "drafter.num_heads: not a multiple of drafter.num_kv_heads"),
        (["optim.name=muon", "run.parallel=fsdp"], "muon needs whole matrices"),
    ],
)
def test_fields_that_contradict_are_refused(file: Path, overrides: list[str], said: str) -> None:
    error = refusal(file, *overrides)
    assert (error.code, said in error.message) == ("manifest-value", True)


def test_sliding_layers_need_a_window(tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "m.toml", drafter={"sliding_window": None})
    assert "drafter.sliding_window: needed by sliding layers" in refusal(path).message
    load_train_manifest(path, ['drafter.layer_types=["full_attention"]'])


def test_taps_and_mask_token_are_those_of_the_target() -> None:
    def shape(**fields: Any) -> Any:
        return drafter_config(
            DrafterSpec(**{**SHAPE, **fields}), taps=(0, 2, 3), hidden_size=8, vocab_size=32, num_layers=4
        )

    assert shape().taps == (0, 2, 3)
    assert shape(taps=(0, 3)).taps == (0, 3)
    with pytest.raises(ConfigError) as caught:
        shape(taps=(0, 1))
    assert caught.value.code == "taps-invalid"
    with pytest.raises(ConfigError) as caught:
        shape(mask_token_id=32)
    assert caught.value.code == "manifest-value"


@pytest.mark.parametrize("taps", [(3, 0), (0, 2, 2)])
def test_taps_out_of_order_or_twice_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        little_config(taps=taps)
    assert caught.value.code == "taps-invalid"


def test_gamma_follows_the_block_size_unless_it_is_given() -> None:
    assert train_manifest(drafter={"block_size": 16}).gamma == 7.0
    assert train_manifest(drafter={"block_size": 16}, loss={"gamma": 2}).gamma == 2.0


def test_manifest_is_frozen() -> None:
    manifest = train_manifest()
    with pytest.raises(ValidationError):
        manifest.optim.lr = 1.0


# manifests/README.md


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key path of a manifest with its field."""
    for name, field in model.model_fields.items():
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
        sections = [t for t in inner if issubclass(t, BaseModel)]
        if sections:
            yield from fields(sections[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def documented(heading: str) -> dict[str, tuple[str, str]]:
    """Return key -> type with default, and meaning, of the table under a heading of the README."""
    part = (ROOT / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines() if line.startswith("| `")]
    return {key: (type_.strip(), text.strip()) for keys, type_, text in rows for key in re.findall(r"`([^`]+)`", keys)}


@pytest.mark.parametrize(
    ("model", "heading"),
    [(BuildManifest, "Fields of a build manifest"), (TrainManifest, "Fields of a training manifest")],
)
def test_every_field_is_explained_with_its_default(model: type[BaseModel], heading: str) -> None:
    table, known = documented(heading), dict(fields(model))
    assert table.keys() == known.keys()
    for key, (type_, text) in table.items():
        field = known[key]
        assert len(text) > 10, key
        default = field.default
        if field.is_required():
            assert "," not in type_ or " or " in type_ or key.startswith("target.shape."), f"{key} has no default"
        elif isinstance(default, bool):
            assert type_.endswith(f", {str(default).lower()}"), key
        elif isinstance(default, int | float) and default != 1 << 30:
            said = float(type_.rsplit(", ", 1)[1])
            assert said == default, key
        elif isinstance(default, str):
            assert type_.rsplit(", ", 1)[1].strip('`"') == default, key
        elif default is None:
            assert type_.endswith((", none", "as stored", "by block size")), key
