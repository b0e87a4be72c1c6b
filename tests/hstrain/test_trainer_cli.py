"""``hstrain`` on the command line: what it lists, what it prints, exit statuses, and that output is never replaced."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import demo_summary
import pytest
import torch
import typer
from hstrain import cli
from hstrain.drafter.losses import Head, Kind
from hstrain.exchange.importer import read_checkpoint
from hstrain.live.target import LiveTarget
from hstrain.run.checkpoint import load_drafter
from hstrain.score.walk import Cost, score_store
from safetensors.torch import load_file

import hscache
from hscache.store.head import load_head
from tests.made.hybrid import NEW_TOKENS, PROMPTS, TAPS, Hybrid
from tests.made.trainers import training_store, write_manifest

COMMANDS = {"config", "fit", "plot", "eval", "speculate", "import", "export", "doctor"}


pytestmark = pytest.mark.usefixtures("no_disk")


def help_of(name: str) -> str:
    command = typer.main.get_command(cli.app)
    return str(command.commands[name].help)  # type: ignore[attr-defined]


def test_help_lists_every_command(hstrain: Any) -> None:
    answer = hstrain("--help")
    assert (answer.status, answer.err) == (0, "")
    listed = answer.out.partition("Commands:")[2]
    assert {line.split()[0] for line in listed.splitlines() if line[:2] == "  " and line[2:3].isalpha()} == COMMANDS
    assert hstrain("--version").out == f"hstrain {hscache.__version__}\n"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_an_example_of_itself(hstrain: Any, name: str) -> None:
    example = help_of(name).partition("Example: ")[2]
    assert example.startswith(f"hstrain {name} ")
    options = set(hstrain(name, "--help").out.split())
    assert {word for word in example.split() if word.startswith("--")} <= options


def test_help_loads_nothing_heavy() -> None:
    script = "import sys; from hstrain.cli import app; app(['--help'], standalone_mode=False); "
    script += "print([m for m in ('torch', 'transformers', 'zarr', 'datasets', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["speculate"],
        ["speculate", "run", "--store", "s", "--target", "t", "--prompts", "p", "--temperature", "-1"],
        ["speculate", "run", "--store", "s", "--target", "t", "--prompts", "p", "--temperature", "nan"],
        ["speculate", "run", "--store", "s", "--target", "t", "--prompts", "p", "--temperature", "inf"],
        ["speculate", "run", "--store", "s", "--target", "t", "--prompts", "p", "--top-p", "nan"],
        ["export", "run", "--store", "s", "--out", "o", "--format", "gguf"],
        ["export", "run", "--store", "s"],
        ["doctor", "run"],
        ["plot", "run", "-o", "curves.txt"],
    ],
)
def test_wrong_usage_exits_with_2_and_says_so_on_stderr(hstrain: Any, arguments: list[str]) -> None:
    answer = hstrain(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith("error[usage]: ")
    assert "\nhint: " in answer.err


@pytest.mark.parametrize("name", ["fit", "eval"])
def test_a_device_that_is_not_there_is_one_clear_error(hstrain: Any, hybrid: Hybrid, tmp_path: Path, name: str) -> None:
    words = {
        "fit": ["manifests/train/demo.toml", "--store", hybrid.store, "--out", tmp_path / "run"],
        "eval": [hybrid.run, "--store", hybrid.store],
    }
    answer = hstrain(name, *words[name], "--device", "cuda:99")
    assert (answer.status, answer.code) == (3, "device-missing")
    assert "hint: " in answer.err


# speculate


@pytest.fixture
def at(hybrid: Hybrid) -> list[object]:
    """Arguments that every call needs."""
    return [
        hybrid.run, "--store", hybrid.store, "--target", hybrid.target, "--prompts", hybrid.prompts,
        "--dtype", "float32", "--device", "cpu", "--max-new-tokens", NEW_TOKENS,
    ]  # fmt: skip


def test_speculate_as_json_makes_the_steps_of_the_cache(hstrain: Any, hybrid: Hybrid, at: list[object]) -> None:
    answer = hstrain("speculate", *at, "--json")
    assert answer.status == 0
    report = answer.json
    store = hscache.open(hybrid.store)
    assert report["lossless"] == {"compared": 6, "equal": 6, "tie": 0, "noise": 0, "unexplained": 0}
    drafter, _ = load_drafter(hybrid.run)
    head = Head(load_head(hybrid.store / "target"), "cpu", torch.float32)
    walks = {s.sample_id: s.walk(s.streak) for s in score_store(drafter, head, store, range(len(store)))}
    assert {entry["id"]: entry["accepted"] for entry in report["prompts"]} == walks
    for entry in report["prompts"]:
        sample = store.sample(store.index_of(entry["id"]))
        assert entry["ids"] == sample.input_ids[entry["prompt_tokens"] :].tolist()
    steps = [length for walk in walks.values() for length in walk]
    assert report["tau"] == sum(steps) / len(steps) > 1.3
    assert report["tau_by_tag"].keys() == {"def", "import", "class"}
    assert (report["sampling"]["max_new_tokens"], report["dtype"], report["tree_size"]) == (NEW_TOKENS, "float32", None)


def test_speculate_verifies_fewer_drafted_tokens_and_predicts_the_speed(
    hstrain: Any, hybrid: Hybrid, at: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_verified: list[int] = []
    verify = LiveTarget.verify

    def counted(self: LiveTarget, tokens: Any, *args: Any) -> Any:
        rows_verified.append(len(tokens))
        return verify(self, tokens, *args)

    monkeypatch.setattr(LiveTarget, "verify", counted)
    report = hstrain("speculate", *at, "--draft-tokens", "5,1,2", "--json").json
    assert set(rows_verified) == {2, 3, 6}
    drafter, _ = load_drafter(hybrid.run)
    head = Head(load_head(hybrid.store / "target"), "cpu", torch.float32)
    scores = score_store(drafter, head, hscache.open(hybrid.store), range(6))
    rows = report["by_draft_tokens"]
    assert [row["draft_tokens"] for row in rows] == [1, 2, 5]
    for row in rows:
        assert (row["lossless"]["equal"], row["differences"]) == (6, {})
        steps = [n for score in scores for n in score.walk(score.streak.clip(max=row["draft_tokens"]))]
        assert row["tau"] == sum(steps) / len(steps)
    assert rows[0]["tau"] < rows[2]["tau"] == report["tau"]
    cost = Cost(**rows[2]["cost"])
    assert [row["predicted"] for row in rows] == pytest.approx(
        [row["tau"] / cost.step(row["draft_tokens"], 5) for row in rows]
    )
    assert rows[2]["predicted"] == pytest.approx(rows[2]["tau"] / sum(rows[2]["cost"][p] for p in rows[0]["cost"]))


def test_speculate_with_fewer_drafted_tokens_as_text(hstrain: Any, at: list[object]) -> None:
    short = ("--limit", 1, "--max-new-tokens", 8)
    out = hstrain("speculate", *at, *short, "--draft-tokens", "1,5").out
    assert re.search(r"eval --cost draft=[\d.]+,verify=[\d.]+,keep=[\d.]+,row=[\d.]+ predicts the same", out)
    table = [line.split() for line in out.partition("by drafted tokens")[2].splitlines()]
    assert [(cells[0], cells[-3:]) for cells in table if cells[-3:-1] == ["1", "of"]] == [
        ("1", ["1", "of", "1"]), ("5", ["1", "of", "1"])
    ]  # fmt: skip
    out = hstrain("speculate", *at, *short, "--draft-tokens", 2).out
    assert "blocks of 6, of which 2 drafted tokens verified" in out
    assert "by drafted tokens" not in out
    for wrong in (("6",), ("0",), ("1,",), ("1", "--tree", 4)):
        answer = hstrain("speculate", *at, *short, "--draft-tokens", *wrong)
        assert (answer.status, answer.out, answer.code) == (2, "", "usage")


def test_speculate_as_text(hstrain: Any, at: list[object]) -> None:
    answer = hstrain("speculate", *at, "--limit", 2, "--max-new-tokens", 12)
    assert answer.status == 0
    lines = {line.split()[0]: line for line in answer.out.splitlines()[1:]}
    assert lines.keys() == {"prompts", "tau", "streaks", "kernels", "by", "speed", "step", "lossless"}
    assert "float32 on cpu, blocks of 6" in answer.out.splitlines()[0]
    assert lines["prompts"].split() == ["prompts", "2", "(0", "rejected)"]
    assert lines["lossless"].endswith("2 of 2 texts as without a drafter")
    assert "tokens/s" in lines["speed"]
    assert "speculate: 2/2 prompts (100%)" in answer.err


@pytest.mark.thorough
def test_figures_go_to_a_file_a_picture_and_one_page(hstrain: Any, hybrid: Hybrid, at: list[object]) -> None:
    root = hybrid.run.parent
    for name, words in (
        ("live", ["speculate", *at, "--limit", 2]),
        ("eval", ["eval", hybrid.run, "--store", hybrid.store]),
    ):
        more = ["--held-out", 1] if name == "eval" else []
        answer = hstrain(*words, *more, "--out", root / f"{name}.json", "--plot", root / f"{name}.png", "--json")
        assert answer.status == 0
        assert json.loads((root / f"{name}.json").read_text()) == answer.json
        assert (root / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (root / "drafter").symlink_to(hybrid.run)
    assert hstrain("plot", hybrid.run).status == 0
    assert hstrain("export", hybrid.run, "--store", hybrid.store, "--out", root / "export").status == 0
    page = demo_summary.summary(root)
    offline, live = (json.loads((root / f"{name}.json").read_text()) for name in ("eval", "live"))
    for number in (f"{offline['rows'][0]['tau']:.2f}", f"{live['tau']:.2f}", "2 of 2", "6 samples"):
        assert number in page
    assert page.count("data:image/png;base64,iVBORw") == 3


def test_without_a_gpu_torch_is_no_fallback(hstrain: Any, at: list[object]) -> None:
    answer = hstrain("speculate", *at, "--limit", 1, "--max-new-tokens", 2, "--json")
    assert answer.json["kernel_fallback"] is False
    assert "torch replaced" not in answer.err


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_fallback_on_a_gpu_is_refused_unless_allowed_and_said(hstrain: Any, at: list[object]) -> None:
    short = ("--limit", 1, "--max-new-tokens", 2, "--json")
    answer = hstrain("speculate", *at, *short)
    assert (answer.status, answer.out, answer.code) == (3, "", "kernel-fallback")
    assert "--allow-fallback" in answer.err
    answer = hstrain("speculate", *at, *short, "--allow-fallback")
    assert answer.status == 0
    assert answer.json["kernel_fallback"] is True
    assert "torch replaced kernels on this GPU (torch (causal_conv1d_fn: torch" in answer.err


def test_speculate_with_a_tree_by_chance(hstrain: Any, at: list[object]) -> None:
    chance = ("--limit", 1, "--max-new-tokens", 5, "--tree", 3, "--temperature", 0.8, "--top-p", 0.9)
    texts = []
    for seed in (1, 1, 2):
        report = hstrain("speculate", *at, *chance, "--seed", seed, "--json").json
        assert (report["tree_size"], report["sampling"]["top_p"], report["lossless"]["compared"]) == (3, 0.9, 0)
        texts.append(report["prompts"][0]["ids"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.thorough
def test_any_seed_is_one(hstrain: Any, at: list[object]) -> None:
    """Each prompt's is a multiple of it, which torch's 64 bits need not hold."""
    chance = ("--limit", 2, "--max-new-tokens", 8, "--temperature", 0.9)
    texts = []
    for seed in (1 << 62, 1 << 62, -(1 << 62), (1 << 62) + 1):
        answer = hstrain("speculate", *at, *chance, "--seed", seed, "--json")
        assert answer.status == 0
        texts.append([entry["ids"] for entry in answer.json["prompts"]])
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] not in texts[:3]


def test_an_empty_nucleus_is_greedy(hstrain: Any, at: list[object]) -> None:
    short = ("--limit", 2, "--max-new-tokens", 8, "--json")
    greedy, none = (hstrain("speculate", *at, *short, *how) for how in ((), ("--temperature", 1, "--top-p", 0)))
    assert none.status == 0
    assert [e["ids"] for e in none.json["prompts"]] == [e["ids"] for e in greedy.json["prompts"]]


@pytest.mark.parametrize("option", ["--out", "--plot"])
@pytest.mark.parametrize("command", ["eval", "speculate"])
def test_a_file_that_cannot_be_written_is_told_first(
    hstrain: Any, hybrid: Hybrid, at: list[object], tmp_path: Path, command: str, option: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    words = at if command == "speculate" else [hybrid.run, "--store", hybrid.store, "--held-out", 1]
    for path in (tmp_path / "file/x.png", tmp_path / "folder.png"):
        answer = hstrain(command, *words, option, path)
        assert (answer.status, answer.out, answer.code) == (3, "", "disk-error")
        assert "samples" not in answer.err
        assert "prompts" not in answer.err
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("json_too", [False, True])
def test_figures_are_printed_whatever_becomes_of_the_files(
    hstrain: Any, hybrid: Hybrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_too: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("hstrain.cli.write_json", full)
    words = ["eval", hybrid.run, "--store", hybrid.store, "--held-out", 1, "--samples", 1]
    out, plot = tmp_path / "new/eval.json", tmp_path / "other/eval.png"
    answer = hstrain(*words, "--out", out, "--plot", plot, *(["--json"] if json_too else []))
    assert (answer.status, answer.code) == (3, "disk-error")
    assert answer.json["rows"] if json_too else "accuracy by slot" in answer.out
    assert not out.exists()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_speculate_raw_leaves_the_template_out(hstrain: Any, at: list[object]) -> None:
    short = ("--limit", 1, "--max-new-tokens", 2, "--json")
    chat, raw = (hstrain("speculate", *at, *short, *how).json["prompts"][0] for how in ((), ("--raw",)))
    assert raw["prompt_tokens"] < chat["prompt_tokens"]


def test_speculate_of_one_token_has_no_tau_and_says_so(hstrain: Any, at: list[object]) -> None:
    answer = hstrain("speculate", *at, "--limit", 2, "--max-new-tokens", 1)
    assert answer.status == 0
    assert "no steps" in answer.out


def test_text_that_is_not_the_targets_is_a_finding(
    hstrain: Any, at: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hstrain.live import decode

    original = decode._chain_step

    def wrong(*args: Any) -> Any:
        tokens, rows = original(*args)
        return [(token + 1) % 2048 for token in tokens], rows

    monkeypatch.setattr(decode, "_chain_step", wrong)
    answer = hstrain("speculate", *at, "--limit", 1, "--max-new-tokens", 6)
    assert answer.status == 1
    assert "0 of 1 texts as without a drafter; differences: 1 unexplained" in answer.out
    assert "add: {'position': 1, 'kind': 'unexplained'" in answer.err


def test_speculate_refuses_what_does_not_fit(hstrain: Any, hybrid: Hybrid, at: list[object], tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text('{"text": "x"}\n')
    answer = hstrain("speculate", *at, "--prompts", tmp_path / "gone.jsonl")
    assert (answer.status, answer.out, answer.code) == (2, "", "corpus-missing")
    other: list[object] = [tmp_path / "none.jsonl" if word == hybrid.prompts else word for word in at]
    answer = hstrain("speculate", *other)
    assert (answer.status, answer.out, answer.code) == (2, "", "corpus-empty")
    answer = hstrain("speculate", tmp_path, *at[1:])
    assert (answer.status, answer.out, answer.code) == (2, "", "not-a-checkpoint")
    gone: list[object] = [tmp_path / "no-target" if word == hybrid.target else word for word in at]
    answer = hstrain("speculate", *gone)
    assert (answer.status, answer.out, answer.code) == (3, "", "target-missing")
    (tmp_path / "no-store").mkdir()
    nowhere: list[object] = [tmp_path / "no-store" if word == hybrid.store else word for word in at]
    answer = hstrain("speculate", *nowhere)
    assert (answer.status, answer.out, answer.code) == (2, "", "not-a-store")


def test_speculate_with_another_target_is_a_conflict(hstrain: Any, hybrid: Hybrid, at: list[object], tmp_path: Path):
    import tiny_targets

    other = tiny_targets.save("qwen3", tmp_path / "qwen3", num_hidden_layers=8, head_dim=16)
    words: list[object] = [other if word == hybrid.target else word for word in at]
    answer = hstrain("speculate", *words)
    assert (answer.status, answer.out, answer.code) == (4, "", "target-other")


# losses


def test_a_store_feeds_the_losses_whose_arrays_it_has(hstrain: Any, tmp_path: Path) -> None:
    for name, sections in (("all", {}), ("plain", {"logits": {"topk": 0}, "states": {"final_state": False}})):
        little = training_store(tmp_path / name, [9, 12], **sections)
        for kind in get_args(Kind):
            fitting = ("fit", write_manifest(tmp_path / "m.toml", loss={"kind": kind}), "--store", little.path)
            answer = hstrain(*fitting, "--device", "cpu", "--dry-run")
            assert (answer.status == 0) == (name == "all" or kind == "ce")


# export


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_export_writes_what_was_trained(
    hstrain: Any, hybrid: Hybrid, sliding_run: Path, tmp_path: Path, layout: str
) -> None:
    out, run = tmp_path / layout, hybrid.run if layout == "zlab" else sliding_run
    answer = hstrain("export", run, "--store", hybrid.store, "--out", out, "--format", layout, "--json")
    assert answer.status == 0
    drafter, _ = load_drafter(run)
    assert answer.json == {
        "path": str(out),
        "layout": layout,
        "dtype": "bfloat16",
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "size_bytes": sum(file.stat().st_size for file in out.iterdir()),
    }
    assert f"{out}: {layout} layout" in answer.err
    config = json.loads((out / "config.json").read_text())
    if layout == "zlab":
        assert config["dflash_config"]["target_layer_ids"] == TAPS
    else:
        assert config["aux_hidden_state_layer_ids"] == [tap + 1 for tap in TAPS]
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(hybrid.target)
    again, facts = read_checkpoint(out, load_head(hybrid.store / "target"))
    assert facts.layout == layout
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float()), name
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["target"] == provenance["store"]["target"] == str(hybrid.target)
    assert provenance["checkpoint"] == str(run / "checkpoints/step-000008")
    assert provenance["store"]["digest"] == hscache.open(hybrid.store).manifest["digest"]
    assert provenance["manifest"]["optim"]["name"] == "muon"
    assert str(hybrid.target) in (out / "README.md").read_text()


def test_an_export_with_yarn_decodes_as_the_target_does(
    hstrain: Any, hybrid: Hybrid, at: list[object], tmp_path: Path
) -> None:
    out, words = tmp_path / "long", ("--store", hybrid.store, "--rope-scaling")
    for wrong in ("yarn", "yarn:factor=1", "yarn:original=9", "linear:factor=2", "yarn:factor=4,original=0"):
        answer = hstrain("export", hybrid.run, *words, wrong, "--out", out)
        assert (answer.status, answer.code) == (2, "usage")
    assert hstrain("export", hybrid.run, *words, "yarn:factor=1.5,original=64", "--out", out).status == 0
    rope = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (1.5, 64)
    report = hstrain("speculate", out, *at[1:], "--limit", 1, "--max-new-tokens", 8, "--json").json
    assert report["lossless"]["equal"] == 1
    assert "YaRN by 1.5" in hstrain("doctor", out, "--store", hybrid.store).out
    # a manifest cannot say so, and training would not be the same
    answer = hstrain("import", out, "--store", hybrid.store)
    assert (answer.status, answer.code) == (2, "start-other-shape")
    assert "yarn_factor is 1.5, expected 1.0" in answer.err


def test_zlab_in_float32_is_what_a_later_export_reads(hstrain: Any, hybrid: Hybrid, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    at = ("--store", hybrid.store, "--dtype", "float32")
    assert hstrain("export", hybrid.run, *at, "--out", first).status == 0
    assert hstrain("export", first, *at, "--out", second).status == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert json.loads((first / "config.json").read_text()) == json.loads((second / "config.json").read_text())


def test_a_released_drafter_is_exported_for_its_own_target_or_the_stores(
    hstrain: Any, hybrid: Hybrid, sliding_run: Path, tmp_path: Path
) -> None:
    at = ("--store", hybrid.store)
    for name, source, layout in (
        ("zlab", sliding_run, "zlab"),
        ("named", sliding_run, "speculators"),
        ("again", tmp_path / "zlab", "speculators"),
    ):
        answer = hstrain("export", source, *at, "--out", tmp_path / name, "--format", layout)
        assert answer.status == 0
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(hybrid.target)
    for name in ("config.json", "README.md"):
        assert "unknown" not in (tmp_path / "again" / name).read_text()
    said = tmp_path / "named/config.json"
    config = json.loads(said.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "some/target"
    said.write_text(json.dumps(config))
    for layout in ("zlab", "speculators"):
        out = tmp_path / f"from-named-{layout}"
        assert hstrain("export", tmp_path / "named", *at, "--out", out, "--format", layout).status == 0
        assert json.loads((out / "provenance.json").read_text())["target"] == "some/target"


def test_export_never_replaces(hstrain: Any, hybrid: Hybrid, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    answer = hstrain("export", hybrid.run, "--store", hybrid.store, "--out", tmp_path / "out")
    assert (answer.status, answer.out, answer.code) == (4, "", "export-exists")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_export_refuses_what_does_not_fit(hstrain: Any, hybrid: Hybrid, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = hstrain("export", tmp_path, "--store", hybrid.store, "--out", out)
    assert (answer.status, answer.code) == (2, "not-a-checkpoint")
    answer = hstrain("export", hybrid.run, "--store", tmp_path, "--out", out)
    assert (answer.status, answer.code) == (2, "not-a-store")
    damaged = tmp_path / "run"
    shutil.copytree(hybrid.run / "checkpoints/step-000008", damaged)
    weights = damaged / "drafter.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    answer = hstrain("export", damaged, "--store", hybrid.store, "--out", out)
    assert (answer.status, answer.code) == (1, "checkpoint-damaged")
    answer = hstrain("export", hybrid.run, "--store", hybrid.store, "--out", out, "--format", "speculators")
    assert (answer.status, answer.code) == (2, "export-unsupported")
    assert "--format zlab" in answer.err
    assert not out.exists()


def test_prompts_are_the_stores(hybrid: Hybrid) -> None:
    assert hscache.open(hybrid.store).sample_ids == list(PROMPTS)
