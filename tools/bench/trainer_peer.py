"""speculators' DFlash model, to be trained beside ours from the same weights on the same blocks.

Its code does all of its side: masks, targets from the final state, loss, metrics. What is replaced is where its weights
come from (ours are copied in, under the same names) and its choice of anchors (it is told ours), so that both sides do
the same work. Not for the process that measures ours: importing it costs memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import oracle_env
import torch
from hstrain.drafter.model import Drafter
from hstrain.exchange.layouts import qwen3_config
from torch import Tensor

from hscache.store.head import TargetHead


@dataclass(frozen=True)
class Documents:
    """Whole samples one behind another, and where blocks begin; what its data pipeline would hand over.

    Attributes:
        states_TLH: [T, L, H] tapped states, in any float type.
        final_TH: [T, H] states behind the final norm.
        ids_T: int64 [T].
        mask_T: int64 [T], 1 where supervised.
        documents_T: int64 [T] number of the sample, -1 for padding.
        positions_T: int64 [T] position in the sample.
        anchors_N: int64 [N] rows of the anchors.
    """

    states_TLH: Tensor
    final_TH: Tensor
    ids_T: Tensor
    mask_T: Tensor
    documents_T: Tensor
    positions_T: Tensor
    anchors_N: Tensor


def join(parts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]], block_size: int) -> Documents:
    """Put samples together and pad by a block, as it must be possible to anchor at the last token.

    Args:
        parts: Of each sample: states, final states, ids, mask and anchors.
        block_size: B.
    """
    lengths = [len(ids) for _, _, ids, _, _ in parts]
    starts = [sum(lengths[:i]) for i in range(len(parts))]
    columns = [torch.cat([part[i] for part in parts]) for i in range(4)]
    states, final, ids, mask = (torch.cat((c, c.new_zeros(block_size, *c.shape[1:]))) for c in columns)
    documents = [torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((block_size,), -1)]
    positions = [torch.arange(n) for n in [*lengths, block_size]]
    anchors = torch.cat([part[4] + start for part, start in zip(parts, starts, strict=True)])
    return Documents(states, final, ids.long(), mask.long(), torch.cat(documents), torch.cat(positions), anchors)


class Speculators:
    """Its model with our weights.

    Args:
        drafter: Gives shape and weights; full layers only mean the same on both sides.
        head: The target's.
        attention: ``sdpa`` or ``eager``; its default, flex attention, has no backward pass on a CPU.
        loss: Of its losses: ``ce``, ``kl_div``, ``tv``.
        weights: ``fixed-exp-decay`` or ``dpace``.
        gamma: Of the former.
    """

    def __init__(
        self, drafter: Drafter, head: TargetHead, *, attention: str, loss: str, weights: str, gamma: float
    ) -> None:
        oracle_env.import_oracles()
        from loguru import logger
        from speculators import DFlashDraftModel, DFlashSpeculatorConfig
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import core
        from speculators.proposals.greedy import GreedyTokenProposalConfig
        from transformers import Qwen3Config

        logger.remove()
        shape = drafter.config
        layers = Qwen3Config(**{k: v for k, v in qwen3_config(shape).items() if k not in ("model_type", "rope_theta")})
        layers._attn_implementation = attention
        config = DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=shape.vocab_size,
            block_size=shape.block_size,
            aux_hidden_state_layer_ids=[tap + 1 for tap in shape.taps],
            mask_token_id=shape.mask_token_id,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.block_size - 1)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )
        self.model: Any = DFlashDraftModel(config)
        # its own norm of the final state is made to undo the division in loss()
        self._gain_H = head.norm.float() + (1.0 if head.facts["norm_kind"] == "1+w" else 0.0)
        theirs = {
            "embed_tokens.weight": head.embed,
            "lm_head.weight": head.lm_head,
            "verifier_lm_head.weight": head.lm_head,
            "verifier_norm.weight": self._gain_H,
        }
        self.model.load_state_dict({**drafter.state_dict(), **theirs})
        self.model.train()
        self._names = list(drafter.state_dict())
        self._core = core
        self._options = {
            "loss_config": resolve_loss_config(loss, "eager"),  # its fused losses need Triton
            "per_position_loss_weight": weights,
            "gamma": gamma,
        }

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return what trains: the drafter's own weights."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def loss(self, batch: Documents) -> Tensor:
        """Return its loss, a mean over slots, of a batch."""
        valid = torch.ones(len(batch.anchors_N), dtype=torch.bool)
        self._core.select_anchors = lambda *_: (batch.anchors_N, valid)
        _, loss, _ = self.model(
            hidden_states=batch.states_TLH.flatten(1)[None].float(),
            input_ids=batch.ids_T[None],
            loss_mask=batch.mask_T[None],
            verifier_last_hidden_states=(batch.final_TH.float() / self._gain_H)[None],
            document_ids=batch.documents_T[None],
            position_ids=batch.positions_T[None],
            max_anchors=len(batch.anchors_N),
            **self._options,
        )
        return loss  # type: ignore[no-any-return]

    def drafter_weights(self) -> dict[str, Tensor]:
        """Return its weights under our names."""
        state = self.model.state_dict()
        return {name: state[name] for name in self._names}
