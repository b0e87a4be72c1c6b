"""Where things are computed, and in which precision."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from hstrain.train.parallel import World

import hscache.device
from hscache.device import fast_bf16, pick_device, pick_dtype
from hscache.errors import EnvironmentFault


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with four; return what torch was told to make its current one."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "empty", lambda *_, device: None)
    return chosen


@pytest.mark.parametrize(("name", "number"), [("LOCAL_RANK", 3), ("SLURM_LOCALID", 2), ("SLURM_LOCALID", 6)])
@pytest.mark.parametrize("asked", [None, "cuda"])
def test_each_process_on_a_machine_gets_its_own(
    four_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, name: str, number: int, asked: str | None
) -> None:
    monkeypatch.setenv(name, str(number))
    own = torch.device("cuda", number % 4)
    assert pick_device(asked) == own
    assert World.join(asked).device == own
    assert four_gpus == [own, own], "Triton's kernels run on the current device"


def test_who_names_a_number_gets_it(four_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device("cuda:2") == torch.device("cuda:2")
    assert pick_device("cpu") == torch.device("cpu")
    assert four_gpus == [torch.device("cuda:2")]


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_a_process_alone_takes_the_current_one(four_gpus: list[torch.device], asked: str | None) -> None:
    assert pick_device(asked) == torch.device("cuda:1")
    assert World.join(asked).device == torch.device("cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")
@pytest.mark.parametrize("local", [None, "3"])
@pytest.mark.parametrize("asked", ["cuda", "cuda:0"])
def test_without_cuda_it_is_the_cpu_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, local: str | None, asked: str
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert pick_device() == torch.device("cpu")
    with pytest.raises(EnvironmentFault) as caught:
        pick_device(asked)
    assert caught.value.code == "device-missing"


@pytest.mark.parametrize("fast", [True, False])
def test_auto_is_bfloat16_where_its_products_are_fast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fast: bool
) -> None:
    monkeypatch.setattr(hscache.device, "fast_bf16", lambda kind: fast)
    assert pick_dtype("auto", torch.device("cpu")) == ("bfloat16" if fast else "float32")
    assert ("float32" in capsys.readouterr().err) is not fast, "said in one line, where the machine decides"
    assert pick_dtype("bfloat16", torch.device("cpu")) == "bfloat16", "what is asked for is done"
    assert pick_dtype("float32", torch.device("cpu")) == "float32"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the limits are those of x86 CPUs")
def test_a_cpu_without_bf16_units_is_recognised() -> None:
    code = "from hscache.device import fast_bf16; print(fast_bf16('cpu'))"
    limited = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    answer = subprocess.run([sys.executable, "-c", code], env=limited, capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


def test_a_cpu_that_torch_does_not_name_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    fast_bf16.cache_clear()
    assert fast_bf16("cpu") is fast_bf16("cpu")
    assert fast_bf16.cache_info().misses == 1
    fast_bf16.cache_clear()


@pytest.mark.parametrize("command", ["hscache", "hstrain"])
@pytest.mark.parametrize(
    ("own", "spin"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_waiting_threads_do_not_spin_unless_the_user_wants_it(command: str, own: dict[str, str], spin: str) -> None:
    code = f"import os, sys, {command}.cli; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    answer = subprocess.run(
        [sys.executable, "-c", code], env={**env, **own}, capture_output=True, text=True, check=True
    )
    assert answer.stdout == f"{spin} False\n", "set before torch loads, which reads it once"
