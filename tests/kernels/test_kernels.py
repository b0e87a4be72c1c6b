"""Kernel paths of loaded models: found, counted, forced, guarded, compared; fake packages stand for the real ones."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_targets
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from hscache.audit.doctor import diagnose, render
from hscache.errors import ConfigError, EnvironmentFault
from hscache.kernels.compare import LIMITS, _Sums, compare_local, first_divergence, measures_beyond
from hscache.kernels.guards import environment, fla_backends, fla_breaks_grouped_heads
from hscache.kernels.observe import observe_kernels, planned_records
from hscache.kernels.path import check_calls, describe_path, is_fallback, kernel_path_id
from hscache.kernels.sites import KernelRecord, find_sites
from tests.made.fakes import CONV, WRONG_HEADS, fake, fake_fla, fla_source, run_python

GDN_LAYERS = [0, 1, 2, 4, 5, 6]
IDS = torch.arange(2 * 70).reshape(2, 70) % 500


@pytest.fixture(scope="module")
def hybrid() -> nn.Module:
    return tiny_targets.qwen3_5()


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("targets")

    def target(kind: str) -> Path:
        return root / kind if (root / kind).exists() else tiny_targets.save(kind, root / kind)

    return target


def forward(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def calls(records: list[KernelRecord], op: str) -> dict[int | None, int]:
    return {record.layer_index: record.calls for record in records if record.op == op}


# --- observing


def test_without_packages_torch_runs_once_per_layer_and_forward(hybrid: nn.Module) -> None:
    with observe_kernels(hybrid) as observed:
        forward(hybrid)
        forward(hybrid)
    records = observed.records()
    for op in ("chunk_gated_delta_rule", "causal_conv1d_fn"):
        assert calls(records, op) == dict.fromkeys(GDN_LAYERS, 2)
    for op in ("fused_recurrent_gated_delta_rule", "causal_conv1d_update"):
        assert calls(records, op) == dict.fromkeys(GDN_LAYERS, 0)
    assert {record.implementation for record in records} == {"torch"}
    chunk = next(record for record in records if record.op == "chunk_gated_delta_rule")
    assert chunk.layer == "layers.0.linear_attn"
    assert chunk.wiring == "closure"
    assert chunk.source == "transformers.models.qwen3_5.modeling_qwen3_5:torch_chunk_gated_delta_rule"
    assert len(chunk.source_hash or "") == 16
    assert check_calls(records) == []
    assert describe_path(records).kind == "torch"
    assert json.loads(json.dumps(chunk.to_json()))["calls"] == 2


def test_take_counts_anew_for_each_shard(hybrid: nn.Module) -> None:
    with observe_kernels(hybrid) as observed:
        forward(hybrid)
        first = observed.take()
        forward(hybrid)
        forward(hybrid)
        second = observed.take()
    assert calls(first, "causal_conv1d_fn")[0] == 1
    assert calls(second, "causal_conv1d_fn")[0] == 2


def test_observing_leaves_the_output_as_it_is(hybrid: nn.Module) -> None:
    plain = forward(hybrid)
    with observe_kernels(hybrid):
        assert torch.equal(forward(hybrid), plain)


def test_decode_ops_are_counted_when_a_cache_is_used(hybrid: nn.Module) -> None:
    with observe_kernels(hybrid) as observed:
        hybrid.generate(IDS[:1, :5], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert calls(observed.records(), "fused_recurrent_gated_delta_rule") == dict.fromkeys(GDN_LAYERS, 2)
    assert calls(observed.records(), "chunk_gated_delta_rule") == dict.fromkeys(GDN_LAYERS, 1)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_dense_model_has_nothing_to_choose(kind: str) -> None:
    model = tiny_targets.KINDS[kind]()
    with observe_kernels(model, "fla") as observed:
        forward(model)
    assert observed.records() == []
    assert check_calls([]) == []
    assert str(describe_path([])) == "none needed"
    assert compare_local(model, IDS) == []


def test_mamba_names_its_scan() -> None:
    model = tiny_targets.mamba2()
    with observe_kernels(model) as observed:
        forward(model)
    records = observed.records()
    assert calls(records, "mamba_chunk_scan_combined") == {0: 1, 1: 1, 2: 1}
    assert check_calls(records) == []
    with pytest.raises(ConfigError) as caught, observe_kernels(model, "fla"):
        pass
    assert caught.value.code == "kernel-choice"


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText])
def test_a_vlm_checkpoint_has_the_text_models_sites_under_every_auto_class(
    auto: Any, targets: Callable[[str], Path], hybrid: nn.Module
) -> None:
    model = auto.from_pretrained(targets("qwen3_5_vlm"), dtype=torch.float32).eval()
    with observe_kernels(model) as observed, torch.no_grad():
        model(input_ids=IDS)
    records, expected = observed.records(), planned_records(hybrid)
    assert [dataclasses.replace(record, calls=0) for record in records] == expected
    assert kernel_path_id(records, device="cpu") == kernel_path_id(expected, device="cpu")
    assert calls(records, "chunk_gated_delta_rule") == dict.fromkeys(GDN_LAYERS, 1)


def test_a_foreign_part_of_a_layer_is_unknown_not_ok() -> None:
    model = tiny_targets.llama()
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: x  # this module is neither transformers nor a kernel package
    with observe_kernels(model) as observed:
        forward(model)
    (record,) = observed.records()
    assert (record.layer, record.implementation, record.calls) == ("layers.1.mlp", "unknown", 1)
    assert [finding.code for finding in check_calls([record])] == ["kernel-unknown"]
    assert describe_path([record]).kind == "unknown"
    with pytest.raises(EnvironmentFault) as caught, observe_kernels(model, "torch"):
        pass
    assert caught.value.code == "kernel-fixed"


def test_a_recurrent_layer_of_unknown_wiring_is_unknown_not_dense() -> None:
    model = tiny_targets.llama()
    model.model.layers[2].self_attn = nn.ModuleDict({"conv1d": nn.Conv1d(4, 4, 2)})
    (site,) = find_sites(model)
    assert (site.layer, site.wiring) == ("layers.2", "unknown")


# --- forcing


def test_forcing_restores_everything_after_exceptions(hybrid: nn.Module) -> None:
    sites = find_sites(hybrid)
    before = [(site.holder, site.key, site.holder[site.key]) for site in sites]

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in hybrid.modules())

    n_hooks = hooks()
    with observe_kernels(hybrid, "torch"):
        assert any(holder[key] is not value for holder, key, value in before)
    for spoil in (lambda: hybrid(input_ids=torch.tensor([[10**6]])), lambda: 1 / 0):
        with pytest.raises((IndexError, ZeroDivisionError)), observe_kernels(hybrid, "torch"):
            spoil()
        assert all(holder[key] is value for holder, key, value in before)
        assert hooks() == n_hooks
    with observe_kernels(hybrid, "torch") as observed:
        forward(hybrid)
    assert check_calls(observed.records()) == []


def test_observations_do_not_nest(hybrid: nn.Module) -> None:
    with observe_kernels(hybrid), pytest.raises(AssertionError, match="nest"), observe_kernels(hybrid):
        pass
    with observe_kernels(hybrid):
        forward(hybrid)


def test_fla_never_falls_back(hybrid: nn.Module) -> None:
    with pytest.raises(EnvironmentFault) as caught, observe_kernels(hybrid, "fla"):
        pass
    assert caught.value.code == "kernel-missing"
    assert "ModuleNotFoundError: No module named 'fla'" in caught.value.message
    assert caught.value.hint == "pip install 'hscache[gpu]'"


@pytest.mark.parametrize("force", ["cuda", {"chunk_gated_delta_rule": "fast"}, {"no_such_op": "torch"}])
def test_a_choice_that_does_not_exist_is_refused(hybrid: nn.Module, force: Any) -> None:
    with pytest.raises(ConfigError) as caught, observe_kernels(hybrid, force):
        pass
    assert caught.value.code == "kernel-choice"


@pytest.fixture
def late_fla(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a fake fla importable after transformers bound torch."""

    def install(source: str) -> None:
        for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
            module = types.ModuleType(name)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
        exec(source, sys.modules["fla.ops.gated_delta_rule"].__dict__)
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    return install


def test_fla_can_be_forced_where_transformers_bound_torch(
    hybrid: nn.Module, late_fla: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    late_fla(fla_source())
    plain = forward(hybrid)
    with observe_kernels(hybrid, "fla") as observed:
        forced = forward(hybrid)
    torch.testing.assert_close(forced, plain, rtol=1e-4, atol=1e-4)
    path = describe_path(observed.records())
    assert path.by_op["chunk_gated_delta_rule"] == ("fla",)
    assert path.by_op["causal_conv1d_fn"] == ("torch",)
    assert check_calls(observed.records()) == []
    with observe_kernels(hybrid, {"default": "auto", "chunk_gated_delta_rule": "fla"}) as observed:
        forward(hybrid)
    assert describe_path(observed.records()) == path
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(EnvironmentFault) as caught, observe_kernels(hybrid, "fla"):
        pass
    assert caught.value.code == "kernel-device"


# --- comparing on the same inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_kernel_is_within_the_limits(late_fla: Callable[[str], None], dtype: torch.dtype) -> None:
    late_fla(fla_source().replace(".transpose(1, 2), None", ".transpose(1, 2).to(torch.bfloat16), None")
             if dtype == torch.bfloat16 else fla_source())  # fmt: skip
    mask = torch.ones_like(IDS)
    mask[1, 50:] = 0
    found = compare_local(tiny_targets.qwen3_5(num_hidden_layers=4).to(dtype), IDS, mask)
    assert [comparison.layer_index for comparison in found] == [0, 1, 2]
    assert first_divergence(found) is None
    one = found[0]
    assert one.total.vectors == 120 * 4  # padding is not compared
    assert len(one.by_head) == 4
    assert {name: d.vectors for name, d in one.by_position.items()} == {
        "first 4": 2 * 4 * 4, "chunk border": 3 * 4, "other": 480 - 32 - 12,
    }  # fmt: skip
    assert json.dumps(one.to_json(), allow_nan=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_of_1_001_is_caught_by_the_norm_ratio(late_fla: Callable[[str], None], dtype: str) -> None:
    late_fla(fla_source(scale="1.001").replace(", None\n", f".to(torch.{dtype}), None\n"))
    model = tiny_targets.qwen3_5(num_hidden_layers=2).to(getattr(torch, dtype))
    batches = [(torch.randint(0, 500, (4, 90), generator=torch.Generator().manual_seed(i)), None) for i in range(3)]
    bad = first_divergence(compare_local(model, batches))
    assert bad is not None
    assert bad.layer_index == 0
    assert "norm_ratio" in bad.beyond
    assert bad.total.norm_ratio == pytest.approx(1.001, abs=1e-4)
    assert bad.total.one_minus_cos_max < 1e-3  # cosine alone is blind to it


def test_swapped_value_heads_are_named(late_fla: Callable[[str], None]) -> None:
    late_fla(fla_source(heads=WRONG_HEADS))
    found = compare_local(tiny_targets.qwen3_5(num_hidden_layers=4), IDS)
    bad = first_divergence(found)
    assert bad is not None
    assert (bad.layer, bad.bad_heads) == ("layers.0.linear_attn", (1, 2))
    assert bad.total.one_minus_cos_max > 0.5


def test_nan_and_zero_outputs_are_beyond_any_limit(late_fla: Callable[[str], None]) -> None:
    for scale in ("float('nan')", "0.0"):
        late_fla(fla_source(scale=scale))
        (bad, *_) = compare_local(tiny_targets.qwen3_5(num_hidden_layers=2), IDS[:, :8])
        assert set(bad.beyond) >= {"one_minus_cos_mean", "one_minus_cos_max", "rel_frobenius", "norm_ratio"}
        assert json.dumps(bad.to_json(), allow_nan=False)


def test_rounding_of_a_vector_that_cancelled_is_no_fault_and_garbage_in_its_place_is() -> None:
    """At K = V = 128 a healthy bf16 kernel turned one vector of 1040 by 6.7e-3: one of a twentieth of the norm."""
    made = torch.Generator().manual_seed(0)
    reference = torch.randn(1, 500, 2, 64, generator=made)
    reference[0, 70, 1] *= 1e-2
    rounded = reference + 2e-3 * torch.randn(reference.shape, generator=made)
    keep = torch.ones(1, 500, dtype=torch.bool)

    def beyond(candidate: torch.Tensor, reference: torch.Tensor = reference) -> list[str]:
        sums = _Sums(2, torch.bfloat16)
        sums.add_outputs(reference, candidate, keep)
        return list(measures_beyond(sums.distance(), LIMITS[torch.bfloat16]))

    assert 1 - torch.cosine_similarity(reference[0, 70, 1], rounded[0, 70, 1], dim=0) > 5e-3
    assert beyond(rounded) == []
    for token, scale in ((70, 1.0), (71, 1.0), (70, float("nan")), (70, float("inf"))):
        garbage = rounded.clone()
        garbage[0, token, 1] = scale * torch.randn(64, generator=made)
        assert "one_minus_cos_max" in beyond(garbage)
    zero = reference.clone()
    zero[0, 70, 1] = 0
    assert "one_minus_cos_max" in beyond(rounded.index_put((torch.tensor(0), torch.tensor(70)), torch.ones(64)), zero)


def test_a_comparison_without_a_candidate_says_so(hybrid: nn.Module) -> None:
    with pytest.raises(ConfigError, match="bound"):
        compare_local(hybrid, IDS, candidate="bound")
    with pytest.raises(EnvironmentFault, match="No module named 'fla'"):
        compare_local(hybrid, IDS)


# --- records and their digest


def test_the_path_id_is_that_of_the_plan_and_of_the_packages_that_matter(hybrid: nn.Module) -> None:
    with observe_kernels(hybrid) as observed:
        forward(hybrid)
    records = observed.records()
    assert kernel_path_id(records, device="cpu") == kernel_path_id(planned_records(hybrid), device="cpu")
    versions = {"transformers": "5.24.0", "torch": "2.13.0+cpu", "fla-core": None}
    same = versions | {"torch": "2.13.0+cu130", "fla-core": "0.6.0"}
    assert kernel_path_id(records, versions=versions, device="cpu") == kernel_path_id(
        records, versions=same, device="cpu"
    )
    other = versions | {"transformers": "5.23.0"}
    assert kernel_path_id(records, versions=versions, device="cpu") != kernel_path_id(
        records, versions=other, device="cpu"
    )
    changed = [dataclasses.replace(records[0], source_hash="0" * 16), *records[1:]]
    assert kernel_path_id(changed, device="cpu") != kernel_path_id(records, device="cpu")
    assert kernel_path_id(records, backends=["op:f:flash_qla"], device="cpu") != kernel_path_id(records, device="cpu")
    assert kernel_path_id(records, device="cuda") != kernel_path_id(records, device="cpu")


def test_what_did_not_run_as_planned_is_found(hybrid: nn.Module) -> None:
    with observe_kernels(hybrid) as observed:
        forward(hybrid)
    records = observed.records()

    def findings(change: Callable[[KernelRecord], KernelRecord | list[KernelRecord]]) -> set[tuple[str, str | None]]:
        changed: list[KernelRecord] = []
        for record in records:
            new = change(record)
            changed += new if isinstance(new, list) else [new]
        return {(finding.code, finding.layer) for finding in check_calls(changed)}

    def at(record: KernelRecord, op: str = "chunk_gated_delta_rule") -> bool:
        return record.layer_index == 4 and record.op == op

    here = "layers.4.linear_attn"
    assert findings(lambda r: dataclasses.replace(r, calls=0) if r.layer_index == 4 else r) == {("layer-not-run", here)}
    assert findings(lambda r: dataclasses.replace(r, calls=0) if at(r) else r) == {("op-not-run", here)}
    fla = {"implementation": "fla", "source": "fla:x", "calls": 1}
    assert findings(lambda r: [r, dataclasses.replace(r, **fla)] if at(r) else r) == {("two-implementations", here)}
    assert findings(lambda r: dataclasses.replace(r, **fla) if at(r) else r) == {("layers-disagree", None)}


def test_fla_backends_are_those_that_ran_not_those_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fla_backends() == []
    module = types.ModuleType("fla.backends")
    registry = types.SimpleNamespace(_logged={"gdn:chunk_fwd:flash_qla", "gdn:chunk_fwd:tilelang:fail"})
    module._operation_registries = {"gdn": registry}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.backends", module)
    assert fla_backends() == ["gdn:chunk_fwd:flash_qla"]


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        ({"flash-linear-attention": "0.4.2", "fla-core": "0.4.2"}, True),
        ({"flash-linear-attention": None, "fla-core": "0.4.0"}, True),
        ({"flash-linear-attention": "0.5.0", "fla-core": "0.5.0"}, False),
        ({"flash-linear-attention": None, "fla-core": None}, False),
    ],
)
def test_the_guard_knows_which_fla_misreads_grouped_heads(versions: dict[str, str | None], wrong: bool) -> None:
    assert fla_breaks_grouped_heads(versions) is wrong


def test_environment_is_plain_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_TRIL_PRECISION", "ieee")
    facts = json.loads(json.dumps(environment(), allow_nan=False))
    assert facts["versions"]["transformers"]
    assert facts["versions"]["flash-qla"] is None
    assert facts["env"]["FLA_TRIL_PRECISION"] == "ieee"
    assert "tf32_matmul" in facts


# --- whole modules that are not transformers'


def test_a_part_of_a_kernel_package_is_counted_and_cannot_be_torch(
    hybrid: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FusedRMSNormGated(nn.Module):
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return hidden_states * 0

    FusedRMSNormGated.__module__ = FusedRMSNormGated.forward.__module__ = "fla.modules"
    layer: Any = hybrid.model.layers[1].linear_attn  # type: ignore[union-attr, index]
    monkeypatch.setitem(layer._modules, "norm", FusedRMSNormGated())
    with observe_kernels(hybrid) as observed:
        forward(hybrid)
    (record,) = [record for record in observed.records() if record.implementation == "fla"]
    assert (record.layer, record.wiring, record.calls) == ("layers.1.linear_attn.norm", "module", 1)
    assert describe_path(observed.records()).kind == "mixed"
    with pytest.raises(EnvironmentFault) as caught, observe_kernels(hybrid, "torch"):
        pass
    assert caught.value.code == "kernel-fixed"
    assert "layers.1.linear_attn.norm: torch is forced, but this part is fla.modules:" in caught.value.message


def test_a_hub_kernel_that_replaced_a_forward_is_observed(hybrid: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = types.ModuleType("_gdn_0123")
    hub.__file__ = "cache/kernels--kernels-community--gdn/build/__init__.py"
    monkeypatch.setitem(sys.modules, "_gdn_0123", hub)

    def kernel(self: nn.Module, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states * 0

    kernel.__module__ = "_gdn_0123"
    layer: Any = hybrid.model.layers[1].linear_attn  # type: ignore[union-attr, index]
    monkeypatch.setattr(layer, "forward", types.MethodType(kernel, layer))
    with observe_kernels(hybrid) as observed:
        replaced = forward(hybrid)
    (record,) = [r for r in observed.records() if r.implementation == "hub"]
    assert (record.layer, record.wiring, record.calls) == ("layers.1.linear_attn", "module", 1)
    assert describe_path(observed.records()).kind == "mixed"
    with observe_kernels(hybrid, "torch") as observed:
        assert not torch.equal(forward(hybrid), replaced)
    assert describe_path(observed.records()).kind == "torch"


# --- packages that transformers binds when it is imported: each set in a fresh process


@pytest.mark.thorough
def test_fake_conv_makes_a_mixed_path_named_per_op(tmp_path: Path) -> None:
    fake(tmp_path, "causal_conv1d", CONV, version="1.6.0", dists=("causal-conv1d",))
    got = run_python(
        tmp_path,
        """
        model = tiny_targets.qwen3_5(num_hidden_layers=4)
        plain, torch_records = run(model, "torch")
        mixed, records = run(model, "bound")
        auto, _ = run(model, "auto")
        print(json.dumps({
            "path": str(describe_path(records)), "findings": len(check_calls(records)),
            "calls": [r.calls for r in records if r.op == "causal_conv1d_fn"],
            "same": torch.allclose(plain, mixed, atol=1e-4), "auto": torch.equal(plain, auto),
            "ids": len({kernel_path_id(records, device="cpu"), kernel_path_id(torch_records, device="cpu")}),
            "on_gpu": str(describe_path(planned_records(model, device="cuda"))),
            "compared": [c.op for c in compare_local(model, ids, candidate="bound") if c.ok],
        }))
        """,
    )
    mixed = "mixed (causal_conv1d_fn: causal_conv1d, chunk_gated_delta_rule: torch)"
    assert got == {
        "path": mixed, "findings": 0, "calls": [1, 1, 1], "same": True, "auto": True, "ids": 2, "on_gpu": mixed,
        "compared": ["causal_conv1d_fn"] * 3,
    }  # fmt: skip


@pytest.mark.thorough
def test_a_fallback_is_torch_on_a_gpu_where_a_model_has_kernels(tmp_path: Path) -> None:
    packages = {"none": (), "conv": ("causal_conv1d",), "both": ("causal_conv1d", "fla")}
    for name, installed in packages.items():
        if "causal_conv1d" in installed:
            fake(tmp_path / name, "causal_conv1d", CONV, version="1.6.0", dists=("causal-conv1d",))
        if "fla" in installed:
            fake_fla(tmp_path / name, fla_source())
        got = run_python(
            tmp_path / name,
            """
            from hscache.kernels.path import is_fallback
            models = {"hybrid": tiny_targets.qwen3_5(num_hidden_layers=4), "dense": tiny_targets.llama()}
            found = {kind: [is_fallback(planned_records(model, device=device), device) for device in ("cuda", "cpu")]
                     for kind, model in models.items()}
            print(json.dumps(found))
            """,
        )
        assert got == {"hybrid": [name != "both", False], "dense": [False, False]}, name
    part = types.SimpleNamespace(phase="prefill", op="x", implementation="unknown")
    assert is_fallback([part], "cuda")  # type: ignore[list-item]


@pytest.mark.thorough
def test_fake_fla_is_observed_and_its_scale_shows(tmp_path: Path) -> None:
    fake_fla(tmp_path, fla_source(scale="1.001"))
    got = run_python(
        tmp_path,
        """
        model = tiny_targets.qwen3_5(num_hidden_layers=4)
        plain, _ = run(model, "torch")
        scaled, records = run(model, "auto")
        bad = first_divergence(compare_local(model, ids))
        print(json.dumps({
            "by_op": describe_path(records).by_op, "differs": not torch.allclose(plain, scaled, atol=1e-4),
            "source": next(r.source for r in records if r.op == "chunk_gated_delta_rule"),
            "bad": [bad.layer, bad.beyond], "forced": describe_path(run(model, "fla")[1]).by_op,
        }))
        """,
        TRITON_INTERPRET="1",
    )
    by_op = {"causal_conv1d_fn": ["torch"], "chunk_gated_delta_rule": ["fla"]}
    assert got["by_op"] == got["forced"] == by_op
    assert got["differs"]
    assert got["source"] == "fla.ops.gated_delta_rule:chunk_gated_delta_rule"
    assert got["bad"] == ["layers.0.linear_attn", ["rel_frobenius", "norm_ratio"]]


@pytest.mark.thorough
def test_a_package_that_cannot_be_imported_shows_its_own_error(tmp_path: Path, targets: Callable[[str], Path]) -> None:
    fake_fla(tmp_path, "raise RuntimeError('built for another libc: GLIBC_2.99')")
    text = "RuntimeError: built for another libc: GLIBC_2.99"
    got = run_python(
        tmp_path,
        f"""
        diagnosis = diagnose(Path({str(targets("qwen3_5_vlm"))!r}))
        try:
            run(tiny_targets.qwen3_5(num_hidden_layers=2), "fla")
        except HscacheError as error:
            forced = [error.code, error.message, error.hint]
        print(json.dumps({{"text": render(diagnosis), "json": diagnosis.to_json(), "forced": forced}}))
        """,
    )
    (probe,) = [p for p in got["json"]["packages"] if p["package"] == "fla"]
    assert (probe["ok"], probe["version"], probe["error"]) == (False, "0.6.0", text)
    (kind,) = [k for k in got["json"]["layer_kinds"] if k["kind"] == "linear_attention"]
    assert kind["layers"] == GDN_LAYERS
    (op,) = [op for op in kind["ops"] if op["op"] == "chunk_gated_delta_rule"]
    assert (op["would_run"], op["missing"], op["reason"]) == ("torch", "fla", text)
    assert "flash-linear-attention" in op["mend"]
    assert text in got["text"]
    assert got["json"]["would_fall_back"]
    assert got["forced"][0] == "kernel-missing"
    assert text in got["forced"][1]
    assert got["forced"][2] == op["mend"]


@pytest.mark.thorough
def test_old_fla_with_grouped_heads_is_refused(tmp_path: Path, targets: Callable[[str], Path]) -> None:
    fake_fla(tmp_path, fla_source(heads=WRONG_HEADS), version="0.4.2")
    got = run_python(
        tmp_path,
        f"""
        grouped, even = tiny_targets.qwen3_5(), tiny_targets.qwen3_5(linear_num_key_heads=4)
        codes = []
        for force in ("auto", "fla"):
            try:
                run(grouped, force)
            except HscacheError as error:
                codes.append([error.code, error.hint])
        bad = first_divergence(compare_local(grouped, ids))
        diagnosis = diagnose(Path({str(targets("qwen3_5"))!r}))
        print(json.dumps({{
            "codes": codes, "bad": [bad.layer, bad.bad_heads],
            "let": [len(run(grouped, "torch")[1]), len(run(even)[1]), len(run(grouped, guard=False)[1])],
            "doctor": [diagnosis.ok, [f.code for f in diagnosis.findings], render(diagnosis)],
        }}))
        """,
        TRITON_INTERPRET="1",
    )
    assert got["codes"] == [["kernel-wrong-states", "pip install --upgrade 'flash-linear-attention>=0.5.0'"]] * 2
    assert got["bad"] == ["layers.0.linear_attn", [1, 2]]
    assert got["let"] == [24, 24, 24]
    assert got["doctor"][:2] == [False, ["fla-grouped-heads"]]
    assert "REFUSED" in got["doctor"][2]


# --- doctor


def test_doctor_without_packages(targets: Callable[[str], Path]) -> None:
    diagnosis = diagnose(targets("qwen3_5"))
    assert diagnosis.would_fall_back
    assert not diagnosis.ok
    assert [(kind.kind, kind.layers) for kind in diagnosis.layer_kinds] == [
        ("linear_attention", tuple(GDN_LAYERS)),
        ("full_attention", (3, 7)),
    ]
    assert diagnosis.path_id == kernel_path_id(planned_records(tiny_targets.qwen3_5()), device="cpu")
    text = render(diagnosis)
    assert "linear_attention: 6 layers (0-2, 4-6)" in text
    assert "No module named 'causal_conv1d'" in text
    json.dumps(diagnosis.to_json(), allow_nan=False)


def test_doctor_of_a_dense_target_and_of_no_target(targets: Callable[[str], Path]) -> None:
    dense = diagnose(targets("llama") / "config.json")
    assert dense.ok
    assert str(dense.path) == "none needed"
    assert "no optional kernels" in render(dense)
    machine = diagnose()
    assert machine.ok
    assert machine.layer_kinds == ()
    assert "kernel packages" in render(machine)


@pytest.mark.parametrize(
    "config",
    ['{"model_type": "of_next_year"}', "null", "[]", '{"model_type": "llama", "num_hidden_layers": "8"}', "{"],
)
def test_doctor_needs_a_config_it_knows(tmp_path: Path, config: str) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        diagnose(tmp_path)
    assert caught.value.code == "target-missing"
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(EnvironmentFault) as caught:
        diagnose(tmp_path)
    assert caught.value.code == "target-config"


# --- tools/targets/tiny_targets.py


def test_tiny_targets_are_a_function_of_the_seed(tmp_path: Path) -> None:
    files = [tiny_targets.save("qwen3_5", tmp_path / str(i), seed=i // 2) / "model.safetensors" for i in range(3)]
    a, b, c = (file.read_bytes() for file in files)
    assert a == b != c
