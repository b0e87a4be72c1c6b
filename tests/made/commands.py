"""Commands run in this process, and what they answered."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Answer:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def code(self) -> str:
        (line,) = [line for line in self.err.splitlines() if line.startswith("error[")]
        return line.removeprefix("error[").split("]: ")[0]


def runner(
    name: str, main: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """Return a function that runs a command with arguments in this process."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return Answer(int(stop.value.code or 0), captured.out, captured.err)

    return run
