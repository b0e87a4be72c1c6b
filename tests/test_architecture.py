"""What the code may import, raise and name: rules that a reader can rely on, held by its syntax tree."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hscache.errors import CODES, HscacheError

ROOT = Path(__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for root, package in ((ROOT, "hscache"), (ROOT / "trainer", "hstrain"))
    for path in sorted((root / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}

# A module imports from rooms below its own and from its own. One line a level, top first; a room is a folder or a
# module that stands alone.
LEVELS = [
    {"hstrain.__main__"},
    {"hstrain.cli"},
    {"hstrain.doctor"},
    {"hstrain.live", "hstrain.plot"},
    {"hstrain.train"},
    {"hstrain.score"},
    {"hstrain.exchange"},
    {"hstrain.run"},
    {"hstrain.data"},
    {"hstrain.manifest"},
    {"hstrain.drafter"},
    {"hstrain"},  # limits of oneDNN's caches
    {"hscache.cli"},
    {"hscache.report"},
    {"hscache.build"},  # repair verifies
    {"hscache.audit"},
    {"hscache.corpus"},  # generate runs the target
    {"hscache.model"},
    {"hscache.kernels"},
    {"hscache.health", "hscache.distance"},
    {"hscache.store"},
    {"hscache.manifest"},  # names the codecs
    {"hscache.rows"},  # the rule of supervised tokens, which stores and anchors follow
    {"hscache.device"},
    {"hscache.console"},
    {"hscache.errors"},
    {"hscache"},  # the version
]
FOR_TRAINER = (
    "hscache.store",
    "hscache.rows",  # which tokens are supervised: the rule by which the store counts
    "hscache.manifest",
    "hscache.distance",
    "hscache.errors",
    "hscache.console",
    "hscache.device",
)
RUNS_THE_TARGET = "hstrain.live.target"
"""The one module of the trainer that may also open the target, to decode with it."""
TO_RUN_IT = ("hscache.model", "hscache.kernels", "hscache.corpus")


def imports(tree: ast.AST, *, module_level_only: bool = False) -> Iterator[str]:
    """Yield the modules that a tree imports, outside ``if TYPE_CHECKING`` blocks."""
    nodes = list(ast.iter_child_nodes(tree))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, ast.unparse(node)
            module = str(node.module)
            # "from hscache import console" imports a module too
            yield from (f"{module}.{a.name}" if f"{module}.{a.name}" in MODULES else module for a in node.names)
        elif not (module_level_only and isinstance(node, ast.FunctionDef)):
            nodes += ast.iter_child_nodes(node)


def room(module: str) -> str:
    """Return the entry of LEVELS that a module belongs to."""
    rooms = [name for level in LEVELS for name in level if f"{module}.".startswith(f"{name}.")]
    return max(rooms, key=len)


def level(module: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room(module) in rooms)


def ours(module: str) -> list[str]:
    return sorted({name for name in imports(TREES[module]) if name.split(".")[0] in ("hscache", "hstrain")})


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    for imported in ours(module):
        if module == "hscache":  # its one lazy import is the reader
            assert imported == "hscache.store.reader"
            continue
        same_room = room(imported) == room(module)
        assert same_room or level(imported) > level(module), f"{module} imports {imported}, which is not below it"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("hstrain")])
def test_the_trainer_reads_stores_and_nothing_else_of_hscache(module: str) -> None:
    rooms = FOR_TRAINER if module != RUNS_THE_TARGET else (*FOR_TRAINER, *TO_RUN_IT)
    for imported in ours(module):
        allowed = imported == "hscache" or imported.startswith(("hstrain", *rooms))
        assert allowed, f"{module} imports {imported}"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("hscache.store")])
def test_the_store_needs_no_torch_to_be_imported(module: str) -> None:
    heavy = {name.split(".")[0] for name in imports(TREES[module], module_level_only=True)}
    assert not heavy & {"torch", "transformers", "datasets", "safetensors"}


def test_importing_the_store_imports_no_torch() -> None:
    modules = ", ".join(name for name in MODULES if name.startswith("hscache.store"))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("command", ["hscache.cli", "hstrain.cli"])
def test_help_imports_nothing_heavy(command: str) -> None:
    code = f"""
import sys
from {command} import main
sys.argv = ["x", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop
heavy = "torch transformers datasets zarr pyarrow numpy pydantic rich.table safetensors xxhash".split()
print("heavy:", *(name for name in heavy if name in sys.modules))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.splitlines()[-1] == "heavy:"
    assert "Usage:" in answer.stdout


def test_no_module_is_named_after_nothing() -> None:
    names = {part for module in MODULES for part in module.split(".")}
    assert not names & {"utils", "util", "helpers", "helper", "common", "base", "misc", "core"}


ERROR_CLASSES = {"HscacheError", *(cls.__name__ for cls in HscacheError.__subclasses__())}


def raised_codes() -> dict[str, set[str]]:
    """Return code -> classes with which the sources make it."""
    found: dict[str, set[str]] = {}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERROR_CLASSES:
                code = node.args[0]
                assert isinstance(code, ast.Constant), f"a code that is not spelled out: {ast.unparse(node)}"
                found.setdefault(str(code.value), set()).add(node.func.id)
    return found


def test_every_code_that_is_raised_is_declared_and_every_declared_one_is_raised() -> None:
    assert raised_codes().keys() == CODES.keys()


def test_a_code_belongs_to_one_class() -> None:
    assert {code: sorted(classes) for code, classes in raised_codes().items() if len(classes) > 1} == {}


def test_codes_are_kebab_case_and_explained() -> None:
    for code, meaning in CODES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert meaning


def strings_outside(tree: ast.Module, name: str) -> set[str]:
    """Return all string constants of a module but those in the assignment to ``name``."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            continue
        found |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


TABLES = [
    (module, name)
    for module, tree in TREES.items()
    for node in tree.body
    if isinstance(node, ast.AnnAssign) and (name := ast.unparse(node.target)) in ("REASONS", "FINDINGS")
]


def test_the_tables_of_reasons_are_found() -> None:
    assert {module for module, _ in TABLES} >= {"hscache.build.plan", "hscache.health", "hscache.audit.findings"}


@pytest.mark.parametrize(("module", "name"), TABLES)
def test_every_reason_of_a_table_is_given_somewhere(module: str, name: str) -> None:
    used: set[str] = set()
    for other, tree in TREES.items():
        used |= strings_outside(tree, name if other == module else "REASONS")
    assert set(getattr(importlib.import_module(module), name)) - used == set()


@pytest.mark.parametrize("package", ["hscache", "hstrain"])
def test_every_command_shows_an_example(package: str) -> None:
    import typer

    app = importlib.import_module(f"{package}.cli").app
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert commands
    for name, command in commands.items():
        text = str(command.help)
        assert f"Example: {package} {name} " in text, name
        assert len(text.split("Example:")[0].strip()) > 20, name
        options = re.findall(r"(?<= )--?[a-z][a-z-]*", text)
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(options) <= known, f"{name}: the example has an option that the command has not"


def test_packages_are_declared() -> None:
    import tomllib

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(declared) == {name for name, path in MODULES.items() if path.name == "__init__.py"}


def test_pytest_looks_into_every_folder_of_tests(request: pytest.FixtureRequest) -> None:
    """``norecursedirs`` once named ``data``, the folder of stored files, and so hid the tests in tests/hstrain/data."""
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert {path for path in folders if any(map(path.match, request.config.getini("norecursedirs")))} == set()
