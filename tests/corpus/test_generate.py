"""generate: the target's own tokens, whatever its generation config says; stopped at any moment, the same corpus."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from hscache.cli import main
from hscache.console import Interrupted
from hscache.corpus import generate
from hscache.corpus.generate import REASONS, Sampling, generate_corpus
from hscache.corpus.writer import journal_path, rejects_path
from hscache.errors import ConflictError, EnvironmentFault, HscacheError, InputError
from tests.conftest import TINY_HYBRID
from tests.made.commands import Answer, runner

TEXTS = [
    "def mean(values):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\n",
    "def read(path):\n    with open(path) as file:\n",
    "for i in range(10):\n",
    "x = ",
    "    return self.",
    "try:\n    value = int(text)\n",
]
GREEDY = Sampling(12)
SAMPLED = Sampling(12, temperature=1.0, top_p=0.9, seed=7)


@pytest.fixture
def hscache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    return runner("hscache", main, capsys, monkeypatch)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "prompts.jsonl", [{"id": f"p{i}", "prompt": text} for i, text in enumerate(TEXTS)])


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def copy_target(folder: Path, **generation: Any) -> Path:
    """Copy the tiny hybrid, with other fields in its generation config."""
    shutil.copytree(TINY_HYBRID, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}))
    return folder


def run(
    prompts: Path, out: Path, sampling: Sampling = GREEDY, target: Path = TINY_HYBRID, **options: Any
) -> list[dict[str, Any]]:
    """Generate, and return the corpus's rows."""
    settings = {"raw": True, "batch_size": 2, "dtype": "float32", "device": "cpu", **options}
    generate_corpus([prompts], target, out, sampling, **settings)
    return rows_of(out)


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


# what the target writes


def test_a_checkpoint_without_all_its_weights_is_refused_as_a_build_refuses_it(prompts: Path, tmp_path: Path) -> None:
    target = copy_target(tmp_path / "target")
    weights = load_file(target / "model.safetensors")
    del weights[next(name for name in weights if "layers.3" in name and "down_proj" in name)]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EnvironmentFault, match=r"weights missing: .*layers\.3.*down_proj") as caught:
        run(prompts, tmp_path / "c.parquet", target=target)
    assert caught.value.code == "target-keys"


def test_truncated_weights_are_refused(prompts: Path, tmp_path: Path) -> None:
    target = copy_target(tmp_path / "target")
    whole = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EnvironmentFault) as caught:
        run(prompts, tmp_path / "c.parquet", target=target)
    assert caught.value.code == "target-missing"


PENALTIES = {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2, "min_p": 0.5, "top_k": 1, "temperature": 3.0}


@pytest.mark.parametrize("sampling", [Sampling(24), SAMPLED])
def test_the_checkpoints_own_taste_has_no_effect(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sampling: Sampling
) -> None:
    plain = run(prompts, tmp_path / "a.parquet", sampling)
    assert "no effect" not in capsys.readouterr().err
    target = copy_target(tmp_path / "target", do_sample=True, **PENALTIES)
    assert run(prompts, tmp_path / "b.parquet", sampling, target) == plain
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert "min_p, no_repeat_ngram_size, repetition_penalty, temperature, top_k" in said


@pytest.mark.thorough
def test_taste_in_an_old_checkpoints_config_has_no_effect_either(prompts: Path, tmp_path: Path) -> None:
    target = copy_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "temperature": 0.3, "repetition_penalty": 1.8}))
    for name in ("with", "without"):
        out = tmp_path / f"{name}.parquet"
        assert run(prompts, out, target=target) == run(prompts, tmp_path / f"plain-{name}.parquet")
        (target / "generation_config.json").unlink(missing_ok=True)


def test_all_end_tokens_of_the_checkpoint_end_a_completion(prompts: Path, tmp_path: Path) -> None:
    plain = run(prompts, tmp_path / "a.parquet")
    token = plain[0]["input_ids"][-1]
    rows = run(prompts, tmp_path / "b.parquet", target=copy_target(tmp_path / "target", eos_token_id=[0, token]))
    assert (rows[0]["input_ids"][-1], rows[0]["finish_reason"]) == (token, "stop")
    mask = rows[0]["loss_mask"]
    assert rows[0]["input_ids"] == plain[0]["input_ids"][: len(mask)]
    assert rows[0]["input_ids"][mask.index(1) :].count(token) == 1


@pytest.mark.thorough
def test_temperature_and_top_p_are_honoured(prompts: Path, tmp_path: Path) -> None:
    greedy = run(prompts, tmp_path / "greedy.parquet")
    assert run(prompts, tmp_path / "cold.parquet", Sampling(12, temperature=1e-4)) == greedy
    assert run(prompts, tmp_path / "nucleus.parquet", Sampling(12, temperature=1.0, top_p=1e-6)) == greedy
    warm = run(prompts, tmp_path / "warm.parquet", SAMPLED)
    assert warm != greedy
    assert run(prompts, tmp_path / "again.parquet", SAMPLED) == warm
    assert run(prompts, tmp_path / "other.parquet", Sampling(12, temperature=1.0, top_p=0.9, seed=8)) != warm


def test_nothing_but_top_p_cuts_the_distribution(tmp_path: Path) -> None:
    """transformers' own default takes the best 50 tokens; and each batch draws anew."""
    same = write_rows(tmp_path / "same.jsonl", [{"prompt": "x = "}] * 128)
    rows = run(same, tmp_path / "c.parquet", Sampling(1, temperature=1000.0), batch_size=64)
    assert len({row["input_ids"][-1] for row in rows}) > 100


# rows without a completion

CHAT = [{"role": "user", "content": "x = "}]
FAULTS: dict[str, list[Any]] = {
    "bad-json": ["{cut", "[1]"],
    "bad-row": [
        {"text": "x"},
        {"prompt": ""},
        {"prompt": [1, 2, 3]},
        {"messages": ["hi"]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"turns": [{"role": "user"}]},
    ],
    "damaged": [],
    "empty-prompt": [],
    "template-refused": [{"messages": [{"role": "tool", "content": "3"}]}],
    "empty-completion": [],
    "too-long": [{"prompt": "x = " * 3000}],
}


@pytest.mark.parametrize("reason", [reason for reason in REASONS if FAULTS[reason]])
def test_a_row_that_cannot_be_completed_is_rejected_with_its_reason(tmp_path: Path, reason: str) -> None:
    assert FAULTS.keys() == REASONS.keys()
    parts = [{"type": "text", "text": "x "}, {"type": "text", "text": "= "}]
    good = [{"messages": [*CHAT, {"role": "assistant", "content": None}]}, {"prompt": CHAT}]
    good += [{"turns": ["x = ", 3]}, {"messages": [{"role": "user", "content": parts}]}]
    rows = write_rows(tmp_path / "r.jsonl", [*good, *FAULTS[reason]])
    kept = run(rows, tmp_path / "c.parquet", Sampling(2), raw=False)
    assert len({tuple(row["input_ids"]) for row in kept}) == 1
    assert len(kept) == len(good)
    told = [json.loads(line) for line in rejects_path(tmp_path / "c.parquet").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in told] == [
        (len(good) + i, reason) for i in range(len(FAULTS[reason]))
    ]
    assert all(line["detail"] for line in told)


@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--strict"], 1)])
def test_rows_without_a_prompt_are_a_failure_only_on_wish(
    hscache: Callable[..., Answer], tmp_path: Path, flags: list[str], status: int
) -> None:
    rows = write_rows(tmp_path / "r.jsonl", [{"prompt": "x = "}, *FAULTS["too-long"]])
    args = ["--target", TINY_HYBRID, "-o", tmp_path / "c.parquet", "--raw", "--max-new-tokens", 2, "--json", *flags]
    answer = hscache("generate", rows, *args)
    assert (answer.status, answer.json["rejected"]) == (status, {"too-long": 1})


def test_a_prompt_without_tokens_is_rejected(tmp_path: Path) -> None:
    """Left-padded beside others it would be a row of nothing but padding."""
    target = copy_target(tmp_path / "target")
    (target / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"messages": CHAT}, {"messages": [{"role": "user", "content": ""}]}]
    run(write_rows(tmp_path / "r.jsonl", rows), tmp_path / "c.parquet", Sampling(2), target, raw=False)
    (line,) = rejects_path(tmp_path / "c.parquet").read_text().splitlines()
    assert json.loads(line)["reason"] == "empty-prompt"


def test_when_all_completions_are_empty_nothing_is_left_but_the_reasons(prompts: Path, tmp_path: Path) -> None:
    plain = run(prompts, tmp_path / "a.parquet", limit=1)
    first = plain[0]["input_ids"][plain[0]["loss_mask"].index(1)]
    folder = tmp_path / "out"
    with pytest.raises(InputError, match="1 empty-completion") as caught:
        run(prompts, folder / "b.parquet", target=copy_target(tmp_path / "t", eos_token_id=[0, first]), limit=1)
    assert (caught.value.code, caught.value.hint) == ("corpus-empty", f"see {folder}/b.rejected.jsonl")
    assert [path.name for path in folder.iterdir()] == ["b.rejected.jsonl"]


def test_a_broken_template_is_told_before_the_target_is_loaded(prompts: Path, tmp_path: Path) -> None:
    target = copy_target(tmp_path / "target")
    (target / "chat_template.jinja").write_text("{% for m in messages %}")
    (target / "model.safetensors").unlink()
    with pytest.raises(InputError) as caught:
        run(prompts, tmp_path / "c.parquet", target=target, raw=False)
    assert caught.value.code == "template-invalid"


def test_files_of_one_name_give_other_ids(prompts: Path, tmp_path: Path) -> None:
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(write_rows(tmp_path / folder / "part.jsonl", [{"prompt": "x = "}]))
    settings: dict[str, Any] = {"raw": True, "dtype": "float32", "device": "cpu"}
    generate_corpus(paths, TINY_HYBRID, tmp_path / "c.parquet", Sampling(2), **settings)
    assert [row["sample_id"] for row in rows_of(tmp_path / "c.parquet")] == ["a/part.jsonl-0", "b/part.jsonl-0"]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_has_bounds(hscache: Callable[..., Answer], prompts: Path, seed: int) -> None:
    answer = hscache("generate", prompts, "--target", TINY_HYBRID, "-o", "c.parquet", "--seed", seed)
    assert (answer.status, "--seed" in answer.err) == (2, True)


def test_the_largest_seed_works(prompts: Path, tmp_path: Path) -> None:
    assert run(prompts, tmp_path / "c.parquet", Sampling(2, temperature=1.0, seed=2**32 - 1))


# stopped and gone on


def begin(prompts: Path, out: Path, sampling: Sampling) -> subprocess.Popen[bytes]:
    """Start generate as a user does, with the settings of :func:`run`."""
    words = ["generate", prompts, "--target", TINY_HYBRID, "-o", out, "--raw", "--batch-size", 2, "--dtype", "float32"]
    words += ["--device", "cpu", "--max-new-tokens", sampling.max_new_tokens, "--temperature", sampling.temperature]
    words += ["--top-p", sampling.top_p, "--seed", sampling.seed]
    command = [sys.executable, "-c", "from hscache.cli import main; main()", *map(str, words)]
    return subprocess.Popen(command, cwd=TINY_HYBRID.parents[1], stderr=subprocess.PIPE)


def done(out: Path) -> int:
    """Return how many prompts an unfinished corpus has."""
    path = journal_path(out)
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


def wait_for_batches(process: subprocess.Popen[bytes], out: Path, n: int) -> None:
    limit = time.monotonic() + 120
    while done(out) < n * 2:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "sampling"),
    [(signal.SIGINT, Sampling(48)), (signal.SIGTERM, Sampling(48, temperature=1.0, top_p=0.9, seed=7))],
)
def test_a_signal_stops_it_at_the_next_batch_and_the_same_command_ends_with_the_same_corpus(
    prompts: Path, tmp_path: Path, how: signal.Signals, sampling: Sampling, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "c.parquet"
    with begin(prompts, out, sampling) as process:
        wait_for_batches(process, out, 1)
        process.send_signal(how)
        assert process.stderr
        said = process.stderr.read().decode()
    assert process.returncode == 128 + how, said
    assert "To resume:\n" in said
    assert [path.name for path in out.parent.iterdir()] == ["c.batches.jsonl"]
    before = done(out)
    assert 2 <= before < len(TEXTS)
    rows = run(prompts, out, sampling)
    assert f"{before} of them were completed in an earlier run" in capsys.readouterr().err
    assert [path.name for path in out.parent.iterdir()] == ["c.parquet"]
    assert rows == run(prompts, tmp_path / "whole.parquet", sampling)


@pytest.mark.thorough
def test_kill_9_costs_no_more_than_the_batch_in_work(prompts: Path, tmp_path: Path) -> None:
    out, sampling = tmp_path / "c.parquet", Sampling(48, temperature=1.0, seed=3)
    for n in (1, 2):
        with begin(prompts, out, sampling) as process:
            wait_for_batches(process, out, n)
            process.kill()
        assert done(out) >= n * 2
    assert not out.exists()
    assert run(prompts, out, sampling) == run(prompts, tmp_path / "whole.parquet", sampling)


@pytest.fixture
def stopped(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus with two of four batches done; decoding more of it than the rest fails."""
    out = tmp_path / "out" / "c.parquet"
    decode = generate._Decoder.decode

    def stop(self: Any, number: int, ids: list[list[int]]) -> list[list[int]]:
        if number == 2:
            raise Interrupted(signal.SIGINT)
        return decode(self, number, ids)

    with monkeypatch.context() as patch:
        patch.setattr(generate._Decoder, "decode", stop)
        with pytest.raises(Interrupted):
            run(prompts, out, SAMPLED)
    assert done(out) == 4
    return out


@pytest.mark.parametrize(
    ("cut", "left"),
    [(0, [2, 3]), (1, [1, 2, 3]), (10, [1, 2, 3])],
)
def test_a_line_that_was_cut_off_is_made_again(
    prompts: Path, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int, left: list[int]
) -> None:
    journal = journal_path(stopped)
    journal.write_bytes(journal.read_bytes()[: journal.stat().st_size - cut])
    decode, seen = generate._Decoder.decode, []

    def watch(self: Any, number: int, ids: list[list[int]]) -> list[list[int]]:
        seen.append(number)
        return decode(self, number, ids)

    with monkeypatch.context() as patch:
        patch.setattr(generate._Decoder, "decode", watch)
        rows = run(prompts, stopped, SAMPLED)
    assert seen == left
    assert rows == run(prompts, tmp_path / "whole.parquet", SAMPLED)


def test_a_cut_first_line_is_a_new_beginning(prompts: Path, stopped: Path) -> None:
    journal = journal_path(stopped)
    for header in (b"", journal.read_bytes()[:40]):
        journal.write_bytes(header)
        assert run(prompts, stopped, SAMPLED)
        stopped.unlink()


def test_other_settings_are_refused_with_the_difference_named(prompts: Path, stopped: Path, tmp_path: Path) -> None:
    others: dict[str, dict[str, Any]] = {
        "temperature: 1.0 there, 0.5 here": {"sampling": Sampling(12, temperature=0.5, top_p=0.9, seed=7)},
        "max_new_tokens: 12 there, 13 here": {"sampling": Sampling(13, temperature=1.0, top_p=0.9, seed=7)},
        "batch_size: 2 there, 3 here": {"batch_size": 3},
        "dtype: float32 there, bfloat16 here": {"dtype": "bfloat16"},
        "prompts: 8 of digest": {"limit": 5},
        "generation_config.json: ": {"target": copy_target(tmp_path / "target", eos_token_id=[0, 5])},
    }
    before = journal_path(stopped).read_bytes()
    for said, options in others.items():
        with pytest.raises(ConflictError) as caught:
            run(prompts, stopped, **{"sampling": SAMPLED, **options})
        assert caught.value.code == "corpus-begun"
        assert said in caught.value.message
        assert str(journal_path(stopped)) in str(caught.value.hint)
    assert journal_path(stopped).read_bytes() == before


def test_a_file_of_that_name_that_is_not_ours_stays(prompts: Path, tmp_path: Path) -> None:
    mine = journal_path(tmp_path / "c.parquet")
    for content in (b"mine", b"mine\n", b'{"a": 1}\n', b"[1]\n"):
        mine.write_bytes(content)
        with pytest.raises(ConflictError) as caught:
            run(prompts, tmp_path / "c.parquet")
        assert (caught.value.code, mine.read_bytes()) == ("corpus-begun", content)


def test_two_processes_do_not_write_one_corpus(prompts: Path, stopped: Path) -> None:
    with open(journal_path(stopped), "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="another process"):
            run(prompts, stopped, SAMPLED)


def test_a_full_disk_says_how_to_go_on(
    prompts: Path, stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(generate.Journal, "append", refuse)
        with pytest.raises(HscacheError) as caught:
            run(prompts, stopped, SAMPLED)
    assert (caught.value.code, "again" in str(caught.value.hint)) == ("disk-full", True)
    assert run(prompts, stopped, SAMPLED) == run(prompts, tmp_path / "whole.parquet", SAMPLED)


def test_what_the_template_does_not_use_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "x = ", "tools": [{"function": {"name": "f"}}]}])
    run(prompts, tmp_path / "b.parquet", Sampling(2), raw=False)
    assert (
        "the chat template does not use tools: it is not in the ids (rows that have it: 1)" in capsys.readouterr().err
    )
