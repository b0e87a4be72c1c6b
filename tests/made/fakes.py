"""Packages that stand for fla and causal-conv1d, written to disk, and processes that see them.

transformers binds its kernels when it is imported, so that each set of packages needs a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# a naive delta rule that shares no code with transformers' reference; {scale} and {heads} are where faults are planted
FLA = """
import torch

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    groups = v.shape[2] // k.shape[2]
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.{heads} for x in (q, k))
    state = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    out = torch.zeros_like(v)
    for t in range(v.shape[2]):
        state = state * g[:, :, t].exp()[..., None, None]
        delta = (v[:, :, t] - (state * k[:, :, t, :, None]).sum(-2)) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * delta[:, :, None]
        out[:, :, t] = (state * q[:, :, t, :, None]).sum(-2) * q.shape[-1] ** -0.5
    return (out * {scale}).transpose(1, 2), None

def fused_recurrent_gated_delta_rule(q, k, v, g, beta, **kwargs):
    raise NotImplementedError
"""
GOOD_HEADS, WRONG_HEADS = "repeat_interleave(groups, dim=1)", "repeat(1, groups, 1, 1)"
CONV = """
import torch.nn.functional as F

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    out = F.conv1d(x, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])[..., : x.shape[-1]]
    return F.silu(out) if activation else out

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    raise NotImplementedError
"""


def fla_source(scale: str = "1.0", heads: str = GOOD_HEADS) -> str:
    return FLA.format(scale=scale, heads=heads)


def fake(site: Path, module: str, source: str, *, version: str, dists: tuple[str, ...]) -> None:
    """Write an importable module and the metadata of the distributions that would ship it."""
    path = site.joinpath(*module.split("."))
    for package in [path, *path.parents]:
        if package == site:
            break
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
    (path / "__init__.py").write_text(source)
    for dist in dists:
        info = site / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")


def fake_fla(site: Path, source: str, version: str = "0.6.0") -> None:
    fake(site, "fla.ops.gated_delta_rule", source, version=version, dists=("flash-linear-attention", "fla-core"))


def run_python(site: Path, script: str, **env: str) -> Any:
    """Run a script in a fresh process that sees the packages in ``site``, and return the JSON that it prints last."""
    prelude = """
        import json, sys
        from pathlib import Path
        import torch, tiny_targets
        from hscache.audit.doctor import diagnose, render
        from hscache.errors import HscacheError
        from hscache.kernels.compare import compare_local, first_divergence
        from hscache.kernels.path import check_calls, describe_path, kernel_path_id
        from hscache.kernels.observe import observe_kernels, planned_records
        ids = torch.arange(70)[None] % 500
        def run(model, force="auto", **kwargs):
            with torch.no_grad(), observe_kernels(model, force, **kwargs) as observed:
                return model(ids, use_cache=False).logits, observed.records()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
        env=environment(site, **env),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment(site: Path, **env: str) -> dict[str, str]:
    """Return environment variables for a process that sees the packages in ``site``."""
    path = os.pathsep.join([str(site), str(ROOT), str(ROOT / "tools/targets"), str(ROOT / "trainer")])
    return {**os.environ, "PYTHONPATH": path, **env}


def hscache(site: Path, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a fresh process that sees the packages in ``site``."""
    command = [sys.executable, "-c", "from hscache.cli import main; main()", *map(str, args)]
    return subprocess.run(command, env=environment(site, **env), capture_output=True, text=True, check=False)
