"""The lossy codecs: what decoding gives, how far it may be off, and that nothing missing looks like a number."""

from __future__ import annotations

import base64
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hscache
from hscache.audit import compare
from hscache.audit.verify import verify
from hscache.build.run import build
from hscache.errors import ConfigError
from hscache.health import RowStats, find_fault, may_be_faulty, reduce_rows
from hscache.manifest import parse_manifest
from hscache.store import lossy
from hscache.store.index import read_shard
from hscache.store.layout import StorePaths
from hscache.store.reader import bf16_to_float32
from tests.conftest import DATA, TINY_HYBRID
from tests.made.stores import little_manifest, make_store

FORMAT = Path(__file__).parents[2] / "hscache/store/FORMAT.md"
WIDTHS = (1, 2, 3, 5, 8, 20, 63, 64, 100, 128, 192, 256, 576)
codecs = pytest.mark.parametrize("name", lossy.NAMES)


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def through(states: torch.Tensor, name: str) -> torch.Tensor:
    scheme = lossy.scheme(name, states.shape[-1])
    return lossy.decode(*lossy.encode(states, scheme), scheme)


def by_the_page(codes: NDArray[Any], scales: NDArray[Any], c: dict[str, Any]) -> NDArray[np.float32]:
    """Decode with numpy and the array's attribute alone, by the lines that the format page shows."""
    (block,) = [part for part in FORMAT.read_text().split("```python") if "np.kron" in part]
    code = "bf16 = " + block.split("```")[0].split("bf16 = ", 1)[1]
    names: dict[str, Any] = {"codes": codes, "scales": scales, "c": c, "np": np, "functools": functools}
    exec(code, names)
    states: NDArray[np.float32] = names["states"]
    return states


def step_of(scales: torch.Tensor) -> torch.Tensor:
    return scales[..., :1].view(torch.bfloat16).float()


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """State vectors of any width: zeros, subnormals, huge outliers, repeated values."""
    width, rows = draw(st.sampled_from(WIDTHS)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    x = rng.standard_normal((rows, width)) * 10.0 ** draw(st.integers(-45, 15))
    x *= rng.random((rows, width)) < draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    for _ in range(draw(st.integers(0, 3))):
        x[rng.integers(rows), rng.integers(width)] = draw(st.sampled_from([1e-42, 3.0, -7.5e4, 1e18, -1e18]))
    return torch.from_numpy(x.astype(np.float32)).bfloat16()


@codecs
@given(states=vectors())
def test_any_vector_comes_back_within_its_step(name: str, states: torch.Tensor) -> None:
    scheme = lossy.scheme(name, states.shape[-1])
    codes, scales = lossy.encode(states, scheme)
    assert (codes.shape, scales.shape) == ((len(states), scheme.code_bytes), (len(states), scheme.columns))
    back, x, step = lossy.decode(codes, scales, scheme).float(), states.float(), step_of(scales)
    assert back.isfinite().all()
    # rounding moves a number by half at most; int4's clip may cut up to 0.3 of the largest one
    numbers = 0.51 if name == "int8" else 0.5 + 0.45 * scheme.largest
    rounding = torch.linalg.vector_norm(2.0**-8 * back.abs() + 1e-37, dim=-1, keepdim=True)
    bound = numbers * step * (scheme.hidden_size * scheme.block) ** 0.5 + rounding
    assert (torch.linalg.vector_norm(back - x, dim=-1, keepdim=True) <= bound).all()
    largest = x.abs().topk(scheme.kept, dim=-1).values[:, -1:]
    assert torch.equal(back[x.abs() > largest], x[x.abs() > largest]), "the kept elements are exact"
    assert not back[(x == 0).all(-1)].any()


@codecs
@given(states=vectors())
def test_a_program_with_numpy_alone_decodes_the_same_bits(name: str, states: torch.Tensor) -> None:
    scheme = lossy.scheme(name, states.shape[-1])
    codes, scales = lossy.encode(states, scheme)
    by_hand = by_the_page(codes.numpy(), scales.numpy().view(np.uint16), scheme.attributes())
    assert torch.equal(torch.from_numpy(by_hand).bfloat16(), lossy.decode(codes, scales, scheme))


@codecs
def test_codes_do_not_depend_on_the_batch(name: str) -> None:
    states = bf16(300, 5, 576) * torch.logspace(-3, 3, 300)[:, None, None].bfloat16()
    scheme = lossy.scheme(name, 576)
    codes, scales = lossy.encode(states, scheme)
    for part in (slice(0, 1), slice(7, 8), slice(100, 263)):
        alone = lossy.encode(states[part], scheme)
        assert torch.equal(alone[0], codes[part])
        assert torch.equal(alone[1], scales[part])
    assert torch.equal(lossy.decode(codes[7:9, 2], scales[7:9, 2], scheme), lossy.decode(codes, scales, scheme)[7:9, 2])


@codecs
def test_decoding_is_exact_inside_autocast_and_with_reduced_precision(name: str) -> None:
    scheme = lossy.scheme(name, 576)
    codes, scales = lossy.encode(bf16(20, 576), scheme)
    plain, before = lossy.decode(codes, scales, scheme), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(lossy.decode(codes, scales, scheme), plain)
    finally:
        torch.set_float32_matmul_precision(before)


@codecs
@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_missing_decodes_to_nan(name: str, width: int) -> None:
    scheme = lossy.scheme(name, width)
    codes, scales = lossy.encode(bf16(4, width), scheme)
    nan = torch.tensor(0x7FC0, dtype=torch.int16)
    assert lossy.decode(torch.zeros_like(codes), scales, scheme).isnan().all()
    assert lossy.decode(codes, nan.expand_as(scales).contiguous(), scheme).isnan().all()
    codes[1, -1] = 0  # one byte is enough to give up its row, and only that
    assert lossy.decode(codes, scales, scheme).isnan().all(-1).tolist() == [False, True, False, False]
    scales[2, 1] = width
    assert lossy.decode(codes, scales, scheme).isnan().all(-1).tolist() == [False, True, True, False]


@codecs
def test_states_that_are_not_finite_do_not_become_numbers(name: str) -> None:
    states = bf16(3, 256)
    states[0, 5], states[1, ::7], states[2, :9] = torch.inf, torch.nan, 3e38
    back = through(states, name)
    assert back[0, 5] == torch.inf
    assert back[1].isnan().all()
    assert not (back[2].isfinite() & (back[2].abs() < 1e37)).all()


@codecs
@pytest.mark.parametrize("width", [256, 576, 5120])
def test_it_is_as_small_as_promised(name: str, width: int) -> None:
    scheme = lossy.scheme(name, width)
    stored = scheme.code_bytes + 2 * scheme.columns
    assert 2 * width / stored >= {"int8": 1.9, "int4": 3.8}[name]


@codecs
def test_massive_activations_do_not_drown_the_other_channels(name: str) -> None:
    """The first token of many models: a channel ten thousand times the median, a few a hundred times."""
    states = bf16(64, 576, scale=50)
    states[:, 507], states[:, 247], states[:, 14] = 24832, 1848, 920
    back = through(states, name)
    rest = torch.ones(576, dtype=torch.bool)
    rest[[507, 247, 14]] = False
    error = (back - states).float()[:, rest].norm() / states.float()[:, rest].norm()
    assert error < {"int8": 0.012, "int4": 0.4}[name]


def test_the_transform_is_the_one_of_the_format() -> None:
    """Codes and scales of fixed vectors, as the first version wrote them: old stores must stay readable."""
    states = bf16(2, 128, seed=7)
    states[0, 3], states[1, 100] = 900, -0.0
    for name, golden in GOLDEN.items():
        scheme = lossy.scheme(name, 128)
        codes, scales = lossy.encode(states, scheme)
        packed = codes.numpy().tobytes() + scales.numpy().astype("<i2").tobytes()
        assert base64.b85encode(packed).decode() == golden


def test_the_attribute_says_all() -> None:
    assert lossy.scheme("int8", 576).attributes() == {
        "name": "int8", "version": 1, "bits": 8, "hidden_size": 576, "block": 64, "kept": 4,
        "signs": [1 if bit == "0" else -1 for bit in f"{0x753225895A4F7C5F:064b}"[::-1]],
    }  # fmt: skip
    assert [lossy.scheme("int4", width).block for width in (1, 6, 20, 576, 5120)] == [1, 2, 4, 64, 64]


def measured(codes: torch.Tensor, scales: torch.Tensor, name: str, width: int) -> Any:
    bits = scales.numpy().view(np.uint16)
    return lossy.measure_codes(codes.numpy(), bits, lossy.scheme(name, width))


@codecs
@pytest.mark.parametrize("width", [64, 576, 5120])
def test_codes_give_the_sizes_of_the_decoded_vectors(name: str, width: int) -> None:
    states = bf16(90, 3, width, scale=3.0)
    states[0, :, 7] = 3000.0
    scheme = lossy.scheme(name, width)
    codes, scales = lossy.encode(states, scheme)
    square, largest = measured(codes, scales, name, width)
    slow = RowStats.join(reduce_rows(lossy.decode(codes, scales, scheme)))
    np.testing.assert_allclose(square, slow.square, rtol=3e-3 if name == "int8" else 1e-2)
    np.testing.assert_array_equal(largest, states.float().abs().amax(-1).numpy())


FAULTS: dict[str, Any] = {
    "a code is missing": lambda codes, scales, kept: codes[3, 1].__setitem__(2, 0),
    "the step is missing": lambda codes, scales, kept: scales[3, 1].__setitem__(0, 0x7FC0),
    "a kept element is infinite": lambda codes, scales, kept: scales[3, 1].__setitem__(1 + kept, 0x7F80),
    "a channel is out of range": lambda codes, scales, kept: scales[3, 1].__setitem__(1, 0x7FC0),
    "scales were never written": lambda codes, scales, kept: scales.fill_(0x7FC0),
}


@codecs
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_does_not_decode_to_numbers_shows_in_the_codes(name: str, fault: str) -> None:
    scheme = lossy.scheme(name, 576)
    codes, scales = lossy.encode(bf16(12, 3, 576), scheme)
    assert not signs(codes, scales, name)
    FAULTS[fault](codes, scales, scheme.kept)
    assert not lossy.decode(codes, scales, scheme).isfinite().all()
    assert signs(codes, scales, name)


@codecs
@pytest.mark.parametrize("fault", ["zero tap", "zero row", "constant tap", "twin taps"])
def test_what_the_health_battery_finds_shows_in_the_codes(name: str, fault: str) -> None:
    states = bf16(12, 3, 576)
    if fault == "zero tap":
        states[:, 1] = 0
    elif fault == "constant tap":
        states[:, 1] = states[0, 1].clone()
    elif fault == "twin taps":
        states[:, 1] = states[:, 0].clone()
    else:
        states[3, 1] = 0
    codes, scales = lossy.encode(states, lossy.scheme(name, 576))
    assert find_fault(RowStats.join(reduce_rows(through(states, name))), (0, 1, 2))[0]
    assert signs(codes, scales, name)


def signs(codes: torch.Tensor, scales: torch.Tensor, name: str) -> bool:
    square, largest = measured(codes, scales, name, 576)
    return may_be_faulty(square, largest, 3)


@pytest.mark.parametrize(("name", "width"), [("int6", 64), ("raw", 64), ("int8", 1 << 15)])
def test_what_has_no_scheme_is_refused(name: str, width: int) -> None:
    with pytest.raises(ConfigError) as caught:
        lossy.scheme(name, width)
    assert caught.value.code == "codec-unknown"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trained hybrid's states, built with each codec."""
    out = {}
    for codec in ("raw", *lossy.NAMES):
        raw = {
            "target": {"path": str(TINY_HYBRID), "dtype": "float32"},
            "states": {"taps": [1, 4, 7]},
            "corpus": {"path": str(DATA / "tiny-hybrid-completions.parquet")},
            "limits": {"batch_tokens": 2048},
            "store": {"codec": codec, "shard_bytes": "4MiB"},
        }
        out[codec] = tmp_path_factory.mktemp("lossy") / codec
        build(parse_manifest(raw, "test"), out[codec])
    return out


@codecs
def test_a_built_store_is_within_the_bounds_it_records(stores: dict[str, Path], name: str) -> None:
    raw, packed = hscache.open(stores["raw"]), hscache.open(stores[name])
    worst, square, power = 1.0, 0.0, torch.zeros(4, 256)
    for sample in raw:
        other = packed[packed.index_of(sample.sample_id)]
        x, y = (torch.cat([s.hidden_states, s.final_state[:, None]], 1).float() for s in (sample, other))
        worst = min(worst, float(torch.cosine_similarity(x.double(), y.double(), dim=-1).min()))
        power += x.square().sum(0)
        assert torch.equal(sample.logits.ids, other.logits.ids)
    rms = (power / int(raw.n_tokens.sum())).sqrt()
    for sample in raw:
        other = packed[packed.index_of(sample.sample_id)]
        x, y = (torch.cat([s.hidden_states, s.final_state[:, None]], 1).float() for s in (sample, other))
        square += float(((y - x) / rms).square().sum())
    channel = (square / (int(raw.n_tokens.sum()) * 4 * 256)) ** 0.5
    assert worst >= lossy.WORST_COSINE[name]
    assert channel < {"int8": 0.017, "int4": 0.13}[name]
    records = [read_shard(path.parent)["health"]["codec"] for path in stores[name].glob("shards/*/zarr.json")]
    assert min(min(record["worst_cosine"]) for record in records) == pytest.approx(worst, abs=1e-6)
    assert all(record["kl_rows"] > 10 and 0 < record["kl_nats"] < 0.02 for record in records)
    for record in records:
        assert all(mean < p99 for mean, p99 in zip(record["rel_l2"], record["rel_l2_p99"], strict=True))
    assert verify(stores[name]).findings == []


@codecs
def test_plain_zarr_and_the_lines_of_the_format_page_read_a_shard(stores: dict[str, Path], name: str) -> None:
    store = hscache.open(stores[name])
    group: Any = zarr.open_group(str(StorePaths(store.path).shard(0)), mode="r")
    first = read_shard(StorePaths(store.path).shard(0))["samples"]
    sample = store[store.index_of(first["sample_id"][0])]
    n = first["n_tokens"][0]
    for array, states in (("hidden_states", sample.hidden_states), ("final_state", sample.final_state)):
        by_hand = by_the_page(group[array][:n], group[f"{array}_scales"][:n], group[array].attrs["codec"])
        assert torch.equal(torch.from_numpy(by_hand).bfloat16(), states)


@codecs
def test_a_token_range_and_taps_of_a_lossy_store(stores: dict[str, Path], name: str) -> None:
    store = hscache.open(stores[name])
    whole, part = store[2], store.sample(2, start=5, stop=40, taps=[7, 1], verify=True)
    assert torch.equal(part.hidden_states, whole.hidden_states[5:40][:, [2, 0]])
    assert torch.equal(part.final_state, whole.final_state[5:40])
    floats, bits = (store.sample(2, kind=kind) for kind in ("numpy", "bits"))  # type: ignore[arg-type]
    assert np.array_equal(floats.hidden_states, whole.hidden_states.float().numpy())
    assert np.array_equal(bf16_to_float32(bits.final_state), floats.final_state)


@codecs
def test_recomputed_states_go_through_the_codec_too(stores: dict[str, Path], name: str) -> None:
    store = hscache.open(stores[name])
    again = compare.recompute(store, 2)
    assert compare.fault(again) == ""
    assert min(tap.equal for tap in again.taps) > 0.999
    apart = compare.against(hscache.open(stores["raw"]), store, 4)
    assert compare.fault(apart, name) == ""
    assert max(tap.equal for tap in apart.taps) < 0.5


@codecs
@settings(max_examples=10)
@given(part=st.sampled_from(["hidden_states", "hidden_states_scales", "final_state_scales"]), at=st.integers(0, 10**6))
def test_a_flipped_byte_is_never_read_in_silence(
    tmp_path_factory: pytest.TempPathFactory, name: str, part: str, at: int
) -> None:
    root = make_store(tmp_path_factory.mktemp("flip") / "s", manifest=little_manifest(store={"codec": name})).path
    path = next((root / "shards/00000.zarr" / part).glob("c.*"))
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)
    assert not verify(root).ok


GOLDEN = {
    "int8": (
        "i<$45G=8&qiH^s)dWcVPaidj{!?wnIM5JjsN@Q_!iG_T(!AW2LQBRpto0P%Pk%bgxeYROuzm3L?N*Hat<Borgt6zT{L9vIgj-P~^"
        "ij;sqo)B83d9!tlk)D54Ii#GrH>J2~a<GlI(}9|Xgq2@nI8c*mbf9KHQB+c7%$Q@K5>K3#aARDkk1I+-eAg{`Z^L%WPoS4?Sp$`C"
        "WR-TRrdyM%eU-V7bpm0Yy>yc|Kbe=PY;hDM?tR3bHGnxZnro>gwA?p!v0Z$enxRN`Yqz_Lt$>e9o|%4gMNgbEpi*{cz?pt!x#EH4"
        "Ij%WqIB9{mbkCr{ZJOm{Cp!ZGVMGf%RRBT2"
    ),
    "int4": (
        ">6(w4vuKMLNx6-@n5l)Qmzsr1tQ>8qgt~T<l%|JQIjE@2Jfy~db+wwc+KH@<iI`z#I9ruve5q|oRZ&-LJ&HCup>?_`x8^o`xnhK*"
        "sIEhJcg)9~wThZorJ;#;Mp>sjs#bYx$f=BJ$Ki(hJhwSxG<u24ch{l9f2jOwAw2^CVMGQ!RRBT2"
    ),
}
