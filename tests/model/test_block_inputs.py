"""What a drafter's block reads of a token is, bit by bit, what the target's own first block reads of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_targets
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from hstrain.drafter.losses import Head
from hstrain.drafter.model import block_inputs
from hstrain.live.decode import Draft, decode
from hstrain.live.target import Sampling, open_target
from hstrain.run.checkpoint import load_drafter
from hstrain.score.walk import score_sample
from hstrain.train.fit import fit
from hstrain.train.parallel import World
from hstrain.train.step import Trainer
from torch import Tensor

import hscache
from hscache.audit.verify import verify
from hscache.build.run import build
from hscache.console import say
from hscache.errors import ConflictError
from hscache.manifest import parse_manifest
from hscache.model import loading
from hscache.store.head import load_head
from tests.made.live import PROMPT
from tests.made.trainers import train_manifest, training_store

pytestmark = pytest.mark.usefixtures("no_disk")

WIDTH = 48  # its root is no number of bf16, nor of float32
_DENSE = {**tiny_targets._dense(), "hidden_size": WIDTH, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, float]]] = {
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 16}, {"float32": 6.928203105926514, "bfloat16": 6.9375}),
    "granite": ("Granite", {"embedding_multiplier": 12.3}, {"float32": 12.300000190734863, "bfloat16": 12.3}),
    "afmoe": ("Afmoe", {"mup_enabled": True}, {"float32": 6.928203105926514, "bfloat16": 6.928203230275509}),
    "qwen3": ("Qwen3", {}, {"float32": 1.0, "bfloat16": 1.0}),
}
"""transformers' class, changes of the config, and the factor that each precision multiplies with: in the embedding and
rounded, in the model by a number of the config, in the model by a number that no field has, not at all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Callable[[str], Path]:
    """Return a function that writes a family's checkpoint, in bf16: what is run in float32 must not be rounded so."""

    def make(name: str) -> Path:
        kind, changes, _ = FAMILIES[name]
        config, model = (getattr(transformers, f"{kind}{part}") for part in ("Config", "ForCausalLM"))
        if not (folder / name).exists():
            made = tiny_targets._init(0, lambda: model(config(**_DENSE, **changes)))
            made.bfloat16().save_pretrained(folder / name)
        return folder / name

    return make


def make_store(target: Path, texts: list[list[int]], out: Path, dtype: str) -> Path:
    """Cache texts of which all but the prompt is supervised."""
    rows = [
        {"id": f"r{i}", "input_ids": ids, "loss_mask": [int(at >= len(PROMPT)) for at in range(len(ids))]}
        for i, ids in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), corpus := out.with_suffix(".parquet"))
    raw = {
        "target": {"path": str(target), "dtype": dtype, "attn_implementation": "eager"},
        "states": {"taps": [0, 2]},
        "corpus": {"path": str(corpus)},
    }
    build(parse_manifest(raw, "test"), out, device="cpu")
    return out


MANIFEST = train_manifest(
    drafter={"block_size": 6, "mask_token_id": 1, "sliding_window": 16, "logit_std": 0, "head_dim": 16},
    data={"validation": 0.0, "max_tokens": 256, "pack_tokens": 512, "anchors": 16},
    optim={"name": "muon", "lr": 2e-2, "max_steps": 30, "epochs": 30},
    run={"log_every": 30, "validate_every": 100, "checkpoint_every": 100},
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_drafter_reads_what_the_targets_first_block_reads(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str, dtype: str
) -> None:
    ids = torch.arange(200, 230)
    store = make_store(checkpoint(name), [[*PROMPT, *range(20, 40)]], tmp_path / "store", dtype)
    assert load_head(store / "target").embed_scale == FAMILIES[name][2][dtype]
    trainer = Trainer(MANIFEST, store, World.join("cpu"))
    found = block_inputs(ids, trainer.head.embed_VH, trainer.config).view(len(ids), 6, WIDTH)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(name), dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    seen: list[Tensor] = []
    model.get_decoder().layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    masks = torch.full((len(ids),), MANIFEST.drafter.mask_token_id)
    with torch.inference_mode():
        model(input_ids=torch.stack((ids, masks)), use_cache=False)
    assert torch.equal(found[:, 0].float(), seen[0][0].float())
    assert all(torch.equal(found[:, slot].float(), seen[0][1].float()) for slot in range(1, 6))
    assert verify(store).ok


def test_a_target_that_does_something_else_is_told_and_its_rows_are_read_as_they_are(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(loading, "say", lambda text: [told.append(text), say(text)])
    forward = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: F.normalize(forward(self, ids), dim=-1))
    store = make_store(checkpoint("qwen3"), [[*PROMPT, *range(20, 40)]], tmp_path / "store", "float32")
    head = load_head(store / "target")
    assert head.facts["embed_scale"] is None
    assert head.embed_scale == 1.0
    assert len(told) == 1
    assert "Qwen3ForCausalLM: the first block reads something other than a multiple" in told[0]


def test_a_run_begun_on_raw_rows_does_not_go_on_with_scaled_ones(tmp_path: Path) -> None:
    """The same store, built again by a version that measures the factor."""
    manifest = train_manifest(data={"validation": 0.0}, optim={"max_steps": 1})
    fit(manifest, training_store(tmp_path / "before").path, tmp_path / "run", device="cpu")
    again = training_store(tmp_path / "again", says={"embed_scale": 1.0}).path
    fit(manifest, again, tmp_path / "run", device="cpu")
    scaled = training_store(tmp_path / "scaled", says={"embed_scale": 8.0}).path
    with pytest.raises(ConflictError) as caught:
        fit(manifest, scaled, tmp_path / "run", device="cpu")
    assert caught.value.code == "run-other-manifest"
    assert "store.embed_scale was None, is 8.0" in caught.value.message


def test_the_walk_from_the_cache_is_live_decoding_where_embeddings_are_scaled(
    checkpoint: Callable[[str], Path], folder: Path
) -> None:
    target, tokens = str(checkpoint("gemma2")), 40
    how: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attn_implementation": "eager"}
    prompts = [PROMPT, PROMPT[3:] + PROMPT[:3], PROMPT[::-1]]
    with open_target(target, (0, 2), **how) as (live, _):
        live.eos_ids = set()
        texts = [prompt + decode(live, prompt, Sampling(tokens)).ids for prompt in prompts]
    store = make_store(Path(target), texts, folder / "walked", "float32")
    fit(MANIFEST, store, folder / "run", device="cpu")
    drafter, _ = load_drafter(folder / "run")
    assert drafter.config.embed_scale == FAMILIES["gemma2"][2]["float32"]
    stored, opened, walked = load_head(store / "target"), hscache.open(store), []
    with open_target(target, (0, 2), **how) as (live, _):
        live.eos_ids = set()
        head, draft = Head(stored, "cpu", torch.float32), Draft(drafter, stored, live.device)
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            score = score_sample(drafter, head, opened.sample(i, taps=drafter.config.taps))
            out = decode(live, prompt, Sampling(tokens), draft)
            assert prompt + out.ids == text
            assert [step.accepted for step in out.steps] == score.walk(score.streak)
            walked += score.walk(score.streak)
    assert len(set(walked)) > 2, "some drafts are accepted, some are not"
