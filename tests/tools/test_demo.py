"""tools/demo/demo.py: a command that fails stops it."""

from __future__ import annotations

import sys

import demo
import pytest


def test_a_command_that_fails_stops_the_demo() -> None:
    demo.run([sys.executable], "python", ("-c", "raise SystemExit(0)"))
    with pytest.raises(SystemExit, match="exit status 1"):
        demo.run([sys.executable], "python", ("-c", "raise SystemExit(1)"))
