"""Use a serving engine's text as the reference: score the drafter on it, and find where our text first differs.

Every text is read once by the live target, whose states give the serving walk, the same as over a store's sample. Where
the engine ends a text without returning the end token, the target's most likely end token is used. An end
token that the engine gives is the end, whether it is one of the target's or another that the engine was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hscache.console import Progress
from hscache.errors import EnvironmentFault
from hscache.store.reader import Sample
from hstrain.drafter.losses import Head
from hstrain.drafter.model import Drafter
from hstrain.live.decode import Decoded, Draft
from hstrain.live.server import Answer, PromptFault, Server
from hstrain.live.target import LiveTarget, Prompt
from hstrain.score.walk import check_finite, score_sample


@dataclass(frozen=True)
class Reference:
    """A completion of a serving engine as token ids.

    Attributes:
        ids: Without the end token.
        end: The end token as the engine gave it; None where it gave none.
        stopped: It ended at an end token.
        ids_from: ``server``, or ``text`` where ours are the text's tokens.
        stable: Prompt and text, tokenized together, are these tokens, and as many as the engine counts.
    """

    ids: list[int]
    end: int | None
    stopped: bool
    ids_from: str
    stable: bool


def fetch_references(
    server: Server, live: LiveTarget, tokenizer: Any, prompts: Sequence[Prompt], max_new_tokens: int
) -> tuple[list[Reference | None], list[dict[str, str]]]:
    """Let a server complete prompts, greedily, one after the other.

    Args:
        server: Where.
        live: The target, for its end tokens and vocabulary.
        tokenizer: The target's.
        prompts: What to complete.
        max_new_tokens: Tokens of a completion at most.

    Returns:
        The reference of each prompt, None without one; and for these ``id``, ``reason`` (a key of
        :data:`hstrain.live.server.REASONS`) and ``detail``.

    Raises:
        EnvironmentFault: As the server does; ``server-answer`` when no prompt has a reference.
    """
    references: list[Reference | None] = []
    rejected: list[dict[str, str]] = []
    progress = Progress("reference", len(prompts), "prompts")
    for prompt in prompts:
        try:
            answer = server.complete(prompt.ids, max_new_tokens)
            references.append(_read(answer, live, tokenizer, prompt.ids, max_new_tokens))
        except PromptFault as fault:
            references.append(None)
            rejected.append({"id": prompt.sample_id, "reason": fault.reason, "detail": fault.detail})
        progress.advance(1)
    progress.close()
    if len(rejected) == len(prompts):
        first = rejected[0]
        message = f"{server.url}: none of {len(prompts)} prompts has a completion; {first['id']}: {first['reason']}"
        raise EnvironmentFault(
            "server-answer",
            f"{message}: {first['detail']}",
            hint="the server must serve this target, take prompts as token ids, and have room for them",
        )
    return references, rejected


def score_reference(
    live: LiveTarget,
    drafter: Drafter,
    draft: Draft,
    prompt: Prompt,
    reference: Reference,
    ours: Decoded,
    tree_size: int | None = None,
) -> dict[str, Any]:
    """Walk over a reference as serving would, and say where our own text first parts from it.

    Args:
        live: The target; its text is replaced.
        drafter: On the target's device.
        draft: Of that drafter, for the head.
        prompt: What was completed.
        reference: How.
        ours: The target's own greedy completion.
        tree_size: Nodes of a draft tree; None for a chain.

    Returns:
        ``ids`` with the end token, ``finish_reason``, ``anchors``, ``accepted`` and ``streaks`` of the walk,
        ``ids_from``, ``stable``, and ``parts``: None where our text is the same, else ``position`` in the completion,
        the ``server``'s token and ``ours``, the target's ``top_ids`` and ``top_logits`` there and their ``gap``; None
        for tokens after an end.

    Raises:
        EnvironmentFault: ``not-finite``.
    """
    rows, ids, first = live.prefill([*prompt.ids, *reference.ids]), list(reference.ids), len(prompt.ids)
    check_finite("the target", rows.logits, rows.states)
    if reference.stopped and live.eos_ids:
        ends = sorted(live.eos_ids)
        ids.append(ends[int(rows.logits[-1, ends].argmax())] if reference.end is None else reference.end)
    mask = torch.ones(first + len(ids), dtype=torch.uint8)
    mask[:first] = 0
    states, tokens = rows.states.to("cpu", torch.bfloat16), torch.tensor([*prompt.ids, *ids], dtype=torch.int32)
    sample = Sample(prompt.sample_id, prompt.tag, tokens, mask, states, None, None)
    head = Head(draft.head, live.device, torch.float32)
    score = score_sample(drafter, head, sample, trees=[tree_size] if tree_size else ())
    kept_N = score.tree_Ns[:, 0] if tree_size else score.streak
    accepted = score.walk(kept_N)
    at = np.cumsum([0, *accepted])[:-1]  # one turn: its anchors are consecutive
    return {
        "ids": ids,
        "finish_reason": "stop" if reference.stopped else "length",
        "anchors": (first + at).tolist(),
        "accepted": accepted,
        "streaks": kept_N[at].tolist(),
        "ids_from": reference.ids_from,
        "stable": reference.stable,
        "parts": _parts(ours, ids),
    }


def _read(answer: Answer, live: LiveTarget, tokenizer: Any, prompt: list[int], max_new_tokens: int) -> Reference:
    """Return the tokens of an answer."""
    text = tokenizer.decode(prompt, clean_up_tokenization_spaces=False) + answer.text
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    given = answer.ids
    if given is None:  # of a tokenizer that puts a space before every text, the text's own tokens would be others
        joins = whole[: len(prompt)] == prompt
        given = whole[len(prompt) :] if joins else tokenizer(answer.text, add_special_tokens=False)["input_ids"]
    size = live.loaded.shape.vocab_size
    strange = [token for token in given if type(token) is not int or not 0 <= token < size]
    if strange:
        raise PromptFault("other-tokens", f"{strange[:8]}, expected ids below {size}")
    n = next((i for i, token in enumerate(given) if token in live.eos_ids), len(given))
    n -= n == len(given) and _ends_otherwise(answer, tokenizer)
    ids, end = given[:n], given[n] if n < len(given) else None
    if not ids:
        raise PromptFault("empty-completion", f"the text is {answer.text!r}")
    room = live.max_positions - len(prompt) - 1
    if n > room:
        raise PromptFault("other-tokens", f"{n} tokens, room for {room}")
    if (written := n + (end is not None)) > max_new_tokens:
        raise PromptFault("too-many-tokens", f"{written} tokens, asked for {max_new_tokens}")
    stopped = answer.stopped or end is not None
    counted = answer.n_tokens is None or answer.n_tokens in (n, n + stopped)
    behind = whole[len(prompt) + n :]
    same = whole == [*prompt, *ids, *behind] and (not behind or behind[0] in {*live.eos_ids, end})
    stable = same and counted and "\ufffd" not in answer.text  # a text that ends inside a character
    return Reference(ids, end, stopped, "text" if answer.ids is None else "server", stable)


def _ends_otherwise(answer: Answer, tokenizer: Any) -> bool:
    """Tell whether the last token is an end token, though none of the target's: a special one, or not in the text."""
    if not answer.stopped or not answer.ids or answer.n_tokens == len(answer.ids) + 1:
        return False  # in the last case the server counts one more, which it keeps back
    if answer.ids[-1] in tokenizer.all_special_ids:
        return True
    before, whole = (tokenizer.decode(i, clean_up_tokenization_spaces=False) for i in (answer.ids[:-1], answer.ids))
    return bool(before == answer.text != whole)


def _parts(ours: Decoded, ids: list[int]) -> dict[str, Any] | None:
    """Return where our own completion first is another than these tokens."""
    at = first_difference(ours.ids, ids)
    if at is None:
        return None
    here: dict[str, Any] = {"position": at, "server": ids[at] if at < len(ids) else None}
    if at == len(ours.ids):
        return {**here, "ours": None, "top_ids": None, "top_logits": None, "gap": None}
    logits = ours.top_logits[at]
    found = {"ours": ours.ids[at], "top_ids": ours.top_ids[at], "top_logits": logits, "gap": logits[0] - logits[1]}
    return {**here, **found}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the first place where two texts differ, or where one of them has ended; None where they are equal."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at
