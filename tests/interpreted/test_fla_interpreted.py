"""fla's real kernels against the torch reference, on CPU through Triton's interpreter.

``python tools/bench/fla_env.py`` installs the packages once; then ``python -m pytest -m fla``. Each run is a process of
its own, since transformers chooses its kernels when it is imported. The folder must not be named ``fla``: pytest puts
its parent on the path, and transformers would import it.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
from typing import Any

import fla_env
import pytest

pytestmark = pytest.mark.fla

LENGTHS = (1, 63, 64, 65, 130)
SCRIPT = """
    import fla_on_cpu  # first: it must be in place before triton, fla and transformers
    import json, sys
    import torch, tiny_targets
    from hscache.errors import HscacheError
    from hscache.kernels.compare import compare_local
    from hscache.kernels.path import check_calls, describe_path
    from hscache.kernels.observe import observe_kernels

    key_heads, lengths = int(sys.argv[1]), json.loads(sys.argv[2])
    out = {"compared": [], "refused": None}
    for dtype in ("float32", "bfloat16"):
        model = tiny_targets.qwen3_5(linear_num_key_heads=key_heads).to(getattr(torch, dtype))
        for tokens in lengths:
            ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(tokens))
            out["compared"] += [c.to_json() | {"tokens": tokens} for c in compare_local(model, ids)]
    try:
        with torch.no_grad(), observe_kernels(model, "fla") as observed:
            model(ids[:, :70], use_cache=False)
        out["path"] = describe_path(observed.records()).by_op
        out["findings"] = len(check_calls(observed.records()))
    except HscacheError as error:
        out["refused"] = [error.code, error.message, error.hint]
    print(json.dumps(out, allow_nan=False))
"""


@functools.cache
def run(fla: str, key_heads: int, lengths: tuple[int, ...]) -> Any:
    if not fla_env.is_ready(fla):
        pytest.skip(f"fla {fla} is not installed for the interpreter: python tools/bench/fla_env.py {fla}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), str(key_heads), json.dumps(lengths)],
        env=fla_env.environment(fla),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "mean", "worst", "frobenius"), [("float32", 1e-9, 1e-9, 1e-5), ("bfloat16", 1e-4, 5e-3, 2e-2)]
)
def test_new_fla_agrees_with_torch_at_every_layer_with_grouped_heads(
    dtype: str, mean: float, worst: float, frobenius: float, tokens: int
) -> None:
    compared = [c for c in run(fla_env.NEW, 2, LENGTHS)["compared"] if (c["dtype"], c["tokens"]) == (dtype, tokens)]
    assert [c["layer_index"] for c in compared] == [0, 1, 2, 4, 5, 6]
    for c in compared:
        assert c["candidate"] == "fla.ops.gated_delta_rule.chunk:chunk_gated_delta_rule"
        assert c["total"]["vectors"] == tokens * 4
        assert c["total"]["one_minus_cos_mean"] <= mean
        assert c["total"]["one_minus_cos_max"] <= worst
        assert c["total"]["rel_frobenius"] <= frobenius
        assert c["ok"], (c["beyond"], c["bad_heads"])


def test_new_fla_runs_when_forced() -> None:
    got = run(fla_env.NEW, 2, LENGTHS)
    assert got["refused"] is None
    assert got["path"] == {"causal_conv1d_fn": ["torch"], "chunk_gated_delta_rule": ["fla"]}
    assert got["findings"] == 0


def test_old_fla_gives_wrong_states_for_grouped_heads_and_is_refused() -> None:
    got = run(fla_env.OLD, 2, (65,))
    assert got["refused"][0] == "kernel-wrong-states"
    assert "4 value heads over 2 key heads" in got["refused"][1]
    for c in got["compared"]:
        assert not c["ok"]
        assert c["bad_heads"] == [0, 1, 2, 3]  # what it reads lies outside the keys, and may be anything
        assert float(c["total"]["rel_frobenius"]) > 0.1


def test_old_fla_is_right_without_grouped_heads() -> None:
    got = run(fla_env.OLD, 4, (65,))
    assert got["refused"] is None
    assert all(c["ok"] for c in got["compared"])
