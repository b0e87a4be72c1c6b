"""Let the target write the completions that a drafter is trained on.

Token ids are kept as they were generated: decoding and tokenizing again would give other ids for a few samples in a
hundred. Prompts are taken in windows, sorted by length, decoded in left-padded batches, and written in the order of the
input. In float32 on CPU a batch's greedy text is the teacher-forced argmax token for token; in bf16 a few tokens in a
hundred differ, since batch and single forward round differently.

Batches and their seeds depend only on the prompts, and each finished batch is saved beside the future corpus. A run
that was stopped or killed therefore resumes with the next batch and ends with the same corpus.

With a serving engine (:mod:`hscache.corpus.endpoint`) the prompts are rendered here all the same, and the engine gets
their ids; of the target's directory only the configuration and the tokenizer are read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hscache.console import Progress, check_stop, counted, say, stop_on_signal
from hscache.corpus.boundaries import Encoder
from hscache.corpus.chat import ChatTemplate, Conversation, RowFault, conversation
from hscache.corpus.containers import find_files, read_file
from hscache.corpus.endpoint import AnswerCheck, PromptFault, Server, ask
from hscache.corpus.formats import read_prompt
from hscache.corpus.origin import origin
from hscache.corpus.tokenize import file_names, load_tokenizer, row_id
from hscache.corpus.writer import CorpusReport, CorpusWriter, Journal, journal_path
from hscache.device import Dtype, pick_device, pick_dtype
from hscache.errors import EnvironmentFault
from hscache.model.facts import end_token_ids, file_digests, tokenizer_files
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
    "too-long": "prompt and completion do not fit into the target's positions, or into the server's context",
}
"""Why ``generate`` rejects a row; :data:`hscache.corpus.endpoint.REASONS` has those of a serving engine."""
_WINDOW_BATCHES = 16
_FULL_BATCH_TOKENS = 256
"""Prompts up to this length are decoded in batches of the full ``batch_size``."""
_OTHER_SETTINGS = {
    "bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "do_sample", "use_cache",
    "cache_implementation", "output_attentions", "output_hidden_states", "return_dict_in_generate",
    "transformers_version", "_from_model_config",
}  # fmt: skip
"""Fields of a generation config that do not say how the next token is chosen, or that ``generate`` keeps."""
_NOTES = {
    "end_added": "completions got the end token that the server left out of the ids: {n}",
    "from_text": "completions tokenized from the server's text, because it gives no ids: {n}",
}
Reject = Callable[[str, int, str, str], None]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: 0 for greedy.
        top_p: Nucleus when sampling.
        seed: Seed of the sampling, from which each batch or request gets its own; 0 to 2**32 - 1.
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
    server: Server | None = None,
    concurrency: int = 8,
) -> CorpusReport:
    """Let the target complete prompts and write the corpus, or finish an interrupted run.

    Args:
        prompts: JSONL(.gz) or parquet files with ``prompt`` (text or messages), ``messages`` or ``turns`` (the first).
        target: Checkpoint directory; with a server, its weights are not read.
        out: Parquet corpus to write; until it is complete, finished prompts are kept beside it in ``*.batches.jsonl``.
        sampling: How tokens are chosen.
        raw: Continue texts as they are, without the chat template.
        batch_size: Prompts decoded together; not with a server.
        limit: First N prompts of each file.
        template_kwargs: Variables of the chat template; those of a row win.
        dtype: Precision of the target; ``auto`` is bfloat16 where the device has it, else float32; not with a server.
        device: Such as ``cuda:0``; None for CUDA if there is one; not with a server.
        server: A serving engine that runs the target; None to run it here.
        concurrency: Requests that the server gets at once.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-empty``, ``template-missing``,
            ``template-invalid``.
        ConflictError: ``corpus-exists``, ``corpus-begun``.
        EnvironmentFault: ``target-missing``, ``target-keys``, ``disk-full``, ``disk-error``; the errors of
            :func:`hscache.corpus.endpoint.ask`.
        Interrupted: On the first SIGINT or SIGTERM, at the next batch; with a server, soon.
    """
    target = target.expanduser()
    tokenizer = load_tokenizer(target)
    positions, vocab_size = _limits(target)
    made = origin(target, "generate", weights=server is None)  # a server's weights cannot be known
    with disk_errors(out), stop_on_signal() as stop, CorpusWriter(out, made) as writer:
        rows = read_prompts(prompts, tokenizer, writer.reject, raw=raw, limit=limit, template_kwargs=template_kwargs)
        room = positions if server is None or server.context is None else min(positions, server.context)
        ready = _fitting(rows, room, sampling, writer.reject, stop)
        if not ready:
            return writer.report
        ends, faults = end_token_ids(target, tokenizer), dict[int, PromptFault]()
        settings = _settings(ready, target, sampling)
        if server is None:
            where = pick_device(device)
            precision = pick_dtype(dtype, where)
            settings |= {"batch_size": batch_size, "dtype": precision, "device": where.type}
            settings |= file_digests(target, fast=True)["weights"]  # sha256 would cost minutes at each start
        else:
            settings |= {"server": server.kind, "model": server.model}
        with Journal(journal_path(out), settings) as journal:
            n_tokens, n_done = sum(len(prompt.ids) for prompt in ready), sum(i in journal for i in range(len(ready)))
            by = server.kind if server else f"loading {target.name} ({precision})"
            say(f"{counted(len(ready), 'prompt')}, {n_tokens:,} tokens; {by}")
            if n_done:
                say(f"{n_done} of them were completed in an earlier run")
            if server is None:
                decoder = _Decoder(target, tokenizer, sampling, precision, where, ends)
                _complete(decoder, ready, batch_size, journal, stop)
            else:
                check = AnswerCheck(tokenizer, ends, vocab_size, sampling.max_new_tokens)
                ids = [prompt.ids for prompt in ready]
                faults = ask(server, ids, sampling, check, journal, stop, concurrency=concurrency)
            notes = _write(writer, ready, journal, faults, ends)
            for note, n in sorted(notes.items()):
                writer.report.note(**{note: n})
                say(_NOTES[note].format(n=n))
            if not writer.report.samples:  # nothing worth keeping: another try may use other settings
                journal.remove()
    journal_path(out).unlink(missing_ok=True)
    return writer.report


def _fitting(prompts: Iterable[Prompt], room: int, sampling: Sampling, reject: Reject, stop: list[int]) -> list[Prompt]:
    """Return the prompts that fit into ``room`` tokens with their completions."""
    ready = []
    for prompt in prompts:
        check_stop(stop)
        if len(prompt.ids) <= room - sampling.max_new_tokens:
            ready.append(prompt)
        else:
            detail = f"{len(prompt.ids)} prompt tokens, {room} positions"
            reject(prompt.source, prompt.row, "too-long", detail)
    return ready


def _limits(target: Path) -> tuple[int, int]:
    """Return the target's positions, and the rows of its embedding."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(target)).get_text_config()
    except (OSError, ValueError) as error:
        raise EnvironmentFault("target-missing", f"{target}: transformers cannot load it: {error}") from error
    positions, rows = (getattr(config, name, None) for name in ("max_position_embeddings", "vocab_size"))
    return int(positions or 1 << 30), int(rows or 1 << 30)


def _settings(ready: list[Prompt], target: Path, sampling: Sampling) -> dict[str, Any]:
    """Return the settings that decide the completions wherever they are made: the first line of the journal."""
    prompts = hashlib.sha256()
    for prompt in ready:
        prompts.update(json.dumps(list(asdict(prompt).values())).encode())
    files = [target / "config.json", target / "generation_config.json", *tokenizer_files(target)]
    return {
        "generate": 2,
        "prompts": f"{len(ready)} of digest {prompts.hexdigest()[:16]}",
        **asdict(sampling),
        **{path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()},
    }


def _complete(decoder: _Decoder, ready: list[Prompt], batch_size: int, journal: Journal, stop: list[int]) -> None:
    """Decode the batches that the journal does not have."""
    batches = enumerate(_batches([len(prompt.ids) for prompt in ready], batch_size))
    todo = [(k, batch) for k, batch in batches if not all(i in journal for i in batch)]
    progress = Progress("generate", sum(len(batch) for _, batch in todo), "prompts")
    for k, batch in todo:
        check_stop(stop)
        journal.append(dict(zip(batch, decoder.decode(k, [ready[i].ids for i in batch]), strict=True)))
        progress.advance(len(batch))
    progress.close()


def _write(
    writer: CorpusWriter, ready: list[Prompt], journal: Journal, faults: Mapping[int, PromptFault], ends: set[int]
) -> Counter[str]:
    """Write the corpus in the order of the prompts, and return the notes of its samples."""
    counted: Counter[str] = Counter()
    for i, prompt in enumerate(ready):
        if i in faults:
            detail = f"{prompt.sample_id}: {faults[i].detail}"
            writer.reject(prompt.source, prompt.row, faults[i].reason, detail)
            continue
        completion, notes = journal.read(i)
        if not completion or completion[0] in ends:
            writer.reject(prompt.source, prompt.row, "empty-completion", f"{prompt.sample_id}: ended at once")
            continue
        counted.update(notes)
        writer.add(
            prompt.sample_id,
            prompt.ids + completion,
            [0] * len(prompt.ids) + [1] * len(completion),
            tag=prompt.tag,
            source=prompt.source,
            finish_reason="stop" if completion[-1] in ends else "length",
        )
    return counted


class _Decoder:
    def __init__(
        self, target: Path, tokenizer: Any, sampling: Sampling, dtype: str, device: torch.device, ends: set[int]
    ) -> None:
        import torch
        import transformers

        from hscache.model.loading import load_model

        model: Any = load_model(target, getattr(torch, dtype))[0].to(device)
        self._model, self._device, self._seed, self._torch = model, model.device, sampling.seed, torch
        theirs = model.generation_config
        self._ends = ends
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
        choice: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:  # top_k 0 turns it off; otherwise transformers uses 50
            choice = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        ignored = sorted(theirs.to_diff_dict().keys() - _OTHER_SETTINGS)
        if ignored:
            say(f"{target.name}: this command's sampling options apply; its generation config's {', '.join(ignored)} "
                "have no effect")  # fmt: skip
        self._choice = transformers.GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=sorted(ends) or None,
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
        end = next((i for i, token in enumerate(ids) if token in self._ends), len(ids) - 1)
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
