"""Let the target write the completions that a drafter is trained on.

Token ids are kept as they were generated: decoding and tokenizing again would give other ids for a few samples in a
hundred. Prompts are taken in windows, sorted by length, decoded in left-padded batches, and written in the order of the
input. In float32 on CPU a batch's greedy text is the teacher-forced argmax token for token; in bf16 a few tokens in a
hundred differ, since batch and single forward round differently.

Batches and their seeds depend only on the prompts, and each finished batch is saved beside the future corpus. A run
that was stopped or killed therefore resumes with the next batch and ends with the same corpus.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hscache.console import Interrupted, Progress, say, stop_on_signal
from hscache.corpus.boundaries import Encoder
from hscache.corpus.chat import ChatTemplate, Conversation, RowFault, conversation
from hscache.corpus.containers import find_files, read_file
from hscache.corpus.formats import read_prompt
from hscache.corpus.origin import origin
from hscache.corpus.tokenize import file_names, load_tokenizer, row_id
from hscache.corpus.writer import CorpusReport, CorpusWriter, Journal, journal_path
from hscache.device import Dtype, pick_device, pick_dtype
from hscache.errors import EnvironmentFault
from hscache.model.facts import end_token_ids, file_digests
from hscache.store.durable import disk_errors

if TYPE_CHECKING:
    import torch

REASONS: dict[str, str] = {
    "bad-json": "the line is not a JSON object",
    "damaged": "the file is damaged where the row is",
    "bad-row": "the row has no prompt, messages or turns, or they are not text or messages",
    "empty-prompt": "the prompt has no tokens",
    "template-refused": "the chat template raises an error on this row",
    "empty-completion": "the target wrote nothing but an end token",
    "too-long": "prompt and completion do not fit into the target's positions",
}
"""Why ``generate`` rejects a row."""
_WINDOW_BATCHES = 16
_FULL_BATCH_TOKENS = 256
"""Prompts up to this length are decoded in batches of the full ``batch_size``."""
_OTHER_SETTINGS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "do_sample", "use_cache",
    "cache_implementation", "output_attentions", "output_hidden_states", "return_dict_in_generate",
    "transformers_version", "_from_model_config",
}  # fmt: skip
"""Fields of a generation config that do not say how the next token is chosen, or that ``generate`` keeps."""
Reject = Callable[[str, int, str, str], None]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: 0 for greedy.
        top_p: Nucleus when sampling.
        seed: Seed of the sampling, per batch; 0 to 2**32 - 1.
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
        row: Row number in that file.
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
    template_kwargs: Mapping[str, Any] | None = None,
    dtype: Dtype = "auto",
    device: str | None = None,
) -> CorpusReport:
    """Let the target complete prompts and write the corpus, or finish an interrupted run.

    Args:
        prompts: JSONL(.gz) or parquet files with ``prompt`` (text or messages), ``messages`` or ``turns`` (the first).
        target: Checkpoint directory.
        out: Parquet corpus to write; until it is complete, finished batches are kept beside it in ``*.batches.jsonl``.
        sampling: How tokens are chosen.
        raw: Continue texts as they are, without the chat template.
        batch_size: Prompts decoded together.
        limit: First N prompts of each file.
        template_kwargs: Variables of the chat template; those of a row win.
        dtype: Precision of the target; ``auto`` is bfloat16 where the device has it, else float32.
        device: Such as ``cuda:0``; None for CUDA if there is one.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-empty``, ``template-missing``,
            ``template-invalid``.
        ConflictError: ``corpus-exists``, ``corpus-begun``.
        EnvironmentFault: ``target-missing``, ``target-keys``, ``disk-full``, ``disk-error``.
        Interrupted: On the first SIGINT or SIGTERM, at the next batch.
    """
    target = target.expanduser()
    tokenizer = load_tokenizer(target)
    made = origin(target, "generate")
    with disk_errors(out), stop_on_signal() as stop, CorpusWriter(out, made) as writer:
        rows = read_prompts(prompts, tokenizer, writer.reject, raw=raw, limit=limit, template_kwargs=template_kwargs)
        ready = _fitting(rows, target, sampling, writer.reject, stop)
        if not ready:
            return writer.report
        where = pick_device(device)
        precision = pick_dtype(dtype, where)
        settings = _settings(ready, target, sampling, batch_size, precision, where)
        with Journal(journal_path(out), settings) as journal:
            n_tokens = sum(len(prompt.ids) for prompt in ready)
            say(f"{len(ready)} prompts, {n_tokens:,} tokens; loading {target.name} ({precision})")
            decoder = _Decoder(target, tokenizer, sampling, precision, where)
            batches = list(_batches([len(prompt.ids) for prompt in ready], batch_size))
            _complete(decoder, ready, batches, journal, stop)
            for i, completion in _in_order(batches, journal.read()):
                _write(writer, ready[i], completion, decoder.eos_ids)
            if not writer.report.samples:  # nothing worth keeping: another try may use other settings
                journal.remove()
    journal_path(out).unlink(missing_ok=True)
    return writer.report


def _fitting(
    prompts: Iterable[Prompt], target: Path, sampling: Sampling, reject: Reject, stop: list[int]
) -> list[Prompt]:
    """Return the prompts whose completions fit into the target's positions."""
    positions = _max_positions(target)
    ready = []
    for prompt in prompts:
        if stop:
            raise Interrupted(stop[0])
        if len(prompt.ids) <= positions - sampling.max_new_tokens:
            ready.append(prompt)
        else:
            detail = f"{len(prompt.ids)} prompt tokens, {positions} positions"
            reject(prompt.source, prompt.row, "too-long", detail)
    return ready


def _max_positions(target: Path) -> int:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(target)).get_text_config()
    except (OSError, ValueError) as error:
        raise EnvironmentFault("target-missing", f"{target}: transformers cannot load it: {error}") from error
    return int(getattr(config, "max_position_embeddings", None) or 1 << 30)


def _settings(
    ready: list[Prompt], target: Path, sampling: Sampling, batch_size: int, dtype: str, device: torch.device
) -> dict[str, Any]:
    """Return the settings that decide the completions: the first line of the journal."""
    prompts = hashlib.sha256()
    for prompt in ready:
        prompts.update(json.dumps(list(asdict(prompt).values())).encode())
    digests = file_digests(target, fast=True)  # sha256 of the weights would cost minutes at each start
    config = target / "generation_config.json"
    if config.is_file():
        digests["generation"] = {config.name: hashlib.sha256(config.read_bytes()).hexdigest()}
    return {
        "generate": 1,
        "prompts": f"{len(ready)} of digest {prompts.hexdigest()[:16]}",
        **asdict(sampling),
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device.type,
        **{name: digest for files in digests.values() for name, digest in files.items()},
    }


def _complete(
    decoder: _Decoder, ready: list[Prompt], batches: list[list[int]], journal: Journal, stop: list[int]
) -> None:
    """Decode the batches that the journal does not have."""
    todo = range(journal.batches, len(batches))
    n_todo = sum(len(batches[k]) for k in todo)
    if n_todo < len(ready):
        say(f"{len(ready) - n_todo} of them were completed in an earlier run")
    progress = Progress("generate", n_todo, "prompts")
    for k in todo:
        if stop:
            raise Interrupted(stop[0])
        journal.append(decoder.decode(k, [ready[i].ids for i in batches[k]]))
        progress.advance(len(batches[k]))
    progress.close()


def _in_order(batches: list[list[int]], results: Iterable[list[list[int]]]) -> Iterator[tuple[int, list[int]]]:
    """Yield number and completion of each prompt in the order of the input, buffering those that finish early."""
    early: dict[int, list[int]] = {}
    following = 0
    for batch, completions in zip(batches, results, strict=True):
        early.update(zip(batch, completions, strict=True))
        while following in early:
            yield following, early.pop(following)
            following += 1


def _write(writer: CorpusWriter, prompt: Prompt, completion: list[int], eos_ids: set[int]) -> None:
    if not completion or completion[0] in eos_ids:
        writer.reject(prompt.source, prompt.row, "empty-completion", f"{prompt.sample_id}: ended at once")
    else:
        writer.add(
            prompt.sample_id,
            prompt.ids + completion,
            [0] * len(prompt.ids) + [1] * len(completion),
            tag=prompt.tag,
            source=prompt.source,
            finish_reason="stop" if completion[-1] in eos_ids else "length",
        )


class _Decoder:
    def __init__(self, target: Path, tokenizer: Any, sampling: Sampling, dtype: str, device: torch.device) -> None:
        import torch
        import transformers

        from hscache.model.loading import load_model

        model: Any = load_model(target, getattr(torch, dtype))[0].to(device)
        self._model, self._device, self._seed, self._torch = model, model.device, sampling.seed, torch
        theirs = model.generation_config
        self.eos_ids = end_token_ids(target, tokenizer)
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(self.eos_ids, default=0)
        choice: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:  # top_k 0 turns it off; otherwise transformers uses 50
            choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        ignored = sorted(theirs.to_diff_dict().keys() - _OTHER_SETTINGS)
        if ignored:
            say(f"{target.name}: this command's sampling options apply; its generation config's {', '.join(ignored)} "
                "have no effect")  # fmt: skip
        self._choice = transformers.GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(self.eos_ids) or None,
            pad_token_id=self._pad_id,
            **choice,
        )
        # transformers fills the fields left open here from the model's own generation config
        model.generation_config = self._choice

    def decode(self, number: int, prompts: list[list[int]]) -> list[list[int]]:
        """Return the completion of each prompt of batch ``number``, its end token included."""
        from hscache.kernels.observe import observe_kernels

        torch = self._torch
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad_id] * (width - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        torch.manual_seed(self._seed * 1_000_003 + number)
        # guarded like a build: a drafter would also learn completions that wrong kernels computed
        with torch.inference_mode(), observe_kernels(self._model):
            out = self._model.generate(input_ids=ids, attention_mask=mask, generation_config=self._choice)
        return [self._cut(row) for row in out[:, width:].tolist()]

    def _cut(self, ids: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(ids) if token in self.eos_ids), len(ids) - 1)
        return ids[: end + 1]


def _batches(n_tokens: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Cut prompts of these lengths into batches, longest first within a window of several batches.

    A batch takes ``batch_size`` prompts, or fewer where padding to the longest would cost too much: one prompt of 2,561
    tokens among 64 of 100 would take 7.5 GB of keys and values on a 135M model, and minutes.
    """
    for window in range(0, len(n_tokens), batch_size * _WINDOW_BATCHES):
        numbers = range(window, min(window + batch_size * _WINDOW_BATCHES, len(n_tokens)))
        order = sorted(numbers, key=lambda i: -n_tokens[i])
        first = 0
        while first < len(order):
            most = max(1, min(batch_size, batch_size * _FULL_BATCH_TOKENS // n_tokens[order[first]]))
            yield order[first : first + most]
            first += most


def read_prompts(
    paths: list[Path],
    tokenizer: Any,
    reject: Reject,
    *,
    raw: bool = False,
    limit: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[Prompt]:
    """Stream the prompts of files.

    Args:
        paths: JSONL(.gz) or parquet files with ``prompt`` (text or messages), ``messages`` or ``turns`` (the first).
        tokenizer: The target's.
        reject: Called with path, row, reason and detail of a row that has no prompt.
        raw: Continue texts as they are, without the chat template.
        limit: First N rows of each file.
        template_kwargs: Variables of the chat template; those of a row win.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``template-missing``, ``template-invalid``.
    """
    files = [file for path in paths for file in find_files(path)]
    names, encode = file_names(files), PromptEncoder(tokenizer, raw=raw, template_kwargs=template_kwargs)
    for file in files:
        for row in islice(read_file(file), limit):
            try:
                if row.value is None:
                    raise RowFault(row.reason, row.fault)
                ids = encode(row.value)
            except RowFault as error:
                reject(str(file), row.number, error.reason, error.detail)
                continue
            tag = None if row.value.get("tag") is None else str(row.value["tag"])
            yield Prompt(file.name, row.number, row_id(row.value, names[file], row.number), ids, tag)
    encode.template.say_ignored()


class PromptEncoder:
    """Turns rows into the ids that a server would give the target.

    Args:
        tokenizer: The target's.
        raw: Continue texts as they are, without the chat template.
        template_kwargs: Variables of the chat template; those of a row win.
    """

    def __init__(self, tokenizer: Any, *, raw: bool = False, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._encoder, self.template = Encoder(tokenizer), ChatTemplate(tokenizer)
        self._raw, self._kwargs = raw, dict(template_kwargs or {})

    def __call__(self, value: Mapping[str, Any]) -> list[int]:
        """Return the prompt's ids.

        Raises:
            RowFault: ``bad-row``, ``empty-prompt``, ``template-refused``.
            InputError: ``template-missing``, ``template-invalid``.
        """
        prompt = read_prompt(value, self._kwargs)
        if isinstance(prompt, str) and not self._raw:
            prompt = conversation([{"role": "user", "content": prompt}], value, self._kwargs)
        if isinstance(prompt, Conversation):
            self.template.check(prompt)
            text, special = self.template.render(prompt, add_generation_prompt=True), False
        else:
            text, special = prompt, True
        ids = self._encoder.encode([text], special=special)[0].ids
        if not ids:
            raise RowFault("empty-prompt", "the prompt has no tokens")
        return ids
