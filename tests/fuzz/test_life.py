"""A store's life in random order: built in parts, stopped, damaged, read, verified, repaired.

The model is a dictionary of what an undisturbed build holds. Whatever happened before: reading with verification gives
that or an error of ours, ``verify`` finds damage exactly when there is some, and a repair or build ends in the same
bytes as the undisturbed build.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import contents, one_target, small_manifest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import hscache
from hscache.audit.verify import verify
from hscache.build.repair import repair
from hscache.build.run import build
from hscache.errors import HscacheError
from hscache.manifest import BuildManifest
from hscache.model.capture import Capturer
from hscache.store.index import committed_shards


class _Stop(Exception):
    pass


class World:
    """What all examples share: the manifest, one loaded target, the undisturbed store."""

    def __init__(self, folder: Path) -> None:
        self.manifest: BuildManifest = small_manifest(folder)
        self.store = folder / "reference"
        build(self.manifest, self.store)
        self.contents = contents(self.store)
        self.samples = {sample.sample_id: sample for sample in hscache.open(self.store)}


class Life(RuleBasedStateMachine):
    world: World

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="life-"))
        self.store = self.folder / "store"
        self.begun = self.damaged = False

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(batches=st.integers(0, 3))
    @precondition(lambda self: not self.damaged)
    def build_until_stopped(self, batches: int) -> None:
        start, seen = Capturer.start, 0

        def stopping(capturer: Capturer, *args: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen > batches:
                raise _Stop
            return start(capturer, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Capturer, "start", stopping)
            with contextlib.suppress(_Stop):
                build(self.world.manifest, self.store)
        self.begun = True

    @rule()
    @precondition(lambda self: not self.damaged)
    def build_to_the_end(self) -> None:
        build(self.world.manifest, self.store)
        assert contents(self.store) == self.world.contents
        assert verify(self.store).ok
        self.begun = True

    @rule(data=st.data())
    @precondition(lambda self: self.begun and committed_shards(self.store))
    def damage(self, data: st.DataObject) -> None:
        """Flip a byte, cut or delete a file of a shard or of the head."""
        files = sorted(p for part in ("shards", "target") for p in (self.store / part).rglob("*") if p.is_file())
        path = data.draw(st.sampled_from(files))
        how = data.draw(st.sampled_from(["flip", "cut", "delete"]))
        content = bytearray(path.read_bytes())
        if how == "delete" or not content:
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        else:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        self.damaged = True

    @rule()
    @precondition(lambda self: self.begun)
    def check(self) -> None:
        report = verify(self.store)
        missing = {"shard-missing", "target-damaged"}  # of a build that was stopped early
        whole = len(committed_shards(self.store)) == report.shards
        assert report.ok == (whole and not self.damaged)
        if not self.damaged:
            assert {finding.code for finding in report.findings} <= missing

    @rule()
    @precondition(lambda self: self.begun)
    def mend(self) -> None:
        assert repair(self.store).ok
        assert contents(self.store) == self.world.contents
        self.damaged = False

    @invariant()
    def reading_gives_the_truth_or_an_error(self) -> None:
        if not getattr(self, "begun", False):
            return
        try:
            store = hscache.open(self.store)
        except HscacheError:
            assert self.damaged
            return
        for i, sample_id in enumerate(store.sample_ids):
            try:
                sample = store.sample(i, verify=True)
            except HscacheError:
                assert self.damaged
                continue
            wanted = self.world.samples[sample_id]
            assert torch.equal(sample.hidden_states, wanted.hidden_states)
            assert torch.equal(sample.logits.ids, wanted.logits.ids)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with one_target():
        yield World(tmp_path_factory.mktemp("life"))


def live(world: World, examples: int, steps: int) -> None:
    Life.world = world
    how = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=examples < 10,
    )  # fmt: skip
    run_state_machine_as_test(Life, settings=how)


@pytest.mark.thorough
def test_a_few_lives(world: World) -> None:
    live(world, examples=6, steps=8)


@pytest.mark.fuzz
def test_many_lives(world: World) -> None:
    live(world, examples=150, steps=20)
