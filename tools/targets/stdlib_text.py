"""The text of the tiny hybrid target: the sources that ship with Python itself, split by file.

Nothing has to be fetched and the licence is clear, which is why this text and no other. A file is held out by a hash
of its name, so the split needs no list, is the same in every process, and holds for files that a later Python adds.
Prompts for tests and benchmarks come from held-out files alone: the target never trained on them.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

STDLIB = Path(sysconfig.get_path("stdlib"))
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
"""Not the library, or tables and boilerplate: more than half of the bytes and little to learn from."""
HELD_OUT_ONE_IN = 10


class Unit(NamedTuple):
    """A function, method or small class, dedented.

    Args:
        name: ``path:line``, unique within one Python version.
        text: Source lines, without a trailing newline.
    """

    name: str
    text: str


def is_held_out(name: str) -> bool:
    """Say whether the file of this name, relative to the library's folder, is kept from training."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % HELD_OUT_ONE_IN == 0


def files(*, held_out: bool) -> list[tuple[str, str]]:
    """Return ``(name, text)`` of the library's sources on one side of the split, in order of name."""
    chosen = []
    for path in STDLIB.rglob("*.py"):
        relative = path.relative_to(STDLIB)
        # _sysconfigdata holds the paths of the machine that built Python
        if SKIPPED_FOLDERS & set(relative.parts[:-1]) or path.name.startswith("_sysconfigdata"):
            continue
        if is_held_out(relative.as_posix()) == held_out:
            chosen.append((relative.as_posix(), path))
    return [
        (name, text) for name, path in sorted(chosen) if (text := path.read_text("utf-8", errors="replace")).strip()
    ]


def units(name: str, text: str, *, max_lines: int = 60) -> Iterator[Unit]:
    """Yield the functions, methods and small classes of a source file, each line at most once."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # some files of the library are broken on purpose
        return
    lines = text.splitlines()
    pending: list[ast.stmt] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        last = node.end_lineno or first
        if last - first < max_lines:
            yield Unit(f"{name}:{first}", textwrap.dedent("\n".join(lines[first - 1 : last])))
        elif isinstance(node, ast.ClassDef):
            pending.extend(reversed(node.body))


def cut(unit: Unit, n_lines: int) -> tuple[str, str]:
    """Split a unit after ``n_lines`` lines into a head, ending in its newline, and a tail without one."""
    lines = unit.text.split("\n")
    return "\n".join(lines[:n_lines]) + "\n", "\n".join(lines[n_lines:])
