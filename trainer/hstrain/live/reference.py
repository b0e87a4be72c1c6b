"""Use a serving engine's text as the reference: score the drafter on it, and find where our text first differs.

The live target reads every text once, and its states give the serving walk, as over a sample of a store. If the engine
ends a text without returning the end token, the target's most likely end token is used. An end token from the engine
ends the text even if it is not one of the target's.
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
from hstrain.live.decode import Decoded, Draft
from hstrain.live.server import Answer, PromptFault, Server
from hstrain.live.target import LiveTarget, Prompt
from hstrain.score.walk import SampleScore, check_finite, score_sample


@dataclass(frozen=True)
class Reference:
    """A completion of a serving engine as token ids.

    Attributes:
        ids: Token ids, without the end token.
        end: The engine's end token; None if it gave none.
        stopped: Whether the text ended at an end token.
        ids_from: ``server`` if the engine gave the ids, ``text`` if we tokenized its text.
        stable: Whether prompt and text, tokenized together, give these tokens, as many as the engine counts.
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
        server: The server.
        live: The target, for its end tokens and vocabulary.
        tokenizer: The target's tokenizer.
        prompts: Prompts to complete.
        max_new_tokens: Most tokens of a completion.

    Returns:
        The reference of each prompt or None, and for each prompt without one its ``id``, ``reason`` (a key of
        :data:`hstrain.live.server.REASONS`) and ``detail``.

    Raises:
        EnvironmentFault: The server's errors; ``server-answer`` when no prompt has a reference.
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
    draft: Draft,
    prompt: Prompt,
    reference: Reference,
    ours: Decoded,
    tree_size: int | None = None,
) -> dict[str, Any]:
    """Walk over a reference as serving would, and find where our own text first differs from it.

    Args:
        live: The target; its text is replaced.
        draft: The drafter.
        prompt: The prompt.
        reference: The server's completion of it.
        ours: The target's own greedy completion of it.
        tree_size: Nodes of a draft tree; None for a chain.

    Returns:
        ``ids`` with the end token, ``finish_reason``, ``anchors``, ``accepted`` and ``streaks`` of the walk,
        ``ids_from``, ``stable``, and ``parts``: None if our text is the same, else ``position`` in the completion, the
        ``server``'s token and ``ours``, the target's ``top_ids`` and ``top_logits`` there and their ``gap``; the values
        of a text that has ended before are None.

    Raises:
        EnvironmentFault: ``not-finite``.
    """
    rows, ids, first = live.prefill([*prompt.ids, *reference.ids]), list(reference.ids), len(prompt.ids)
    check_finite("the target", rows.logits, rows.states)
    if reference.stopped and live.eos_ids:
        ends = sorted(live.eos_ids)
        ids.append(ends[int(rows.logits[-1, ends].argmax())] if reference.end is None else reference.end)
    score = _score(live, draft, prompt, ids, rows.states, tree_size)
    kept_N = score.tree_Ns[:, 0] if tree_size else np.minimum(score.streak, draft.tokens)
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
        "parts": _difference(ours, ids),
    }


def score_text(live: LiveTarget, draft: Draft, prompt: Prompt, ids: list[int]) -> SampleScore:
    """Draft from every anchor of a completion, as ``hstrain eval`` does over a sample of a store.

    Args:
        live: The target; its text is replaced.
        draft: The drafter.
        prompt: The prompt.
        ids: The completion.

    Raises:
        EnvironmentFault: ``not-finite``.
    """
    states_TLH = live.prefill([*prompt.ids, *ids[:-1]]).states
    check_finite("the target", states_TLH)
    return _score(live, draft, prompt, ids, states_TLH)


def _score(
    live: LiveTarget, draft: Draft, prompt: Prompt, ids: list[int], states_TLH: torch.Tensor, tree: int | None = None
) -> SampleScore:
    """Score a completion, given the states of all tokens before its last one, at least."""
    mask = torch.ones(len(prompt.ids) + len(ids), dtype=torch.uint8)
    mask[: len(prompt.ids)] = 0
    states, tokens = states_TLH.to("cpu", torch.bfloat16), torch.tensor([*prompt.ids, *ids], dtype=torch.int32)
    sample = Sample(prompt.sample_id, prompt.tag, tokens, mask, states, None, None)
    head = Head(draft.head, live.device, torch.float32)
    return score_sample(draft.drafter, head, sample, trees=[tree] if tree else ())


def _read(answer: Answer, live: LiveTarget, tokenizer: Any, prompt: list[int], max_new_tokens: int) -> Reference:
    """Return the tokens of an answer, after checking them."""
    text = tokenizer.decode(prompt, clean_up_tokenization_spaces=False) + answer.text
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    given = answer.ids
    if given is None:  # tokenized with the prompt: alone, the text may get a leading space and so other tokens
        joins = whole[: len(prompt)] == prompt
        given = whole[len(prompt) :] if joins else tokenizer(answer.text, add_special_tokens=False)["input_ids"]
    size = live.loaded.shape.vocab_size
    unknown = [token for token in given if type(token) is not int or not 0 <= token < size]
    if unknown:
        raise PromptFault("other-tokens", f"{unknown[:8]}, expected ids below {size}")
    n = next((i for i, token in enumerate(given) if token in live.eos_ids), len(given))
    n -= n == len(given) and _last_is_end(answer, tokenizer)
    ids, end = given[:n], given[n] if n < len(given) else None
    if not ids:
        raise PromptFault("empty-completion", f"the text is {answer.text!r}")
    room = live.max_positions - len(prompt) - 1
    if n > room:
        raise PromptFault("other-tokens", f"{n} tokens, expected at most {room}")
    if (written := n + (end is not None)) > max_new_tokens:
        raise PromptFault("too-many-tokens", f"{written} tokens, expected at most {max_new_tokens}")
    stopped = answer.stopped or end is not None
    counted = answer.n_tokens is None or answer.n_tokens in (n, n + stopped)
    after = whole[len(prompt) + n :]
    same = whole == [*prompt, *ids, *after] and (not after or after[0] in {*live.eos_ids, end})
    stable = same and counted and "\ufffd" not in answer.text  # such a text ends inside a character
    return Reference(ids, end, stopped, "text" if answer.ids is None else "server", stable)


def _last_is_end(answer: Answer, tokenizer: Any) -> bool:
    """Return whether the last token is an end token that the target does not know: special, or not in the text."""
    if not answer.stopped or not answer.ids or answer.n_tokens == len(answer.ids) + 1:
        return False  # in the last case the server counts an end token that it does not return
    if answer.ids[-1] in tokenizer.all_special_ids:
        return True
    before, whole = (tokenizer.decode(i, clean_up_tokenization_spaces=False) for i in (answer.ids[:-1], answer.ids))
    return bool(before == answer.text != whole)


def _difference(ours: Decoded, ids: list[int]) -> dict[str, Any] | None:
    """Return the first place where our own completion differs from these tokens, None if they are equal."""
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
    """Return the first position at which two texts differ or only one has ended; None if they are equal."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at
