"""After a draft the target's cache is that of the accepted text, whatever was rejected and whatever its layers keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hstrain.live.target import LiveTarget

from hscache.errors import HscacheError
from tests.conftest import TINY_HYBRID
from tests.made.live import EAGER, FAMILIES, PROMPT, TAPS, checkpoint, live

DRAFT = [33, 71, 5, 5, 402, 18, 250, 90]
PARENTS = [-1, 0, 1, 1, 0, 4, 5, 3]
PATHS = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 7], [0, 4], [0, 4, 5], [0, 4, 5, 6]]


def test_a_state_that_cannot_be_put_back_is_refused(tmp_path: Path):
    FAMILIES["qwen3_5"]().save_pretrained(tmp_path / "qwen3_5")
    with live(tmp_path / "qwen3_5") as target:
        target._mixers.clear()
        target.prefill(PROMPT)
        with pytest.raises(HscacheError) as refused:
            target.verify(DRAFT)
    assert refused.value.code == "target-rollback"
    assert "layer 0" in refused.value.message


def test_taps_outside_the_target_are_refused():
    with pytest.raises(HscacheError) as refused, live(TINY_HYBRID, (0, 8)):
        pass
    assert refused.value.code == "taps-invalid"


@pytest.fixture(scope="module", params=["tiny-hybrid", *FAMILIES])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveTarget]:
    with live(checkpoint(request.param, tmp_path_factory.mktemp("targets"))) as opened:
        yield opened


def kept(target: LiveTarget) -> dict[str, torch.Tensor]:
    """Return copies of all that a target's cache holds."""
    tensors = {}
    for index, layer in enumerate(target.cache.layers):
        for name in ("keys", "values"):
            if getattr(layer, name, None) is not None:
                tensor = getattr(layer, name)
                window = layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else 0
                tensors[f"{index}.{name}"] = tensor[..., -window:, :].clone()
        for name in ("conv_states", "recurrent_states"):
            for key, tensor in getattr(layer, name, {}).items():
                if tensor is not None:
                    tensors[f"{index}.{name}.{key}"] = tensor.clone()
    return tensors


def apart(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference between two caches."""
    assert got.keys() == wanted.keys()
    assert all(got[name].shape == wanted[name].shape for name in got)
    return max(relative(got[name], wanted[name]) for name in got)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def limit(target: LiveTarget) -> float:
    """Return 1e-6, or more where the target itself rounds more: its cache after two passes over a text, or one."""
    target.prefill(PROMPT)
    target.append(DRAFT)
    split = kept(target)
    target.prefill(PROMPT + DRAFT)
    return max(1e-6, 2 * apart(split, kept(target)))


def check(target: LiveTarget, tokens: list[int], parents: list[int] | None, path: list[int], tolerance: float) -> None:
    target.prefill(PROMPT)
    rows = target.verify(tokens, parents)
    target.accept(path)
    cache, after = kept(target), target.append([7]).logits
    text = PROMPT + [tokens[row] for row in path]
    fresh = target.prefill(text)
    assert apart(cache, kept(target)) <= tolerance
    assert relative(rows.states[path], fresh.states[len(PROMPT) :]) <= tolerance
    assert relative(rows.logits[path[-1]], fresh.logits[-1]) <= 2 * tolerance
    assert relative(after, target.append([7]).logits) <= 2 * tolerance


def test_any_length_may_be_accepted(target):
    tolerance = limit(target)
    for length in range(1, len(DRAFT) + 1):
        check(target, DRAFT, None, list(range(length)), tolerance)


def test_any_path_of_a_tree_may_be_accepted(target):
    tolerance = limit(target)
    for path in PATHS:
        check(target, DRAFT, PARENTS, path, tolerance)


def test_step_after_step_ends_where_one_pass_does(target):
    tolerance, text = limit(target), list(PROMPT)
    target.prefill(PROMPT)
    for step, path in enumerate(PATHS * 2):
        tokens = [(token + 3 * step) % 500 for token in DRAFT]
        target.verify(tokens, PARENTS if step % 3 else None)
        path = path if step % 3 else list(range(len(path)))
        target.accept(path)
        text += [tokens[row] for row in path]
    assert target.length == len(text)
    cache = kept(target)
    target.prefill(text)
    assert apart(cache, kept(target)) <= 3 * tolerance


def test_a_chain_given_as_a_tree_is_a_chain(target):
    target.prefill(PROMPT)
    rows = target.verify(DRAFT)
    target.accept([0])
    target.prefill(PROMPT)
    again = target.verify(DRAFT, list(range(-1, len(DRAFT) - 1)))
    assert torch.equal(rows.logits, again.logits)


def test_taps_are_the_outputs_of_the_blocks(target):
    states = target.prefill(PROMPT).states
    wanted = target.loaded.model(
        input_ids=torch.tensor([PROMPT]), output_hidden_states=True, use_cache=False
    ).hidden_states
    assert states.shape == (len(PROMPT), len(TAPS), target.loaded.shape.hidden_size)
    # transformers shows the embedding first, but for Mamba-2, and the last block's output behind the final norm
    first = 0 if type(target.loaded.model).__name__ == "Mamba2ForCausalLM" else 1
    for column, tap in enumerate(TAPS):
        if tap < target.loaded.shape.num_layers - 1:
            torch.testing.assert_close(states[:, column], wanted[tap + first][0], atol=1e-5, rtol=1e-5)


def test_only_where_it_must_does_a_tree_go_path_by_path(target):
    target.prefill(PROMPT)
    target.verify(DRAFT, PARENTS)
    assert target._draft is not None
    keeps_every_key = all(type(layer).__name__ == "DynamicLayer" for layer in target.cache.layers)
    assert target._draft.masked == keeps_every_key
    target.accept([0])


def test_a_draft_waits_for_its_verdict(target):
    target.prefill(PROMPT)
    target.verify(DRAFT)
    with pytest.raises(AssertionError):
        target.verify(DRAFT)
    with pytest.raises(AssertionError):
        target.accept([1])


def test_the_families_are_what_they_are_named():
    assert set(EAGER) <= FAMILIES.keys()
