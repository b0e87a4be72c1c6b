"""A step on two ranks equals the step of one process, and all ranks of a run agree."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hstrain.run.checkpoint import load_drafter, load_state
from hstrain.run.folder import RunPaths
from hstrain.train.fit import fit
from hstrain.train.parallel import World, whole_tensors
from hstrain.train.step import Trainer

from tests.made.ranks import ALONE, UNCLIPPED, first_step, run, same_step
from tests.made.stores import Little
from tests.made.trainers import LENGTHS, damage, train_manifest, training_store, write_manifest

pytestmark = pytest.mark.thorough

Found = dict[str, Any]


def free_port() -> int:
    """Return a free port below those that the system gives to connections, which could take it before it is used."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(10_000, first)
        with socket.socket() as made, suppress(OSError):
            made.bind(("127.0.0.1", port))
            return port


STEP_JOBS: dict[str, dict[str, Any]] = {
    "even": {"data": {"packs_per_step": 4}},
    "uneven": {"data": {"packs_per_step": 3, "noise": 0.1}, "loss": {"weights": "dpace"}},
    "one pack": {"data": {"packs_per_step": 1}, "loss": {"kind": "kl-exact"}, "run": {"gradient_checkpointing": True}},
}
FIT: dict[str, Any] = {
    "data": {"packs_per_step": 3},
    "optim": {"max_steps": 6},
    "run": {"checkpoint_every": 2, "validate_every": 2, "keep": 9},
}


def with_kind(sections: dict[str, Any], parallel: str) -> dict[str, Any]:
    return {**UNCLIPPED, **sections, "run": {**sections.get("run", {}), "parallel": parallel}}


def from_start(start: Path, parallel: str) -> dict[str, Any]:
    return with_kind({"data": {"packs_per_step": 2}, "drafter": {"start": str(start)}}, parallel)


def two_processes(*words: str) -> list[tuple[int, str, str]]:
    """Run ``python WORDS`` as two ranks; return status, output and messages of each."""
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"PYTHONPATH": str(Path(__file__).parents[3])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *words], env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=400) for process in processes]  # a hang is a failure
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def on_two_ranks(jobs: list[dict[str, Any]], root: Path) -> dict[str, list[Found]]:
    """Do jobs in one pair of processes; return job -> what each rank found, where both found something."""
    for job in jobs:
        job["port"] = free_port()
    (root / "jobs.json").write_text(json.dumps(jobs, default=str))
    ended = two_processes("-m", "tests.made.ranks", str(root / "jobs.json"), str(root))
    assert [status for status, *_ in ended] == [0, 0], "\n\n".join(messages for *_, messages in ended)
    return {
        job["name"]: [torch.load(root / f"{job['name']}-{rank}.pt", weights_only=False) for rank in range(2)]
        for job in jobs
    }


@pytest.fixture(scope="module")
def two(little: Little, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    """All jobs of two ranks, done by one pair of processes: job -> what each rank found."""
    root = tmp_path_factory.mktemp("two")
    bad = training_store(root / "bad-store")
    damage(bad.path, bad_sample(bad))
    fit(train_manifest(optim={"max_steps": 3}), little.path, root / "start", device="cpu")
    jobs = []
    for parallel in ("ddp", "fsdp"):
        job = {"what": "step", "store": little.path}
        jobs.append({**job, "name": f"{parallel} start", "sections": from_start(root / "start", parallel)})
        for name, sections in STEP_JOBS.items():
            jobs.append({**job, "name": f"{parallel} {name}", "sections": with_kind(sections, parallel)})
        step = with_kind({"data": {"packs_per_step": 2}}, parallel)
        jobs.append({**job, "name": f"{parallel} bad", "store": bad.path, "sections": step})
        job = {"what": "fit", "store": little.path, "sections": with_kind(FIT, parallel)}
        jobs.append({**job, "name": f"{parallel} fit", "out": root / f"{parallel}-run"})
        begun = root / f"{parallel}-begun"  # by one process; these two continue it
        fit(train_manifest(**with_kind(FIT, parallel)), little.path, begun, device="cpu")
        for at in (4, 6):
            shutil.rmtree(RunPaths(begun).checkpoint(at))
        jobs.append({**job, "name": f"{parallel} resume", "out": begun})
    for name, most in (("skip", 1), ("refuse", 0)):
        sections = {"data": {"max_bad_samples": most, "packs_per_step": 2}, "run": {"parallel": "ddp"}}
        jobs.append({"name": name, "what": "fit", "store": bad.path, "sections": sections, "out": root / f"{name}-run"})
    job = {"what": "fit", "store": little.path, "sections": with_kind(FIT, "ddp"), "out": root / "apart-run"}
    jobs.append({**job, "name": "apart", "apart": True})
    jobs += jobs_in_places_of_their_own(little, root)
    found = on_two_ranks(jobs, root)
    found["paths"] = [{"root": root, "bad": bad.path}]
    return found


def jobs_in_places_of_their_own(little: Little, root: Path) -> list[dict[str, Any]]:
    """Return jobs whose ranks see different directories: none, another run's, or what the first rank sees."""
    sections = with_kind(FIT, "ddp")
    job = {"what": "fit", "store": little.path, "sections": sections}
    jobs = [{**job, "name": "own begin", "out": root / "begin-{rank}"}]
    for name, other in (("absent", None), ("other", {"run": {**sections["run"], "seed": 1}}), ("copied", {})):
        fit(train_manifest(**sections), little.path, root / f"{name}-0", device="cpu")
        shutil.rmtree(RunPaths(root / f"{name}-0").checkpoint(6))
        if other is not None:
            fit(train_manifest(**{**sections, **other}), little.path, root / f"{name}-1", device="cpu")
            if other:
                shutil.rmtree(RunPaths(root / f"{name}-1").checkpoint(6))  # it has step 4, too, with other weights
        jobs.append({**job, "name": f"own {name}", "out": root / f"{name}-{{rank}}"})
    jobs.append({**job, "name": "conflict", "out": root / "copied-{rank}", "sections": with_kind(FIT, "fsdp")})
    training_store(root / "store-1", LENGTHS[:-1])
    (root / "store-0").symlink_to(little.path)
    jobs.append({**job, "name": "own store", "store": root / "store-{rank}", "out": root / "store-run"})
    for name in ("start-0", "start-1"):
        one = train_manifest(optim={"max_steps": 1}, run={"seed": int(name[-1])})
        fit(one, little.path, root / name, device="cpu")
    begun = {"drafter": {"start": str(root / "start-{rank}")}}
    jobs.append({**job, "name": "own start", "sections": with_kind(begun, "fsdp"), "out": root / "start-run"})
    full = {**FIT, "run": {**FIT["run"], "validate_every": 99}}
    jobs.append({**job, "name": "blocked", "out": root / "jobs.json", "sections": with_kind(full, "ddp")})
    return jobs


def test_leaving_does_not_wait_for_a_thread_that_waits_for_us(little: Little, tmp_path: Path) -> None:
    """Gloo's threads may still hold Python objects of the last collective; see World.leave."""
    jobs = [
        {"name": f"leave {i}", "what": "leave", "store": little.path, "sections": with_kind({}, "ddp")}
        for i in range(20)
    ]
    found = on_two_ranks(jobs, tmp_path)
    assert [[rank["ranks"] for rank in ranks] for ranks in found.values()] == [[[0, 1], [0, 1]]] * 20


LAST = """
import gc, sys
import torch
from hstrain.train.parallel import World, dist
gc.disable()
much = [[] for _ in range(3_000_000)]  # the interpreter looks through it as it ends
world = World.join("cpu")
sys.setswitchinterval(0.1)  # the main thread is not made to share the interpreter's lock
dist.all_reduce_coalesced([torch.ones(1) for _ in range(1000)])
world.leave()
"""


@pytest.mark.parametrize("attempt", range(3))
def test_a_rank_whose_last_act_is_a_collective_is_not_aborted(attempt: int) -> None:
    """Without the pause in World.leave most of these runs see one that is."""
    assert two_processes("-c", LAST) == [(0, "", "")] * 2


def bad_sample(little: Little) -> str:
    """Return a sample of the first step's second pack."""
    trainer = Trainer(train_manifest(), little.path, ALONE)
    return trainer.store.sample_ids[trainer.schedule.packs(0)[1][0]]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", STEP_JOBS)
def test_two_ranks_take_the_step_of_one(little: Little, two: dict[str, list[Found]], name: str, parallel: str) -> None:
    alone = first_step(train_manifest(**with_kind(STEP_JOBS[name], parallel)), little.path, ALONE)
    first, second = two[f"{parallel} {name}"]
    shared = [pack for pair in zip(first["samples"], second["samples"], strict=True) for pack in pair]
    assert [pack for pack in shared if pack] == alone["samples"]
    assert (
        len(shared) - len(alone["samples"]) == {"even": 0, "uneven": 1, "one pack": 1}[name]
    )  # an empty one, if need be
    for rank in (first, second):
        same_step(rank, alone)
        assert rank["record"] == first["record"]
        for key, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][key], weight, atol=2e-4, rtol=1e-4)
            assert torch.equal(rank["weights"][key], first["weights"][key])
    assert first["validation"] == second["validation"]
    for key in ("samples", "anchors"):
        assert first["validation"][key] == alone["validation"][key]
    assert first["validation"]["tau"] == pytest.approx(alone["validation"]["tau"], abs=0.1)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_begin_from_the_drafter_that_one_begins_from(
    little: Little, two: dict[str, list[Found]], parallel: str
) -> None:
    start = two["paths"][0]["root"] / "start"
    alone = first_step(train_manifest(**from_start(start, parallel)), little.path, ALONE)
    trained, _ = load_drafter(start)
    for rank in two[f"{parallel} start"]:
        same_step(rank, alone)
        for name, weight in trained.state_dict().items():  # one step of a warmup away
            torch.testing.assert_close(rank["weights"][name], weight, atol=0.02, rtol=0)
            torch.testing.assert_close(rank["weights"][name], alone["weights"][name], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_sample_that_one_rank_cannot_read_is_left_out_by_both(two: dict[str, list[Found]], parallel: str) -> None:
    path = two["paths"][0]["bad"]
    alone = first_step(train_manifest(**with_kind({"data": {"packs_per_step": 2}}, parallel)), path, ALONE)
    first, second = two[f"{parallel} bad"]
    assert alone["record"]["bad"] == 1
    for rank in (first, second):
        same_step(rank, alone)
        assert rank["record"] == first["record"]


def losses(out: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in RunPaths(out).metrics.read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines if line["kind"] == "train"]


def same_run(a: Path, b: Path) -> None:
    """Compare losses and last weights of two runs, up to what rounding does to six steps."""
    assert [step for step, *_ in losses(a)] == [step for step, *_ in losses(b)] == list(range(1, 7))
    for (_, loss, norm), (_, other, other_norm) in zip(losses(a), losses(b), strict=True):
        assert loss == pytest.approx(other, rel=1e-3)
        assert norm == pytest.approx(other_norm, rel=2e-2)
    (weights, moments, state), (others, other_moments, other_state) = (
        load_state(RunPaths(x).checkpoint(6)) for x in (a, b)
    )
    assert weights.keys() == others.keys()
    assert moments.keys() == other_moments.keys()
    assert state["step"] == other_state["step"] == 6
    for name, weight in weights.items():
        assert (weight - others[name]).norm() < 2e-2 * weight.norm() + 1e-6, name


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_may_go_on_with_another_number_of_ranks(
    little: Little, two: dict[str, list[Found]], tmp_path: Path, parallel: str
) -> None:
    root, one = two["paths"][0]["root"], train_manifest(**with_kind(FIT, parallel))
    fit(one, little.path, tmp_path / "alone", device="cpu")
    same_run(root / f"{parallel}-run", tmp_path / "alone")  # two ranks
    same_run(root / f"{parallel}-begun", tmp_path / "alone")  # one, then two
    back = tmp_path / "back"
    shutil.copytree(root / f"{parallel}-run", back)
    for at in (4, 6):
        shutil.rmtree(RunPaths(back).checkpoint(at))
    fit(one, little.path, back, device="cpu")
    same_run(back, tmp_path / "alone")  # two, then one
    for name in ("fit", "resume"):
        first, second = two[f"{parallel} {name}"]
        assert (first["steps"], first["tau"], first["best_tau"]) == (second["steps"], second["tau"], second["best_tau"])


def test_one_bad_sample_on_two_ranks_is_counted_once_and_recorded_once(two: dict[str, list[Found]]) -> None:
    first, second = two["skip"]
    assert (first["skipped"], second["skipped"]) == (1, 1)
    assert first["steps"] == second["steps"]
    text = RunPaths(two["paths"][0]["root"] / "skip-run").skipped.read_text()
    assert len(text.splitlines()) == 1


def test_too_many_bad_samples_stop_both_ranks(two: dict[str, list[Found]]) -> None:
    first, second = two["refuse"]
    assert first["error"] == second["error"] == "too-many-bad-samples"


@pytest.mark.parametrize("name", ["absent", "other"])
def test_a_rank_without_the_first_ones_checkpoint_ends_the_run_on_all(two: dict[str, list[Found]], name: str) -> None:
    root = two["paths"][0]["root"]
    for found in two[f"own {name}"]:
        assert found["error"] == "run-not-shared"
        assert found["message"].startswith(f"rank 1: {RunPaths(root / f'{name}-1').checkpoint(4)}: ")
    assert RunPaths(root / f"{name}-0").steps() == [2, 4]  # nothing was trained


@pytest.mark.parametrize(("name", "what"), [("store", "store"), ("start", "drafter.start")])
def test_ranks_that_see_other_files_by_one_name_end_the_run(two: dict[str, list[Found]], name: str, what: str) -> None:
    first, second = two[f"own {name}"]
    assert first == second
    assert first["error"] == "run-not-shared"
    assert first["message"].startswith(f"{what}: the first rank sees ")
    assert not (two["paths"][0]["root"] / f"{name}-run").exists()


def test_the_first_ranks_validation_decides_which_checkpoint_is_best(two: dict[str, list[Found]]) -> None:
    first, second = two["apart"]
    assert first["best_tau"] == second["best_tau"] == first["tau"] == second["tau"] > 2
    assert json.loads(RunPaths(two["paths"][0]["root"] / "apart-run").best.read_bytes())["step"] == 6


def test_the_first_rank_alone_decides_where_a_run_stands(two: dict[str, list[Found]], tmp_path: Path) -> None:
    root = two["paths"][0]["root"]
    for name in ("begin", "copied"):  # of the latter the second rank sees a newer checkpoint
        first, second = two[f"own {name}"]
        assert first["steps"] == second["steps"] == 6
        assert (first["tau"], first["best_tau"]) == (second["tau"], second["best_tau"])
        same_run(root / f"{name}-0", root / "ddp-run")
    assert not (root / "begin-1").exists()  # the first rank alone writes


@pytest.mark.parametrize(("name", "code"), [("conflict", "run-other-manifest"), ("blocked", "disk-error")])
def test_what_the_first_rank_alone_is_refused_all_ranks_are(two: dict[str, list[Found]], name: str, code: str) -> None:
    first, second = two[name]
    assert first["error"] == second["error"] == code
    assert first["message"] == second["message"]


def test_other_ranks_than_the_first_keep_nothing_of_a_checkpoint() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    kept = whole_tensors(tensors.items(), World(0, 2, torch.device("cpu")))
    assert {name: tensor.data_ptr() for name, tensor in kept.items()} == {
        name: tensor.data_ptr() for name, tensor in tensors.items()
    }
    assert whole_tensors(tensors.items(), World(1, 2, torch.device("cpu"))) == {}


def test_one_rank_speaks_and_all_give_the_status(little: Little, tmp_path: Path) -> None:
    toml = write_manifest(tmp_path / "m.toml", optim={"max_steps": 3})
    at = [str(toml), "--store", str(little.path), "--device", "cpu", "--json"]
    out = str(tmp_path / "run")

    def on_both(*words: str) -> list[tuple[int, str]]:
        ended = two_processes("-m", "hstrain", "fit", *at, *words)
        print(*(messages for *_, messages in ended), file=sys.stderr)
        return [(status, text) for status, text, _ in ended]

    for words in (["--out", out], ["--dry-run"]):
        (status, text), other = on_both(*words)
        assert (status, json.loads(text)["steps"]) == (0, 3)
        assert other == (0, "")
    assert on_both("--out", out, "--set", "run.seed=1") == [(4, ""), (4, "")]


def test_one_process_is_a_world_of_one(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = World.join("cpu")
    assert (world.rank, world.size, world.main) == (0, 1, True)
    assert world.sum(torch.ones(2)).tolist() == [1, 1]
    assert world.gather("x") == ["x"]
    assert world.merge({"a": "b"}) == {"a": "b"}
    assert run({"port": 0, "what": "step", "sections": {}, "store": str(little.path)})["record"]["blocks"] > 0
