"""Manifests: what loads, what is refused and how the refusal reads, and that the resolved form loads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hscache.errors import ConfigError
from hscache.manifest import BuildManifest, load_manifest, parse_manifest, to_toml

SHIPPED = sorted((Path(__file__).parents[1] / "manifests" / "build").glob("*.toml"))
MINIMAL = """
[target]
path = "some/target"
[states]
taps = [0, 2]
[corpus]
path = "corpus.parquet"
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_text(text: str | bytes) -> Path:
        path = tmp_path / "m.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write_text


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_manifest(path, overrides)
    return caught.value


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_manifest_loads_with_declared_shape_and_explicit_taps(path: Path) -> None:
    manifest = load_manifest(path)
    assert manifest.target.shape is not None
    assert len(manifest.states.taps) == 5
    assert max(manifest.states.taps) < manifest.target.shape.num_layers  # type: ignore[operator]
    assert manifest.logits.topk == 64


def test_there_are_shipped_manifests() -> None:
    assert {path.name for path in SHIPPED} >= {"demo.toml", "smollm2-135m.toml", "qwen3.6-27b.toml"}


def test_defaults_fill_what_the_file_leaves_out(write: Any) -> None:
    manifest = load_manifest(write(MINIMAL))
    assert manifest.states.taps == (0, 2)
    assert manifest.states.final_state is True
    assert (manifest.store.codec, manifest.store.shard_bytes) == ("raw", 1 << 30)


@pytest.mark.parametrize(
    ("override", "key", "nearest"),
    [
        ("target.revison=x", "target.revison", "target.revision"),
        ("target.shape.num_layer=3", "target.shape.num_layer", "target.shape.num_layers"),
        ("states.tap=1", "states.tap", "states.taps"),
        ("logits.top_k=8", "logits.top_k", "logits.topk"),
        ("corpus.pth=x", "corpus.pth", "corpus.path"),
        ("limits.batch_token=1", "limits.batch_token", "limits.batch_tokens"),
        ("store.shard_byte=1", "store.shard_byte", "store.shard_bytes"),
        ("limit.max_tokens=1", "limit", "limits"),
    ],
)
def test_unknown_key_is_refused_with_its_path_and_the_nearest_name(
    write: Any, override: str, key: str, nearest: str
) -> None:
    error = refusal(write(MINIMAL), override)
    assert error.code == "manifest-unknown-key"
    assert f"unknown key {key}" in error.message
    assert error.hint == f"did you mean {nearest}?"


def test_unknown_key_without_a_near_name_points_to_the_readme(write: Any) -> None:
    error = refusal(write(MINIMAL), "zzzzqqqq=1")
    assert error.code == "manifest-unknown-key"
    assert error.hint == "see manifests/README.md"


def test_an_unknown_key_is_reported_before_the_missing_key_that_it_was_meant_for(write: Any) -> None:
    error = refusal(write(MINIMAL.replace("taps =", "tapps =")))
    assert "unknown key states.tapps" in error.message
    assert error.hint == "did you mean states.taps?"


@pytest.mark.parametrize("section", ["target", "states", "corpus"])
def test_missing_section_is_named(write: Any, section: str) -> None:
    kept = [part for part in MINIMAL.strip().split("[") if part and not part.startswith(section)]
    # the taps value holds a bracket too: put the pieces together as they were
    text = "[" + "[".join(kept) if section != "states" else MINIMAL.replace("[states]\ntaps = [0, 2]\n", "")
    error = refusal(write(text))
    assert (error.code, section in error.message) == ("manifest-value", True)


WHOLE_NUMBERS = (
    *(f"target.shape.{name}" for name in ("num_layers", "hidden_size", "vocab_size")),
    *(f"limits.{name}" for name in ("max_tokens", "min_loss_tokens", "batch_tokens")),
    "logits.topk",
    "store.chunk_tokens",
    "store.shard_bytes",
)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ('limits.max_tokens="4096"', "limits.max_tokens"),
        ("limits.max_tokens=true", "limits.max_tokens"),
        ("limits.max_tokens=4096.0", "limits.max_tokens"),
        ("limits.max_tokens=1", "limits.max_tokens"),
        ("limits.batch_tokens=0", "limits.batch_tokens"),
        ("limits.min_loss_tokens=0", "limits.min_loss_tokens"),
        ("logits.topk=-1", "logits.topk"),
        ("logits.topk=1e2", "logits.topk"),
        ("states.final_state=1", "states.final_state"),
        ('states.final_state="true"', "states.final_state"),
        ("states.taps=[]", "states.taps"),
        ("states.taps=[1.0]", "states.taps"),
        ("states.taps=[true]", "states.taps"),
        ("states.taps=[-1]", "states.taps"),
        ("states.taps=3", "states.taps"),
        ('states.taps="all"', "states.taps"),
        ("target.path=7", "target.path"),
        ("target.dtype=float16", "target.dtype"),
        ("target.shape.hidden_size=0", "target.shape.hidden_size"),
        ("target=7", "target"),
        ("store.codec=gzip", "store.codec"),
        ("store.chunk_tokens=6e-4", "store.chunk_tokens"),
        ("store.shard_bytes=-1", "store.shard_bytes"),
        ("store.shard_bytes=0", "store.shard_bytes"),
        ('store.shard_bytes="0"', "store.shard_bytes"),
        ('store.shard_bytes="0MB"', "store.shard_bytes"),
        ('store.shard_bytes="-1GiB"', "store.shard_bytes"),
        ('store.shard_bytes="1 GiB or so"', "store.shard_bytes"),
        ("store.shard_bytes=1.5", "store.shard_bytes"),
        ("store.shard_bytes=true", "store.shard_bytes"),
        *((f"{key}={'9' * digits}", key) for digits in (27, 5000) for key in WHOLE_NUMBERS),
        (f"states.taps=[{'9' * 27}]", "states.taps"),
        ("store.shard_bytes=" + "9" * 400 + "TiB", "store.shard_bytes"),
    ],
)
def test_wrong_type_or_range_is_refused_with_the_key_path(write: Any, override: str, key: str) -> None:
    shaped = "[target.shape]\nnum_layers = 4\nhidden_size = 8\nvocab_size = 16\n"
    error = refusal(write(MINIMAL + shaped), override)
    assert error.code == "manifest-value"
    assert key in error.message
    assert "got" in error.message


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ('"1GiB"', 1 << 30),
        ('"16MB"', 16_000_000),
        ('"16 MiB"', 16 << 20),
        ('"1.5KiB"', 1536),
        ('"7B"', 7),
        ("4096", 4096),
        ('"2TB"', 2 * 10**12),
    ],
)
def test_sizes_are_read_with_units(write: Any, text: str, n_bytes: int) -> None:
    assert load_manifest(write(MINIMAL), [f"store.shard_bytes={text}"]).store.shard_bytes == n_bytes


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("limits.max_tokens=17", "limits", "max_tokens", 17),
        ("corpus.path=runs/my corpus.parquet", "corpus", "path", "runs/my corpus.parquet"),
        ('corpus.path="a=b"', "corpus", "path", "a=b"),
        ("corpus.path=a=b", "corpus", "path", "a=b"),
        ("states.taps=[1, 3]", "states", "taps", (1, 3)),
        ("states.taps=default", "states", "taps", "default"),
        ("store.shard_bytes=16MiB", "store", "shard_bytes", 16 << 20),
        (" logits.topk =0", "logits", "topk", 0),
    ],
)
def test_set_takes_a_toml_value_or_a_plain_string(
    write: Any, override: str, section: str, key: str, value: object
) -> None:
    assert getattr(getattr(load_manifest(write(MINIMAL), [override]), section), key) == value


def test_set_reaches_nested_keys_and_the_last_one_wins(write: Any) -> None:
    shape = [f"target.shape.{key}={n}" for key, n in (("num_layers", 2), ("hidden_size", 8), ("vocab_size", 16))]
    manifest = load_manifest(write(MINIMAL), [*shape, "target.shape.vocab_size=32"])
    assert manifest.target.shape is not None
    assert manifest.target.shape.model_dump() == {"num_layers": 2, "hidden_size": 8, "vocab_size": 32}


@pytest.mark.parametrize("override", ["limits.max_tokens", "", "=1", "limits.=1", ".x=1", "a..b=1"])
def test_set_without_key_and_value_is_refused(write: Any, override: str) -> None:
    error = refusal(write(MINIMAL), override)
    assert (error.code, error.hint) == ("set-syntax", "--set limits.max_tokens=2048")


def test_set_below_a_value_is_refused(write: Any) -> None:
    error = refusal(write(MINIMAL), "target.path.x=1")
    assert error.code == "manifest-unknown-key"
    assert "path is not a section" in error.message


@pytest.mark.parametrize("content", ["[target", b"\xff\xfe\x00", "a = 1\na = 2", "x = 1979-99-99", "x = " + "9" * 5000])
def test_a_file_that_is_not_toml_is_refused(write: Any, content: str | bytes) -> None:
    assert refusal(write(content)).code == "manifest-syntax"


def test_a_path_without_a_manifest_is_refused(tmp_path: Path, write: Any) -> None:
    file = write(MINIMAL)
    for path in (tmp_path / "nothing.toml", tmp_path, file / "below-a-file.toml"):
        assert refusal(path).code == "manifest-missing"


def test_manifest_is_frozen(write: Any) -> None:
    manifest = load_manifest(write(MINIMAL))
    with pytest.raises(ValidationError):
        manifest.limits.max_tokens = 1
    with pytest.raises(ValidationError):
        manifest.limits = manifest.limits


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_resolved_form_of_a_shipped_manifest_loads_again(path: Path, write: Any) -> None:
    manifest = load_manifest(path)
    assert load_manifest(write(to_toml(manifest))) == manifest


positive = st.integers(1, (1 << 31) - 1)
text = st.text(st.characters(exclude_categories=["Cs"]))
manifests = st.fixed_dictionaries(
    {
        "target": st.fixed_dictionaries(
            {"path": text, "attn_implementation": text, "dtype": st.sampled_from(["bfloat16", "float32"])},
            optional={
                "revision": text,
                "shape": st.fixed_dictionaries(
                    {"num_layers": positive, "hidden_size": positive, "vocab_size": positive}
                ),
            },
        ),
        "states": st.fixed_dictionaries(
            {
                "taps": st.just("default") | st.lists(st.integers(0, (1 << 31) - 1), min_size=1, max_size=6),
                "final_state": st.booleans(),
            }
        ),
        "corpus": st.fixed_dictionaries({"path": text}),
    },
    optional={
        "logits": st.fixed_dictionaries({"topk": st.integers(0, (1 << 31) - 1)}),
        "limits": st.fixed_dictionaries({"max_tokens": st.integers(2, (1 << 31) - 1), "batch_tokens": positive}),
        "store": st.fixed_dictionaries(
            {
                "codec": st.sampled_from(["raw", "lz4", "zstd", "int8", "int4"]),
                "shard_bytes": positive,
                "chunk_tokens": positive,
            }
        ),
    },
)


@given(manifests)
def test_resolved_form_loads_again_whatever_the_strings_hold(
    tmp_path_factory: pytest.TempPathFactory, raw: dict[str, Any]
) -> None:
    manifest = parse_manifest(raw, "generated")
    path = tmp_path_factory.getbasetemp() / "resolved.toml"
    path.write_text(to_toml(manifest), encoding="utf-8")
    assert load_manifest(path) == manifest
    assert isinstance(manifest, BuildManifest)
