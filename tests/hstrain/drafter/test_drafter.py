"""The drafter against its description: a slow reference from transformers' Qwen3 parts, and what may influence what."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hstrain.data.packs import Pack
from hstrain.drafter.model import Drafter, block_inputs, count_parameters, initialise
from hstrain.manifest import drafter_config, load_train_manifest
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from tests.made.stores import HIDDEN, TAPS
from tests.made.trainers import BLOCK, MASK, WINDOW, draft, little_config, little_drafter, little_head, pack_of, sample

PRESET = Path(__file__).parents[3] / "manifests/train/qwen3.6-27b.toml"
SLIDING = {"layer_types": ["sliding_attention"]}
HEAD = little_head()


def preset() -> object:
    spec = load_train_manifest(PRESET).drafter
    return drafter_config(spec, taps=(1, 16, 31, 46, 61), hidden_size=5120, vocab_size=248320, num_layers=64)


def test_the_headline_drafter_has_the_published_size() -> None:
    config = preset()
    assert count_parameters(config) == (1_730_213_120, 58)
    assert (config.block_size, config.mask_token_id, config.sliding_window) == (16, 248070, 2048)
    assert config.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    assert [config.window(i) for i in range(5)] == [2048] * 4 + [None]


def test_parameters_are_named_as_serving_engines_name_them() -> None:
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Drafter(preset()).named_parameters()}
    of_a_layer = {
        "self_attn.q_proj.weight": (4096, 5120),
        "self_attn.k_proj.weight": (1024, 5120),
        "self_attn.v_proj.weight": (1024, 5120),
        "self_attn.o_proj.weight": (5120, 4096),
        "self_attn.q_norm.weight": (128,),
        "self_attn.k_norm.weight": (128,),
        "mlp.gate_proj.weight": (17408, 5120),
        "mlp.up_proj.weight": (17408, 5120),
        "mlp.down_proj.weight": (5120, 17408),
        "input_layernorm.weight": (5120,),
        "post_attention_layernorm.weight": (5120,),
    }
    wanted = {f"layers.{i}.{name}": shape for i in range(5) for name, shape in of_a_layer.items()}
    assert shapes == wanted | {"fc.weight": (5120, 25600), "hidden_norm.weight": (5120,), "norm.weight": (5120,)}


@pytest.mark.parametrize(("factor", "positions"), [(4.0, 32768), (2.5, 4096), (64.0, 100)])
@pytest.mark.parametrize(("theta", "width"), [(10000.0, 16), (1e6, 128), (1e7, 64)])
def test_yarn_is_that_of_transformers(factor: float, positions: int, theta: float, width: int) -> None:
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": positions}
    hf = Qwen3Config(head_dim=width, max_position_embeddings=int(factor * positions), rope_parameters=rope)
    shape = {"head_dim": width, "rope_theta": theta}
    drafter = Drafter(little_config(**shape))
    stretched = Drafter(dataclasses.replace(drafter.config, yarn_factor=factor, yarn_positions=positions))
    at = torch.tensor([0, 1, 2, 77, positions - 1])
    cos, sin = qwen3.Qwen3RotaryEmbedding(hf)(torch.zeros(1), at[None])
    for got, expected, plain in zip(stretched.rope(at), (cos[0], sin[0]), drafter.rope(at), strict=True):
        torch.testing.assert_close(got[:, 0], expected, atol=positions * 2e-7, rtol=0)
        assert (got - plain).abs().max() > 0.01


def reference(drafter: Drafter, states_TLH: Tensor, positions_T: Tensor, anchor_id: int, anchor: int) -> Tensor:
    """Return the normed states [B, H] of one block over the rows of one sample before its anchor, query by query."""
    c, w = drafter.config, dict(drafter.named_parameters())
    hf = Qwen3Config(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    rotary = qwen3.Qwen3RotaryEmbedding(hf)

    def norm(x: Tensor, name: str) -> Tensor:
        module = qwen3.Qwen3RMSNorm(x.shape[-1], c.rms_norm_eps)
        module.weight.data = w[name]
        return module(x)

    slots = anchor + torch.arange(c.block_size)
    at = torch.cat((positions_T, slots))
    cos, sin = rotary(states_TLH.float(), at[None])
    context = norm(states_TLH.float().flatten(1) @ w["fc.weight"].T, "hidden_norm.weight")
    ids = torch.tensor([anchor_id] + [c.mask_token_id] * (c.block_size - 1))
    x = HEAD.embed_VH.float()[ids]
    for i, kind in enumerate(c.layer_types):
        p = f"layers.{i}."
        inner = norm(x, p + "input_layernorm.weight")
        both = torch.cat((context, inner))
        q, k, v = (
            (y @ w[f"{p}self_attn.{name}_proj.weight"].T).view(1, len(y), -1, c.head_dim)
            for name, y in (("q", inner), ("k", both), ("v", both))
        )
        q, k = norm(q, f"{p}self_attn.q_norm.weight"), norm(k, f"{p}self_attn.k_norm.weight")
        padded = torch.cat((q.new_zeros(1, len(context), *q.shape[2:]), q), 1).transpose(1, 2)
        q, k = qwen3.apply_rotary_pos_emb(padded, k.transpose(1, 2), cos, sin)
        q, k, v = q[0, :, len(context) :], k[0], v[0].transpose(0, 1)
        out = torch.zeros(c.block_size, c.num_heads, c.head_dim)
        for slot in range(c.block_size):
            keys = [t for t in range(len(at)) if t >= len(context) or positions_T[t] < anchor]
            if kind == "sliding_attention":
                here = anchor + slot
                keys = [
                    t for t in keys if here - (c.sliding_window - 1) <= at[t] and (t < len(context) or at[t] <= here)
                ]
            for head in range(c.num_heads):
                of = head * c.num_kv_heads // c.num_heads
                scores = (k[of, keys] @ q[head, slot] / c.head_dim**0.5).softmax(-1)
                out[slot, head] = scores @ v[of, keys]
        x = x + out.flatten(1) @ w[f"{p}self_attn.o_proj.weight"].T
        mlp = qwen3.Qwen3MLP(hf)
        mlp.load_state_dict({f"{n}_proj.weight": w[f"{p}mlp.{n}_proj.weight"] for n in ("gate", "up", "down")})
        x = x + mlp(norm(x, p + "post_attention_layernorm.weight"))
    return norm(x, "norm.weight")


@pytest.mark.parametrize("layers", [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]])
@torch.no_grad()
def test_a_pack_gives_what_each_block_gives_alone_by_transformers_parts(layers: list[str]) -> None:
    drafter = little_drafter(little_config(layer_types=layers))
    parts = [(sample(17, seed=1), [3, 4, 9, 15]), (sample(9, seed=2), [5]), (sample(23, seed=3), [1, 20])]
    got = iter(draft(drafter, HEAD, pack_of(parts)))
    for one, anchors in parts:
        for a in anchors:
            states = one.hidden_states[:a]
            want = reference(drafter, states, torch.arange(a), int(one.input_ids[a]), a)
            torch.testing.assert_close(next(got), HEAD.logits(want), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_context_and_draft_give_what_forward_gives() -> None:
    drafter, pack = little_drafter(), pack_of([(sample(17, seed=1), [3, 4, 9]), (sample(11, seed=2), [5, 8])])
    inputs = block_inputs(pack.anchor_ids_N, HEAD.embed_VH.float(), drafter.config)
    blocks = pack.blocks(BLOCK, "sdpa")
    whole = drafter(pack.states_TLH, pack.positions_T, inputs, blocks)
    context = drafter.context(pack.states_TLH, pack.positions_T)
    assert [k.shape for k, _ in context] == [(len(pack.positions_T), 2, 4)] * 2
    torch.testing.assert_close(drafter.draft(inputs, blocks, context), whole, atol=1e-6, rtol=1e-6)


PARTS = [(sample(14, seed=1), [3, 6, 12]), (sample(20, seed=2), [4, 6, 7, 15]), (sample(12, seed=3), [5, 9])]


def logits_of(drafter: Drafter, pack: Pack) -> Tensor:
    with torch.no_grad():
        return draft(drafter, HEAD, pack)


def with_states(part: tuple, at: int) -> tuple:
    """Return a part of a pack with other states at one token."""
    one, anchors = part
    states = one.hidden_states.clone()
    states[at] += 3.0
    return dataclasses.replace(one, hidden_states=states), anchors


def with_token(part: tuple, at: int) -> tuple:
    one, anchors = part
    ids = one.input_ids.clone()
    ids[at] = (ids[at] + 5) % MASK
    return dataclasses.replace(one, input_ids=ids), anchors


def test_a_block_depends_on_states_before_its_anchor_and_on_no_others() -> None:
    drafter = little_drafter(little_config(layer_types=["full_attention", "full_attention"]))
    before, anchors = logits_of(drafter, pack_of(PARTS)), [a for _, some in PARTS for a in some]
    for at in range(20):
        after = logits_of(drafter, pack_of([PARTS[0], with_states(PARTS[1], at), PARTS[2]]))
        for n, a in enumerate(anchors):
            sees = 3 <= n < 7 and at < a
            assert torch.equal(before[n], after[n]) is not sees, f"block {n} at {a}, states of token {at}"
            if sees:
                assert ((before[n] - after[n]).abs().amax(-1) > 1e-4).all()


def test_a_block_depends_on_its_own_anchor_token_and_on_no_other_token() -> None:
    drafter = little_drafter()
    before = logits_of(drafter, pack_of(PARTS))
    for at in range(20):
        after = logits_of(drafter, pack_of([PARTS[0], with_token(PARTS[1], at), PARTS[2]]))
        for n in range(len(before)):
            its = 3 <= n < 7 and PARTS[1][1][n - 3] == at
            assert torch.equal(before[n], after[n]) is not its, f"block {n}, token {at}"


def test_a_block_does_not_notice_its_neighbours() -> None:
    drafter = little_drafter()
    alone = logits_of(drafter, pack_of([PARTS[1]]))
    among = logits_of(drafter, pack_of([PARTS[2], PARTS[1], PARTS[0]]))[2:6]
    torch.testing.assert_close(among, alone, atol=1e-6, rtol=1e-6)
    fewer = logits_of(drafter, pack_of([(PARTS[1][0], [6, 15])]))
    torch.testing.assert_close(fewer, alone[[1, 3]], atol=1e-6, rtol=1e-6)


def test_a_sliding_layer_sees_window_less_one_tokens_before_its_query_and_not_one_more() -> None:
    drafter = little_drafter(little_config(**SLIDING))
    one, anchor = sample(20, seed=2), 12
    before = logits_of(drafter, pack_of([(one, [anchor])]))[0]
    for at in range(anchor):
        after = logits_of(drafter, pack_of([with_states((one, [anchor]), at)]))[0]
        for slot in range(BLOCK):
            sees = at >= anchor + slot - (WINDOW - 1)
            assert torch.equal(before[slot], after[slot]) is not sees, f"slot {slot}, states of token {at}"


def test_a_sliding_layer_is_causal_inside_the_block_and_a_full_one_is_not() -> None:
    for layer, causal in (("sliding_attention", True), ("full_attention", False)):
        drafter, pack = little_drafter(little_config(layer_types=[layer])), pack_of([(sample(20, seed=2), [12])])
        inputs = block_inputs(pack.anchor_ids_N, HEAD.embed_VH.float(), drafter.config)
        changed = inputs.clone()
        changed[2] += 1.0
        with torch.no_grad():
            a, b = (
                drafter(pack.states_TLH, pack.positions_T, x, pack.blocks(BLOCK, "sdpa")) for x in (inputs, changed)
            )
        same = [torch.equal(x, y) for x, y in zip(a, b, strict=True)]
        assert same == [causal, causal, False, False]


def test_positions_are_counted_in_the_sample_and_only_their_distance_matters() -> None:
    drafter, part = little_drafter(), (sample(20, seed=2), [6, 15])
    near, far = (pack_of([part], start=start) for start in (0, 1000))
    assert far.positions_T.tolist() == [1000 + t for t in range(15)]
    torch.testing.assert_close(logits_of(drafter, near), logits_of(drafter, far), atol=2e-3, rtol=2e-3)
    late = dataclasses.replace(near, positions_T=near.positions_T + 1)
    assert not torch.allclose(logits_of(drafter, near), logits_of(drafter, late), atol=2e-2)


def test_the_context_mixes_its_taps_in_order() -> None:
    drafter = little_drafter()
    states = sample(5).hidden_states
    mixed = drafter.mix(states)
    assert mixed.shape == (5, HIDDEN)
    by_tap = drafter.fc.weight.view(HIDDEN, len(TAPS), HIDDEN)
    want = drafter.hidden_norm(torch.einsum("hlk,tlk->th", by_tap, states.float()))
    torch.testing.assert_close(mixed, want, atol=1e-5, rtol=1e-5)


def test_under_autocast_the_drafter_gives_nearly_the_same() -> None:
    drafter, pack = little_drafter(), pack_of(PARTS)
    with torch.autocast("cpu", torch.bfloat16):
        rough = logits_of(drafter, pack)
    exact = logits_of(drafter, pack)
    assert not torch.equal(rough, exact)
    assert (rough - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_gradient_checkpointing_changes_no_gradient(kind: str) -> None:
    gradients = []
    for recompute in (False, True):
        drafter = little_drafter(little_config(layer_types=[kind, kind]))
        drafter.gradient_checkpointing = recompute
        draft(drafter, HEAD, pack_of(PARTS)).square().sum().backward()
        gradients.append([p.grad for p in drafter.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert all(g.abs().sum() > 0 for g in gradients[0])


def test_first_weights_are_a_function_of_the_seed() -> None:
    a, b, c = (Drafter(little_config()) for _ in range(3))
    for drafter, seed in ((a, 0), (b, 0), (c, 1)):
        torch.manual_seed(seed * 7 + id(drafter) % 5)  # whatever torch's own generator holds
        initialise(drafter, seed)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.fc.weight, c.fc.weight)
    assert float(a.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.2)
    assert a.norm.weight.eq(1).all()
    assert count_parameters(a.config) == (sum(p.numel() for p in a.parameters()), 11 * 2 + 3)
