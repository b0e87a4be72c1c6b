"""The oracles, other projects' packages, imported into this process and only when these tests are asked for.

``python tools/bench/oracle_env.py`` installs them once; then ``python -m pytest -m oracle``.
"""

from __future__ import annotations

import ast
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oracle_env
import pytest
import tiny_targets


@pytest.fixture(scope="session", autouse=True)
def _oracles() -> None:
    if not oracle_env.is_ready():
        pytest.skip("the oracles are not installed: python tools/bench/oracle_env.py")
    oracle_env.import_oracles()


@pytest.fixture(scope="session")
def dflash(_oracles: None) -> Any:
    """``dflash.model``, the reference of the DFlash authors."""
    with warnings.catch_warnings(action="ignore"):
        import dflash.model
    return dflash.model


@pytest.fixture(scope="session")
def speculators(_oracles: None) -> Any:
    """The package speculators, silent."""
    with warnings.catch_warnings(action="ignore"):
        import speculators
        from loguru import logger
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    return speculators


@pytest.fixture(scope="session")
def tensorstore(_oracles: None) -> Any:
    """The package tensorstore."""
    import tensorstore

    return tensorstore


@pytest.fixture(scope="session")
def vllm(_oracles: None) -> SimpleNamespace:
    """vLLM's functions that read a drafter's config; the model's file imports all of vLLM, so the rest is not run."""
    algos, model = (oracle_env.vllm_directory() / file for file in oracle_env.VLLM_FILES)
    names = ["_SLIDING_ATTENTION", "_dflash_layer_causal", "_resolve_layer_attention"]
    tree = ast.parse(model.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if _defines(node) in names]
    assert [_defines(node) for node in tree.body] == names
    made: dict[str, Any] = {}
    # annotations name classes that are not imported
    exec(compile(tree, model, "exec", flags=annotations.compiler_flag), made)
    return SimpleNamespace(
        update_dflash=runpy.run_path(str(algos))["update_dflash"],
        resolve_layer_attention=made["_resolve_layer_attention"],
    )


def _defines(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    return node.name if isinstance(node, ast.FunctionDef) else None


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense target on disk, as wide as the drafters of tests/drafters.py."""
    return tiny_targets.save("qwen3", tmp_path_factory.mktemp("target"))
