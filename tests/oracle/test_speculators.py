"""Our drafter, masks, targets and losses against those of speculators 0.9.0, from the same weights and states.

Equal, within float32: the block states with full attention, the target's distribution of every slot, the losses
``kl_div`` = ``kl-exact``, ``ce`` = ``ce-argmax`` and ``tv``, the weights exp(-(k-1)/gamma) with slot 0 left out, D-PACE
on text that is the target's own, and the gradients. Defined in another way there, each shown by a test below:

- *Sliding window.* Every slot of a block sees the context from anchor - W on, W rows before the anchor; here, as in
  transformers, dflash and vLLM, slot k sees from anchor + k - (W - 1) on. Inside the block their window does not cut.
- *Mean.* They divide by the number of slots, here by the sum of their weights: the same gradient times a constant for
  the fixed weights, another one for D-PACE, whose weights change.
- *Final state.* They take the target's last state before its final norm and apply that norm themselves, with the
  drafter's epsilon; here the stored state is behind the norm, computed by the target.
- *Labels of* ``ce`` *and accuracies* are the argmax of the target's logits, never the sample's tokens; D-PACE takes its
  confidence from the same loss.
- *Where a block ends.* A slot trains when its own token is supervised, also behind a gap, and in the next document of
  the pack; here a block ends with the target's turn and with the document.
- *Anchors* are any supervised token but the last B of the whole pack, whether or not the next one is supervised.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hstrain.data.anchors import anchor_candidates, slot_tokens
from hstrain.drafter.attention import Blocks
from hstrain.drafter.losses import BlockLoss, Head, SlotTargets, head_loss
from hstrain.drafter.model import Drafter, block_inputs
from hstrain.exchange.export import export_drafter
from hstrain.exchange.importer import read_checkpoint
from torch import Tensor

from hscache.store.head import TargetHead
from tests.made import drafters

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
B, GAMMA = 8, 4.0
LENGTHS = (40, 33)
"""Tokens of the two documents of the pack."""


@dataclass(frozen=True)
class Case:
    """Two documents, their states, and anchors in both."""

    ids_T: Tensor
    mask_T: Tensor
    states_TLH: Tensor
    last_TH: Tensor
    final_TH: Tensor
    anchors: tuple[int, ...]
    head: TargetHead

    @property
    def documents(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    @property
    def positions(self) -> Tensor:
        return torch.cat([torch.arange(n) for n in LENGTHS])

    def starts(self) -> Tensor:
        """First row of each anchor's document."""
        first = torch.tensor([0, LENGTHS[0]])
        return first[self.documents[list(self.anchors)]]

    def blocks(self) -> Blocks:
        at, lo = torch.tensor(self.anchors), self.starts()
        return Blocks(at - lo, lo, at, B, sum(LENGTHS))


@pytest.fixture(scope="module")
def case(target_folder: Path) -> Case:
    """Text that the target would have written, so that its argmax is the sample's token."""
    target = transformers.AutoModelForCausalLM.from_pretrained(target_folder)
    made = torch.Generator().manual_seed(0)
    ids, states, last = [], [], []
    for n in LENGTHS:
        prompt = torch.randint(0, 512, (1, 6), generator=made)
        with torch.no_grad():
            text = target.generate(prompt, max_new_tokens=n - 6, do_sample=False, eos_token_id=None, pad_token_id=0)
            kept: list[Tensor] = []
            hook = target.model.layers[-1].register_forward_hook(lambda _, __, out, kept=kept: kept.append(out))
            hidden = target(text, output_hidden_states=True).hidden_states
            hook.remove()
        ids.append(text[0])
        states.append(torch.stack([hidden[tap + 1][0] for tap in (0, 1, 2)], 1))
        last.append((kept[0] if isinstance(kept[0], Tensor) else kept[0][0]).reshape(n, -1))
    last_TH = torch.cat(last)
    mask = torch.ones(sum(LENGTHS), dtype=torch.int64)
    mask[:6] = mask[40:46] = 0
    facts = drafters.head().facts
    embed, lm_head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    head = TargetHead(embed, lm_head, target.model.norm.weight.detach(), facts)
    with torch.no_grad():
        final_TH = target.model.norm(last_TH)
    return Case(torch.cat(ids), mask, torch.cat(states), last_TH, final_TH, (6, 9, 20, 32, 46, 50, 60), head)


def load(speculators: Any, folder: Path) -> Any:
    config = speculators.DFlashSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"  # its default, flex attention, compiles on a CPU
    return speculators.DFlashDraftModel.from_pretrained(folder, config=config)


@pytest.fixture
def pair(speculators: Any, target_folder: Path, case: Case, tmp_path: Path) -> Any:
    """Return a function: kind of drafter -> ours, and theirs from our export.

    Sliding and full layers together are not exported, since vLLM reads them wrongly; their own class does not. So the
    weights of such a drafter are exported as those of sliding layers, and the types are then written into the config.
    """

    def make(kind: str, **changes: Any) -> tuple[Drafter, Any]:
        drafter, folder = drafters.drafter(kind, **changes), tmp_path / kind
        written, types = drafter, drafter.config.layer_types
        if kind == "mixed":
            written = Drafter(replace(drafter.config, layer_types=(drafters.SLIDING,) * len(types)))
            written.load_state_dict(drafter.state_dict())
        export_drafter(
            "speculators", written, case.head, folder, provenance={"target": str(target_folder)}, dtype="float32"
        )
        content = json.loads((folder / "config.json").read_text())
        content["transformer_layer_config"]["layer_types"] = types
        (folder / "config.json").write_text(json.dumps(content))
        return drafter, load(speculators, folder)

    return make


@pytest.fixture
def theirs(speculators: Any, case: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs theirs at the case's anchors -> hidden, logits, targets, mask, loss, metrics."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core, metrics

    def run(model: Any, case: Case = case, loss: str = "kl_div", weights: str = "fixed-exp-decay") -> Any:
        anchors = torch.tensor(case.anchors)
        monkeypatch.setattr(core, "select_anchors", lambda *_: (anchors, torch.ones(len(anchors), dtype=torch.bool)))
        inputs = (case.states_TLH.flatten(1)[None], case.ids_T[None], case.mask_T[None], case.last_TH[None])
        documents, positions = case.documents[None], case.positions[None]
        hidden, logits, targets, mask, _ = model._backbone_forward(
            *inputs, documents, positions, max_anchors=len(anchors)
        )
        found, numbers = metrics.compute_metrics(
            logits, targets, mask, B, gamma=GAMMA, loss_config=resolve_loss_config(loss, "eager"),
            per_position_loss_weight=weights,
        )  # fmt: skip
        return hidden[0].unflatten(0, (-1, B)), logits[0], targets[0].unflatten(0, (-1, B)), mask[0], found, numbers

    return run


def our_hidden(drafter: Drafter, case: Case) -> Tensor:
    inputs = block_inputs(case.ids_T[list(case.anchors)], case.head.embed, drafter.config)
    return drafter(case.states_TLH, case.positions, inputs, case.blocks()).unflatten(0, (-1, B))


def our_loss(hidden_NBH: Tensor, case: Case, kind: Any, weights: Any = "exp") -> BlockLoss:
    tokens = []
    for anchor, first in zip(case.anchors, case.starts().tolist(), strict=True):
        document = slice(first, first + LENGTHS[first > 0])
        ids, mask = case.ids_T[document].numpy().astype(np.int32), case.mask_T[document].numpy().astype(np.uint8)
        tokens.append(slot_tokens(ids, mask, np.array([anchor - first]), B))
    tokens_NK = torch.from_numpy(np.concatenate(tokens))
    rows_NK = torch.tensor(case.anchors)[:, None] + torch.arange(B - 1)  # the row before the slot's token
    head = Head(case.head, "cpu", torch.float32)
    top = head.logits(case.final_TH).argmax(-1, keepdim=True).int()
    targets = SlotTargets(tokens_NK, rows_NK.clamp_max(len(top) - 1), top, torch.zeros(top.shape), case.final_TH)
    return head_loss(hidden_NBH[:, 1:], head, targets, kind=kind, weights=weights, gamma=GAMMA)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 10000.0}, {"rope_theta": 1e7}, {"yarn_factor": 4.0, "yarn_positions": 32}]
)
def test_full_layers_compute_the_same_blocks(pair: Any, theirs: Any, case: Case, rope: dict[str, float]) -> None:
    drafter, model = pair("full", **rope)
    assert model.target_layer_ids == [1, 2, 3]
    with torch.no_grad():
        hidden, logits, *_ = theirs(model)
        got = our_hidden(drafter, case)
    assert relative(got, hidden) <= 1e-5
    assert relative(case.head.logits(got).flatten(0, 1), logits) <= 1e-5


def test_their_target_is_ours_a_row_earlier(pair: Any, theirs: Any, case: Case) -> None:
    """Slot k is compared with what the target says at the position before it, of normed states."""
    with torch.no_grad():
        _, _, targets, *_ = theirs(pair("full")[1])
        rows = torch.tensor(case.anchors)[:, None] + torch.arange(B - 1)
        assert relative(case.head.logits(case.final_TH[rows]), targets[:, 1:]) <= 1e-5
    assert (targets[:3, 1:].argmax(-1) == case.ids_T[rows + 1][:3]).all()  # the text is the target's own


def test_their_final_norm_has_the_drafters_epsilon(pair: Any, case: Case) -> None:
    model = pair("full", rms_norm_eps=1e-3)[1]
    assert model.verifier_norm.variance_epsilon == 1e-3
    assert torch.equal(model.verifier_norm.weight, case.head.norm)
    assert relative(model.verifier_norm(case.last_TH), case.final_TH) > 1e-4


def their_visibility(model: Any, case: Case, window: int | None) -> Tensor:
    """Return bool [N, B, T + N * B]."""
    mask = model._create_attention_mask(
        case.documents[None], sum(LENGTHS), torch.tensor(case.anchors), torch.device("cpu"), window, False
    )
    return mask[0, 0].bool().unflatten(0, (-1, B))


def our_visibility(case: Case, window: int | None) -> Tensor:
    """Return bool [N, B, T + N * B] of the masks that sdpa uses, put together from its groups."""
    blocks, T = case.blocks(), sum(LENGTHS)
    seen = torch.zeros(len(blocks), B, T + len(blocks) * B, dtype=torch.bool)
    for (some, rows), mask in zip(blocks.groups, blocks.group_masks(window), strict=True):
        group = mask.unflatten(0, (-1, B))
        n_rows = rows.stop - rows.start
        seen[some, :, rows] = group[..., :n_rows]
        seen[some, :, T + some.start * B : T + some.stop * B] = group[..., n_rows:]
    return seen


@pytest.mark.parametrize("window", [None, 3, 11, 1000])
def test_masks_are_the_same_but_for_the_window(pair: Any, case: Case, window: int | None) -> None:
    _, model = pair("mixed")
    theirs, ours = their_visibility(model, case, window), our_visibility(case, window)
    if window is None:
        assert torch.equal(ours, theirs)
        return
    assert not (ours & ~theirs).any()  # ours sees nothing that theirs does not
    T, slot = sum(LENGTHS), torch.arange(B)[None, :, None]
    row, anchor = torch.arange(T), torch.tensor(case.anchors)[:, None, None]
    beyond = (row >= anchor - window) & (row < anchor + slot - (window - 1)) & (row < anchor)
    beyond &= row >= case.starts()[:, None, None]
    assert torch.equal((theirs & ~ours)[..., :T], beyond)
    inside = (theirs & ~ours)[..., T:].unflatten(-1, (-1, B))
    own = torch.arange(B)
    behind = own[:, None] - own[None, :] >= window
    assert torch.equal(inside, torch.eye(len(case.anchors), dtype=torch.bool)[:, None, :, None] & behind[None, :, None])


@pytest.mark.parametrize("kind", ["sliding", "mixed"])
def test_sliding_layers_compute_the_same_under_one_mask(
    pair: Any, theirs: Any, case: Case, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, model = pair(kind)
    with torch.no_grad():
        other, *_ = theirs(model)

        def mask(*_: Any, sliding_window: int | None = None, **__: Any) -> Tensor:
            return our_visibility(case, sliding_window).flatten(0, 1)[None, None]

        monkeypatch.setattr(model, "_create_attention_mask", mask)
        hidden, *_ = theirs(model)
    got = our_hidden(drafter, case)
    assert relative(got, hidden) <= 1e-5
    assert relative(got, other) > 1e-2  # their own window gives other states: a drafter is not served as it was trained


PAIRS = [("kl_div", "kl-exact"), ("ce", "ce-argmax"), ("tv", "tv")]


@pytest.mark.parametrize(("loss", "kind"), PAIRS)
def test_losses_differ_by_what_they_are_divided_by(pair: Any, theirs: Any, case: Case, loss: str, kind: str) -> None:
    drafter, model = pair("full")
    _, _, _, mask, found, _ = theirs(model, loss=loss)
    ours = our_loss(our_hidden(drafter, case), case, kind)
    slots = int(mask.sum())
    assert slots == int(ours.trained_NK.sum())
    assert math.isclose(float(found) * (slots + 1e-5), float(ours.loss_sum), rel_tol=1e-5)
    expected = sum(math.exp(-k / GAMMA) * int(ours.trained_NK[:, k].sum()) for k in range(B - 1))
    assert math.isclose(float(ours.weight_sum), expected, rel_tol=1e-6)


@pytest.mark.parametrize(("loss", "kind"), PAIRS)
def test_gradients_are_the_same_but_for_that(pair: Any, theirs: Any, case: Case, loss: str, kind: str) -> None:
    drafter, model = pair("full")
    _, _, _, mask, found, _ = theirs(model, loss=loss)
    (found * (mask.sum() + 1e-5)).backward()
    our_loss(our_hidden(drafter, case), case, kind).loss_sum.backward()
    others = dict(model.named_parameters())
    for name, parameter in drafter.named_parameters():
        assert relative(parameter.grad, others[name].grad) <= 1e-4, name
    frozen = {name for name, parameter in others.items() if not parameter.requires_grad}
    assert others.keys() - frozen == dict(drafter.named_parameters()).keys()


def test_dpace_weights_are_the_same(pair: Any, theirs: Any, case: Case) -> None:
    drafter, model = pair("full")
    _, _, _, mask, found, _ = theirs(model, loss="ce", weights="dpace")
    ours = our_loss(our_hidden(drafter, case), case, "ce", "dpace")
    assert math.isclose(float(found) * (int(mask.sum()) + 1e-5), float(ours.loss_sum), rel_tol=1e-5)


def test_their_accepted_length_is_our_streak_where_the_text_is_the_targets(pair: Any, theirs: Any, case: Case) -> None:
    drafter, model = pair("full")
    numbers = theirs(model)[-1]
    ours = our_loss(our_hidden(drafter, case), case, "ce")
    streak = (ours.correct_NK.int().cumprod(1) * ours.trained_NK).sum(1)
    assert float(numbers["eal_sum"] / numbers["eal_total"]) == pytest.approx(float(streak.float().mean()) + 1)


def test_they_train_behind_a_gap_and_in_the_next_document(pair: Any, theirs: Any, case: Case) -> None:
    mask_T = case.mask_T.clone()
    mask_T[22] = 0  # a gap behind the anchor 20
    mask_T[40:] = 1  # the next document begins supervised
    changed = replace(case, mask_T=mask_T, anchors=(20, 36))
    drafter, model = pair("full")
    trained = theirs(model, changed)[3].view(-1, B)[:, 1:].bool()
    ours = our_loss(our_hidden(drafter, changed), changed, "kl-exact").trained_NK
    assert trained.tolist() == [[True, False, True, True, True, True, True], [True] * 7]
    assert ours.tolist() == [[True] + [False] * 6, [True] * 3 + [False] * 4]


def test_their_anchors(speculators: Any) -> None:
    from speculators.models.dflash.utils import select_anchors

    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1])
    anchors, valid = select_anchors(mask[None], 20, 4)
    assert anchors[valid].tolist() == [0, 1, 3, 5, 6, 7]
    assert anchor_candidates(mask.numpy().astype(np.uint8)).tolist() == [5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("kind", drafters.KINDS)
@pytest.mark.parametrize("architecture", ["Qwen3Config", "LlamaConfig"])
def test_a_checkpoint_that_speculators_wrote_is_read(
    speculators: Any, target_folder: Path, case: Case, tmp_path: Path, kind: str, architecture: str
) -> None:
    shape = drafters.config(kind)
    sliding = {"sliding_window": 11, "use_sliding_window": True} if kind != "full" else {}
    layers = getattr(transformers, architecture)(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=len(shape.layer_types),
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, max_position_embeddings=32768,
        layer_types=list(shape.layer_types), rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, **sliding,
    )  # fmt: skip
    theirs = speculators.DFlashDraftModel.from_training_args(
        layers, verifier_name_or_path=str(target_folder), target_layer_ids=[1, 2, 3], draft_vocab_size=512,
        block_size=B, mask_token_id=7, draft_attn_impl="sdpa",
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    read, facts = read_checkpoint(tmp_path / "theirs", case.head)
    assert read.config == shape
    assert (facts.layout, facts.verifier) == ("speculators", str(target_folder))
    # it writes sliding_window_non_causal = False, also where full layers are, which vLLM then makes causal
    assert ["vLLM will serve all of the" in note for note in facts.notes] == ([] if kind == "sliding" else [True])
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name


def test_speculators_own_converter_reads_our_zlab_export(
    speculators: Any, target_folder: Path, case: Case, theirs: Any, tmp_path: Path
) -> None:
    from speculators.convert.dflash.converter import DFlashConverter

    drafter = drafters.drafter("full")
    export_drafter(
        "zlab", drafter, case.head, tmp_path / "ours", provenance={"target": str(target_folder)}, dtype="float32"
    )
    with warnings.catch_warnings(action="ignore"):
        DFlashConverter().convert(tmp_path / "ours", tmp_path / "converted", str(target_folder), validate=False)
    read, _ = read_checkpoint(tmp_path / "converted", case.head)
    assert read.config == drafter.config
    with torch.no_grad():
        hidden, *_ = theirs(load(speculators, tmp_path / "converted"))
        assert relative(our_hidden(drafter, case), hidden) <= 1e-5
