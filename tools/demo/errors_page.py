"""Print hscache/ERRORS.md: every error code with its meaning, grouped by class and exit status.

python tools/demo/errors_page.py > hscache/ERRORS.md
"""

from __future__ import annotations

import ast
from pathlib import Path

from hscache.errors import CODES, HscacheError

ROOT = Path(__file__).parents[2]
HEAD = """# Error codes

Made by `python tools/demo/errors_page.py > hscache/ERRORS.md`; do not edit by hand. The codes are stable: scripts may
match on them. A message says what was given, what was expected and where; a hint names the next step.
"""


def classes_of_codes() -> dict[str, str]:
    """Return code -> name of the class that the sources raise it with."""
    names, found = {cls.__name__ for cls in HscacheError.__subclasses__()}, {}
    for package in (ROOT / "hscache", ROOT / "trainer" / "hstrain"):
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                    found[ast.literal_eval(node.args[0])] = node.func.id
    return found


def page() -> str:
    """Return the text of hscache/ERRORS.md."""
    classes, parts = classes_of_codes(), [HEAD]
    for cls in HscacheError.__subclasses__():
        rows = [f"| `{code}` | {meaning} |" for code, meaning in CODES.items() if classes[code] == cls.__name__]
        title = f"## {cls.__name__}: exit status {cls.exit_code}"
        parts.append("\n".join([title, "", str(cls.__doc__), "", "| code | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
