"""tools/demo/demo.py: rejected rows are told and left out; any other failure stops it."""

from __future__ import annotations

import sys

import demo
import pytest


def end(status: int, *, rejects: bool) -> None:
    demo.run([sys.executable], "python", ("-c", f"raise SystemExit({status})"), rejects=rejects)


def test_rejected_rows_do_not_stop_the_demo() -> None:
    end(1, rejects=True)
    with pytest.raises(SystemExit):
        end(1, rejects=False)
    with pytest.raises(SystemExit):
        end(2, rejects=True)
