"""Turn training rows of any common format into token ids with an exact, token-level loss mask.

::

    file -> rows -> formats.read_row -> text and its answers -> ids (in batches) -> mask -> corpus

A mask never comes from searching for strings. The text before an answer is what a server would give the target: the
messages so far with the generation prompt, or the prompt as it is. Its tokens must be a prefix of the row's tokens;
otherwise the boundary lies inside a token, and the answer is rejected rather than masked approximately. A supervised
run begins there and ends with the first end token, because generation stops there. What a template writes after it,
such as ChatML's newline, is never supervised.

Templates of reasoning models leave the thoughts of earlier turns out. Then the row's text does not contain what the
target was given, and the row becomes one sample for each answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hscache.console import counted, say
from hscache.corpus.boundaries import Encoder, TextTokens
from hscache.corpus.chat import ChatTemplate, Conversation, RowFault, conversation
from hscache.corpus.containers import Row, find_files, read_file
from hscache.corpus.formats import FORMATS, Format, Source, Texts, Tokens, detect, read_row
from hscache.corpus.origin import origin
from hscache.corpus.readers import read_sample
from hscache.corpus.writer import CorpusReport, CorpusWriter
from hscache.errors import EnvironmentFault, InputError
from hscache.model.facts import config_numbers, end_token_ids
from hscache.rows import Reject

REASONS: dict[str, str] = {
    "bad-json": "the line is not a JSON object",
    "damaged": "the file is damaged where the row is",
    "bad-row": "the row is of no known format, or its fields are not of the expected kinds",
    "empty-prompt": "the prompt has no tokens",
    "empty-completion": "the completion has no tokens",
    "cut-answer": "the answer was cut off at a limit of length (--drop-cut)",
    "template-refused": "the chat template raises an error on this row, or does not write its tool calls",
    "unstable-boundary": "the tokens that a server would give the target are not a prefix of the row's tokens",
    "nothing-supervised": "no token of this row is an answer to a prompt",
    "length-mismatch": "ids and mask differ in length",
    "bad-mask": "the mask or the labels hold another value than expected",
    "ids-out-of-vocab": "an id is outside the target's embedding",
}
"""Why ``tokenize`` rejects a row."""
Turns = Literal["auto", "each", "last"]
_BATCH_ROWS = 128


@dataclass(frozen=True)
class TokenizeOptions:
    """What ``tokenize`` makes of rows.

    Attributes:
        chat_template: Jinja file to use instead of the tokenizer's template.
        template_kwargs: Variables of the template; those of a row win.
        turns: Which answers of a conversation become supervised. ``auto``: all in one sample, or a sample for each
            where the template leaves out parts of earlier turns; ``each``: a sample for each; ``last``: the last only.
        drop_cut: Reject rows whose answer was cut off at a limit of length.
        format: A key of ``FORMATS``; None to recognise it row by row.
        markers: What precedes and what ends an answer in rows of ``text``.
    """

    chat_template: Path | None = None
    template_kwargs: Mapping[str, Any] | None = None
    turns: Turns = "auto"
    drop_cut: bool = False
    format: Format | None = None
    markers: tuple[str, str] | None = None


@dataclass(frozen=True)
class _Draft:
    """A sample before its text is tokenized; a fault where there is none.

    Attributes:
        row: The row.
        sample_id: The future sample's id.
        source: What the row holds.
        text: What is tokenized.
        answers: Begin and end of each answer in it, in characters: after the generation prompt, and where the message
            ends.
        tag: The row's tag.
        part: Number of the sample among those of its row.
        fault: Why there is no sample.
    """

    row: Row
    sample_id: str
    source: Source | None = None
    text: str = ""
    answers: Sequence[tuple[int, int]] = ()
    tag: str | None = None
    part: int = 0
    fault: RowFault | None = None


def tokenize_files(inputs: list[Path], target: Path, out: Path, options: TokenizeOptions | None = None) -> CorpusReport:
    """Tokenize files into one corpus.

    Args:
        inputs: Files of rows in one of the formats of :data:`hscache.corpus.formats.FORMATS`.
        target: Checkpoint directory; its tokenizer is used.
        out: Parquet corpus to write; rejected rows go to ``*.rejected.jsonl`` beside it.
        options: How rows are read.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-empty``, ``template-missing``,
            ``template-invalid``.
        ConflictError: ``corpus-exists``.
        EnvironmentFault: ``target-missing``, ``target-config``.
    """
    options = options or TokenizeOptions()
    tokenizer = load_tokenizer(target)
    if options.chat_template is not None:
        tokenizer.chat_template = _read_template(options.chat_template)
        with suppress(RowFault):  # reports a template that cannot be compiled before the first row
            ChatTemplate(tokenizer).render(conversation([{"role": "user", "content": "hello"}], {}, {}))
    maker = _SampleMaker(tokenizer, end_token_ids(target.expanduser(), tokenizer), _vocab_size(target), options)
    files = [file for path in inputs for file in find_files(path)]
    names = file_names(files)
    with CorpusWriter(out, origin(target, "tokenize", weights=False)) as writer:
        for file in files:
            maker.write(file, names[file], writer)
    maker.say_notes(writer.report)
    return writer.report


class _SampleMaker:
    """Makes samples of rows.

    Args:
        tokenizer: The target's.
        ends: Tokens with which the target ends a turn.
        vocab_size: Rows of the target's embedding; None when the directory has no config.
        options: How rows are read.
    """

    def __init__(self, tokenizer: Any, ends: set[int], vocab_size: int | None, options: TokenizeOptions) -> None:
        self._ends, self._eos, self._vocab_size, self._options = ends, tokenizer.eos_token_id, vocab_size, options
        self._template, self._encoder = ChatTemplate(tokenizer), Encoder(tokenizer)
        self._kwargs = dict(options.template_kwargs or {})
        self._seen: set[tuple[Path, str]] = set()

    def write(self, path: Path, name: str, writer: CorpusWriter) -> None:
        """Add the samples of a file to a corpus; record each row that gives none."""
        drafts = self._drafts(path, name)
        with ThreadPoolExecutor(1, "tokenizer") as pool:  # it tokenizes while this thread renders the next rows
            waiting: Future[list[tuple[_Draft, TextTokens | None]]] | None = None
            while batch := list(islice(drafts, _BATCH_ROWS)):
                following = pool.submit(self._encode, batch)
                self._take(path, waiting, writer)
                waiting = following
            self._take(path, waiting, writer)

    def say_notes(self, report: CorpusReport) -> None:
        """Report what was done to rows beyond their masks."""
        self._template.say_ignored()
        notes = report.notes
        if n := notes["parts"]:
            why = "where the template leaves out parts of earlier turns, each answer is one"
            say(f"{counted(n, 'more sample')} than rows: {why}")
        if n := notes["corrected"]:
            say(f"the template's marks of {counted(n, 'answer')} were not what the target writes, and were corrected")
        if n := notes["unprompted"]:
            say(f"not supervised: {counted(n, 'assistant message')} before the first user message")
        if n := notes["cut"]:
            say(f"cut off, so without an end token: {counted(n, 'answer')}")

    def _drafts(self, path: Path, name: str) -> Iterator[_Draft]:
        for row in read_file(path):
            value, sample_id = row.value, f"{name}-{row.number}"
            try:
                if value is None:
                    raise RowFault(row.reason, row.fault)
                sample_id, tag = row_id(value, name, row.number), _text(value.get("tag"))
                kind = self._options.format or detect(value)
                if (path, kind) not in self._seen:
                    self._seen.add((path, kind))
                    say(f"{path}: read as {kind} ({FORMATS[kind]})")
                source = read_row(value, kind, self._kwargs, self._options.markers)
                if source.cut and self._options.drop_cut:
                    raise RowFault("cut-answer", "the answer was cut off at a limit of length")
                yield from self._laid_out(_Draft(row, sample_id, source, tag=tag))
            except RowFault as error:
                yield _Draft(row, sample_id, fault=error)

    def _laid_out(self, draft: _Draft) -> Iterator[_Draft]:
        """Yield the samples of a row with their texts."""
        source = draft.source
        if isinstance(source, Tokens):
            yield draft
        elif isinstance(source, Texts):
            yield replace(draft, text=source.text, answers=source.runs)
        else:
            assert source is not None
            yield from self._chat_drafts(draft, source)

    def _chat_drafts(self, draft: _Draft, chat: Conversation) -> Iterator[_Draft]:
        if not chat.answers:
            why = "no assistant message" if not chat.unprompted else "no answer to a prompt"
            raise RowFault("nothing-supervised", f"the row has {why}")
        if not any(_has_text(chat.messages[i]) for i in chat.answers):
            raise RowFault("empty-completion", "the answers have no text")
        self._template.check(chat)
        if self._options.turns == "auto":
            together = self._placed(draft, chat)
            if together is not None:
                yield together
                return
        yield from self._each(draft, chat)

    def _each(self, draft: _Draft, chat: Conversation) -> Iterator[_Draft]:
        """Yield a sample for each answer, with the history as a server would render it; or for the last one."""
        last = self._options.turns == "last"
        for n, i in enumerate(chat.answers):
            if last and i != chat.answers[-1]:
                continue
            sample_id = draft.sample_id if last or len(chat.answers) == 1 else f"{draft.sample_id}#{n}"
            one = replace(draft, sample_id=sample_id, part=0 if last else n)
            try:
                placed = self._placed(one, chat.until(i))
                if placed is None:
                    what = f"message {i} does not go on from its generation prompt"
                    raise RowFault("unstable-boundary", what + self._template.hint())
                yield placed
            except RowFault as error:
                yield replace(one, fault=error)

    def _placed(self, draft: _Draft, chat: Conversation) -> _Draft | None:
        """Return a sample with its text and answers; None when an answer does not go on from its generation prompt."""
        text, answers = self._template.render(chat), []
        for i in chat.answers:
            prompt = self._template.render(chat, i, add_generation_prompt=True)
            if not prompt:
                raise RowFault("empty-prompt", f"nothing comes before message {i}")
            if not text.startswith(prompt):
                return None
            answers.append((len(prompt), self._end(text, chat, i)))
        return replace(draft, source=chat, text=text, answers=answers)

    def _end(self, text: str, chat: Conversation, number: int) -> int:
        """Return where a message ends in the conversation's text."""
        if number == len(chat.messages) - 1:
            return len(text)
        until = self._template.render(chat, number + 1)
        if text.startswith(until):
            return len(until)
        return next((i for i, (a, b) in enumerate(zip(text, until, strict=False)) if a != b), len(text))

    def _encode(self, drafts: Iterable[_Draft]) -> list[tuple[_Draft, TextTokens | None]]:
        drafts = list(drafts)
        made: dict[int, TextTokens] = {}
        for special in (False, True):  # a chat template writes the special tokens itself
            kind = Texts if special else Conversation
            which = [i for i, draft in enumerate(drafts) if draft.fault is None and isinstance(draft.source, kind)]
            texts = [drafts[i].text for i in which]
            made |= dict(zip(which, self._encoder.encode(texts, special=special), strict=True))
        return [(draft, made.get(i)) for i, draft in enumerate(drafts)]

    def _take(
        self, path: Path, batch: Future[list[tuple[_Draft, TextTokens | None]]] | None, writer: CorpusWriter
    ) -> None:
        for draft, tokens in batch.result() if batch is not None else []:
            self._add(path, draft, tokens, writer)

    def _add(self, path: Path, draft: _Draft, tokens: TextTokens | None, writer: CorpusWriter) -> None:
        try:
            if draft.fault is not None:
                raise draft.fault
            ids, mask = self._supervised(draft, tokens, writer.report)
        except RowFault as error:
            if error.reason == "unstable-boundary" and self._splits(draft):  # the other answers may be sound
                assert isinstance(draft.source, Conversation)
                for one, its_tokens in self._encode(self._each(draft, draft.source)):
                    self._add(path, one, its_tokens, writer)
            else:
                row = draft.row
                writer.reject(str(path), row.number, error.reason, error.detail, line=row.line, new_row=not draft.part)
            return
        assert draft.source is not None
        columns = {"tag": draft.tag, "source": path.name, "finish_reason": draft.source.finish_reason}
        writer.add(draft.sample_id, ids, mask, **columns, new_row=not draft.part)

    def _splits(self, draft: _Draft) -> bool:
        return self._options.turns == "auto" and isinstance(draft.source, Conversation) and len(draft.answers) > 1

    def _supervised(
        self, draft: _Draft, tokens: TextTokens | None, report: CorpusReport
    ) -> tuple[list[int], NDArray[np.uint8]]:
        """Return ids and mask of a sample."""
        assert draft.source is not None
        if isinstance(draft.source, Tokens):
            return self._read(draft.source)
        assert tokens is not None
        source, ids = draft.source, tokens.ids
        marked = self._marks(source, ids)
        mask = np.zeros(len(ids) + 1, np.uint8)
        stop, corrected = 0, 0
        for begin, end in draft.answers:
            start, stop, ended = self._run(tokens, begin, end)
            if marked is not None:
                if not any(marked[start:stop]):
                    continue
                corrected += not _equals_marks(marked, start, stop)
            mask[start:stop] = 1
        if source.cut:
            ids, ended = ids[: stop - ended], False
        elif isinstance(source, Texts) and not source.closed and not ended and self._eos is not None:
            ids, mask[-1] = [*ids, self._eos], 1
        mask = mask[: len(ids)]
        if not mask.any():
            raise RowFault("empty-completion", "the answers have no tokens")
        self._require_known(ids)
        unprompted = source.unprompted if isinstance(source, Conversation) else 0
        report.note(corrected=corrected, unprompted=unprompted, cut=source.cut, parts=bool(draft.part))
        return ids, mask

    def _read(self, source: Tokens) -> tuple[list[int], NDArray[np.uint8]]:
        sample = read_sample(0, source.value, "row")
        if isinstance(sample, Reject):
            raise RowFault(sample.reason, sample.detail)
        ids = sample.input_ids.tolist()
        if not sample.loss_mask[1:].any():
            raise RowFault("nothing-supervised", "the mask is 0 everywhere after the first token")
        self._require_known(ids)
        return ids, sample.loss_mask

    def _require_known(self, ids: list[int]) -> None:
        if self._vocab_size is not None and max(ids) >= self._vocab_size:
            raise RowFault("ids-out-of-vocab", f"id {max(ids)}, but the embedding has {self._vocab_size} rows")

    def _run(self, tokens: TextTokens, begin: int, end: int) -> tuple[int, int, bool]:
        """Return an answer's first token, the token after its last one, and whether that one is an end token."""
        start = self._encoder.boundary(tokens, begin)
        if start is None:
            around = tokens.text[max(begin - 20, 0) : begin + 20]
            raise RowFault("unstable-boundary", f"a token spans the boundary between prompt and answer in {around!r}")
        if not start:
            raise RowFault("empty-prompt", "nothing comes before the answer")
        stop = next((i for i in range(start, len(tokens.ids)) if tokens.ids[i] in self._ends), None)
        if stop is not None and self._encoder.ends_by(tokens, stop, end):
            return start, stop + 1, True
        whole = len(tokens.ids) if end == len(tokens.text) else self._encoder.boundary(tokens, end)
        if whole is None:
            around = tokens.text[max(end - 20, 0) : end + 20]
            raise RowFault("unstable-boundary", f"a token spans the end of an answer in {around!r}")
        return start, whole, False

    def _marks(self, source: Source, ids: list[int]) -> list[int] | None:
        """Return what the template marks as the assistant's, token by token; None when it marks nothing at all."""
        if not isinstance(source, Conversation) or not self._template.marks:
            return None
        marked = self._template.marked(source)
        if len(marked) != len(ids):
            raise RowFault("template-refused", f"the template marks {len(marked)} tokens of {len(ids)}")
        return marked


def _equals_marks(marked: list[int], start: int, stop: int) -> bool:
    """Return whether the marks around a run are the run."""
    return all(marked[start:stop]) and not marked[start - 1] and not any(marked[stop : stop + 1])


def _has_text(message: Mapping[str, Any]) -> bool:
    return any(message.get(name) for name in ("content", "tool_calls", "reasoning_content"))


def _read_template(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("template-invalid", f"{path}: cannot be read as text: {error}", hint="a Jinja file") from error


def load_tokenizer(target: Path) -> Any:
    """Load a target's tokenizer.

    Raises:
        EnvironmentFault: ``target-missing``, also for a tokenizer without a vocabulary.
    """
    target = target.expanduser()
    if not target.is_dir():  # transformers would take it for a hub id and query the network for a minute
        raise EnvironmentFault("target-missing", f"{target}: no such target directory")
    import transformers

    hint = "copy the tokenizer's files (tokenizer.json, tokenizer_config.json) beside the weights"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(target))
    except Exception as error:  # a malformed tokenizer.json raises KeyError, TypeError or a bare Exception from Rust
        first = (str(error).splitlines() or [""])[0]
        what = f"{target}: no tokenizer can be loaded: {type(error).__name__}: {first}"
        raise EnvironmentFault("target-missing", what, hint=hint) from error
    # for some families transformers replaces missing files by an empty tokenizer, which encodes every text to nothing
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        what = f"{target}: the tokenizer has no vocabulary but {len(tokenizer)} added tokens"
        raise EnvironmentFault("target-missing", what, hint=hint)
    return tokenizer


def file_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return for each file the prefix of its rows' ids.

    The prefix is the file's name without its suffix; files of the same name get as many parent folders as make their
    prefixes different.
    """
    names = {}
    for path in paths:
        parts = path.resolve().parts
        others = {other.resolve() for other in paths if other.stem == path.stem} - {path.resolve()}
        same = (n for n in range(1, len(parts)) if all(other.parts[-n:] != parts[-n:] for other in others))
        names[path] = "/".join(parts[-next(same, len(parts)) :]) if others else path.stem
    return names


def row_id(value: Mapping[str, Any], name: str, row: int) -> str:
    """Return a row's id: its own, or the name that :func:`file_names` gave its file, and the row number."""
    for key in ("sample_id", "id", "uuid", "conversation_id", "task_id", "question_id"):
        if value.get(key) is not None:
            return str(value[key])
    return f"{name}-{row}"


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _vocab_size(target: Path) -> int | None:
    """Return the rows of the target's embedding; None when the directory has no config."""
    directory = target.expanduser()
    return config_numbers(directory, "vocab_size")[0] if (directory / "config.json").is_file() else None
