"""What the user reads: sizes, durations, and progress as plain lines where there is no terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from hscache.console import (
    Progress,
    command_line,
    counted,
    counts,
    duration,
    emit_json,
    facts,
    figures,
    run_command,
    say,
    size,
    table,
)
from hscache.errors import InputError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (61.4 * 2**30, "61.4 GiB"),
        (5 * 2**40, "5.00 TiB"),
        (3000 * 2**40, "3000.00 TiB"),
    ],
)
def test_sizes_read_in_binary_units(n_bytes: float, text: str) -> None:
    assert size(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (187, "3m07s"), (3599.9, "1h00m"), (18720, "5h12m")],
)
def test_durations_read_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_progress_without_a_terminal_is_a_line_now_and_then_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    progress = Progress("build", 1000, "tok", every_s=10)
    for _ in range(10):
        clock[0] += 4
        progress.advance(100, "2 shards")
    progress.advance(0)
    progress.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines == [
        "build: 300/1,000 tok (30%), 25 tok/s, ETA 28s, 2 shards",
        "build: 600/1,000 tok (60%), 25 tok/s, ETA 16s, 2 shards",
        "build: 900/1,000 tok (90%), 25 tok/s, ETA 4s, 2 shards",
        "build: 1,000/1,000 tok (100%), 25 tok/s, ETA 0s, 2 shards",
    ]


def test_data_goes_to_stdout_and_talk_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("talk")
    emit_json({"a": "ü", "b": [1]})
    captured = capsys.readouterr()
    assert (captured.err, json.loads(captured.out)) == ("talk\n", {"a": "ü", "b": [1]})


def test_tables_are_not_folded_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 120
    table("title", ["name", ("n", ",")], [(long, 1234)])
    facts("more", [("key", "value"), ("longer key", 2), ("unknown", None)])
    out = capsys.readouterr().out
    assert any(long in line and line.rstrip().endswith("1,234") for line in out.splitlines())
    assert out.splitlines()[-2:] == ["  key         value", "  longer key  2"]


def test_cells_have_the_format_of_their_column(capsys: pytest.CaptureFixture[str]) -> None:
    table(
        "title", ["name", ("tau", ".2f"), ("95 %", ">")], [("a", 2.345, "2.1 .. 2.6"), ("b", None, None), ("c", 1, "")]
    )
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split() for line in lines if line.strip()] == [["a", "2.35", "2.1", "..", "2.6"], ["b"], ["c", "1.00"]]


def test_one_is_not_plural() -> None:
    assert [counted(n, "sample") for n in (0, 1, 2, 1024)] == [
        "0 samples",
        "1 sample",
        "2 samples",
        "1,024 samples",
    ]


def test_counts_begin_with_the_most_frequent() -> None:
    assert counts({"b": 1, "c": 3, "a": 1}) == "3 c, 1 a, 1 b"
    assert (counts({}), figures({"code": 2.314, "math": 2.5}, ".2f")) == ("", "code 2.31, math 2.50")


@pytest.mark.parametrize("arguments", [["config", "manifests/build/demo.toml"], ["doctor", "--json"]])
@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_that_had_enough_is_no_failure(arguments: list[str], lines: int) -> None:
    command = [sys.executable, "-c", "from hscache.cli import main; main()", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        for _ in range(lines):
            assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read().decode()
    assert (process.returncode, "Exception" in said) == (0, False), said


def raising(error: BaseException) -> Any:
    app = command_line("x", "Raises an error.")

    @app.command()
    def run() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SystemExit(1), 1, ""),
        (typer.Exit(1), 1, ""),
        (typer.BadParameter("no"), 2, "error[usage]: Invalid value: no\nhint: "),
        (BrokenPipeError(), 0, ""),
        (InputError("corpus-empty", "nothing", hint="more"), 2, "error[corpus-empty]: nothing\nhint: more\n"),
        (OSError(28, "No space left on device"), 3, "error[disk-error]: [Errno 28] No space left on device\n"),
        (OSError("a library's own"), 70, "error[bug]"),
        (KeyError("x"), 70, "error[bug]"),
    ],
)
def test_every_end_of_a_command_has_its_status(
    error: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "run"])
    with pytest.raises(SystemExit) as stop:
        run_command(raising(error))
    assert (stop.value.code, said in capsys.readouterr().err) == (status, True)


def test_clean_leaves_what_the_user_made() -> None:
    """``make clean`` removes what ``make`` made; every run that README tells to write is below runs/ too."""
    # not as a part of the make that may run these tests, which has options of its own
    told = subprocess.run(
        ["make", "-n", "clean", "VENV=v"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")},
    )
    assert told.stdout.split() == ["rm", "-rf", "v", "runs/demo", "runs/demo-smollm2"]
