"""Completions written by the target itself, which is what a drafter must be trained on.

Token ids are kept as they were generated: decoding and tokenizing again would give other ids for a few samples in a
hundred. Prompts are taken in windows, sorted by length, decoded in left-padded batches, and written in the order of the
input. In float32 on CPU a batch's greedy text is the teacher-forced argmax token for token; in bf16 a few tokens in a
hundred differ, since batch and single forward round differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hscache.console import Progress, say
from hscache.corpus.masks import load_tokenizer, read_rows, require_template, row_id
from hscache.corpus.writer import CorpusReport, CorpusWriter
from hscache.errors import EnvironmentFault

REASONS: dict[str, str] = {
    "bad-json": "the line is not a JSON object",
    "bad-row": "the row has no prompt, messages or turns",
    "empty-completion": "the target wrote nothing but an end token",
    "too-long": "prompt and completion do not fit into the target's positions",
}
"""Why ``generate`` rejects a row."""
_WINDOW_BATCHES = 16
_FULL_BATCH_TOKENS = 256
"""Longest prompt with which a batch takes all of ``batch_size``."""
Reject = Callable[[str, int, str, str], None]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Tokens of a completion at most.
        temperature: 0 for greedy.
        top_p: Nucleus when sampling.
        seed: Seed of the sampling, per batch.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids.

    Attributes:
        source: Name of its file.
        row: Its place there.
        sample_id: The row's own id, or file name and row.
        ids: Token ids, ready to be continued.
        tag: The row's tag.
    """

    source: str
    row: int
    sample_id: str
    ids: list[int]
    tag: str | None


def generate_corpus(
    prompts: list[Path],
    target: Path,
    out: Path,
    sampling: Sampling,
    *,
    raw: bool = False,
    batch_size: int = 32,
    limit: int | None = None,
    dtype: str = "bfloat16",
    device: str | None = None,
) -> CorpusReport:
    """Let the target complete prompts and write the corpus.

    Args:
        prompts: JSONL(.gz) or parquet files with ``prompt`` (text or messages), ``messages`` or ``turns`` (the first).
        target: Checkpoint directory.
        out: Parquet corpus to write.
        sampling: How tokens are chosen.
        raw: Continue texts as they are, without the chat template.
        batch_size: Prompts decoded together.
        limit: First N prompts of each file.
        dtype: ``bfloat16`` or ``float32``.
        device: Such as ``cuda:0``; None for CUDA if there is one.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-empty``, ``template-missing``.
        ConflictError: ``corpus-exists``.
        EnvironmentFault: ``target-missing``.
    """
    tokenizer = load_tokenizer(target)
    with CorpusWriter(out) as writer:
        ready = list(read_prompts(prompts, tokenizer, writer.reject, raw=raw, limit=limit))
        say(f"{len(ready)} prompts, {sum(len(p.ids) for p in ready):,} tokens; loading {target.name} ({dtype})")
        decoder = _Decoder(target, tokenizer, sampling, dtype, device)
        progress = Progress("generate", len(ready), "prompts")
        window_size = batch_size * _WINDOW_BATCHES
        for first in range(0, len(ready), window_size):
            window = ready[first : first + window_size]
            for prompt, completion in zip(window, decoder.complete(window, batch_size, progress), strict=True):
                _write(writer, prompt, completion, decoder)
        progress.close()
    return writer.report


def _write(writer: CorpusWriter, prompt: Prompt, completion: list[int] | None, decoder: _Decoder) -> None:
    if completion is None:
        detail = f"{len(prompt.ids)} prompt tokens, {decoder.max_positions} positions"
        writer.reject(prompt.source, prompt.row, "too-long", detail)
    elif not completion or completion[0] in decoder.eos_ids:
        writer.reject(prompt.source, prompt.row, "empty-completion", f"{prompt.sample_id}: ended at once")
    else:
        writer.add(
            prompt.sample_id,
            prompt.ids + completion,
            [0] * len(prompt.ids) + [1] * len(completion),
            tag=prompt.tag,
            source=prompt.source,
            finish_reason="stop" if completion[-1] in decoder.eos_ids else "length",
        )


class _Decoder:
    def __init__(self, target: Path, tokenizer: Any, sampling: Sampling, dtype: str, device: str | None) -> None:
        import torch
        import transformers

        from hscache.device import pick_device

        transformers.utils.logging.disable_progress_bar()
        # "falling back to its reference implementation": the build says what runs, in its own words
        logging.getLogger("transformers").setLevel(logging.ERROR)
        where = pick_device(device)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                str(target.expanduser()), dtype=getattr(torch, dtype)
            )
        except (OSError, ValueError) as error:
            raise EnvironmentFault("target-missing", f"{target}: transformers cannot load it: {error}") from error
        self._model, self._device, self._sampling, self._torch = model.eval().to(where), where, sampling, torch
        eos = model.generation_config.eos_token_id
        self.eos_ids: set[int] = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(self.eos_ids), 0)
        self.max_positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", 1 << 30))
        self._batches = 0

    def complete(self, prompts: list[Prompt], batch_size: int, progress: Progress) -> list[list[int] | None]:
        """Return the completion of each prompt, its end token included; None for one that does not fit."""
        room = self.max_positions - self._sampling.max_new_tokens
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt.ids) <= room]
        order = sorted(fitting, key=lambda i: -len(prompts[i].ids))
        out: list[list[int] | None] = [None] * len(prompts)
        for batch in _batches(order, [len(prompt.ids) for prompt in prompts], batch_size):
            for i, ids in zip(batch, self._decode([prompts[i].ids for i in batch]), strict=True):
                out[i] = ids
            progress.advance(len(batch))
        progress.advance(len(prompts) - len(fitting))
        return out

    def _decode(self, prompts: list[list[int]]) -> list[list[int]]:
        from hscache.target.kernels import observe_kernels

        torch, sampling = self._torch, self._sampling
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        choice: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        torch.manual_seed(sampling.seed * 1_000_003 + self._batches)
        self._batches += 1
        # guarded as a build is: completions by wrong kernels would be learnt too
        with torch.inference_mode(), observe_kernels(self._model):
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=self._pad_id,
                **choice,
            )
        return [self._cut(row) for row in out[:, width:].tolist()]

    def _cut(self, ids: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), len(ids) - 1)
        return ids[: end + 1]


def _batches(order: list[int], n_tokens: list[int], batch_size: int) -> Iterator[list[int]]:
    """Cut prompts, longest first, into batches of ``batch_size``, or fewer where padding to the longest costs more.

    One prompt of 2,561 tokens among 64 of 100 would take 7.5 GB of keys and values on a 135M model, and minutes.
    """
    first = 0
    while first < len(order):
        most = max(1, min(batch_size, batch_size * _FULL_BATCH_TOKENS // n_tokens[order[first]]))
        yield order[first : first + most]
        first += most


def read_prompts(
    paths: list[Path], tokenizer: Any, reject: Reject, *, raw: bool = False, limit: int | None = None
) -> Iterator[Prompt]:
    """Stream the prompts of files.

    Args:
        paths: JSONL(.gz) or parquet files with ``prompt`` (text or messages), ``messages`` or ``turns`` (the first).
        tokenizer: The target's.
        reject: Called with path, row, reason and detail of a row that has no prompt.
        raw: Continue texts as they are, without the chat template.
        limit: First N rows of each file.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``template-missing``.
    """
    for path in paths:
        for row, value, fault in islice(read_rows(path), limit):
            if value is None:
                reject(str(path), row, "bad-json", fault)
                continue
            messages = _messages(value)
            if messages is None:
                reject(str(path), row, "bad-row", f"found {', '.join(value)}; expected prompt, messages or turns")
                continue
            if raw and isinstance(messages, str):
                ids = tokenizer(messages)["input_ids"]
            else:
                require_template(tokenizer)
                chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            tag = None if value.get("tag") is None else str(value["tag"])
            yield Prompt(path.name, row, row_id(value, path, row), list(ids), tag)


def _messages(value: Mapping[str, Any]) -> str | list[dict[str, Any]] | None:
    """Return a row's prompt as text or messages that end with the user's turn, or None."""
    if isinstance(value.get("prompt"), str | list) and value["prompt"]:
        return value["prompt"]  # type: ignore[no-any-return]
    if isinstance(value.get("messages"), list) and value["messages"]:
        messages = list(value["messages"])
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        return messages or None
    if isinstance(value.get("turns"), list) and value["turns"]:
        return str(value["turns"][0])
    return None
