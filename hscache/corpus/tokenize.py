"""Turn chats and prompt+completion rows into token ids with an exact, token-level loss mask.

A mask comes from one of two sources, never from searching for strings. Chat ``messages`` need a template that marks
what the assistant wrote (``{% generation %}``); the tokenizer turns the marks into a mask. ``prompt`` + ``completion``
rows are tokenized up to each boundary and as a whole. If the tokens up to a boundary are not a prefix of the whole
row's tokens, the boundary lies inside a token, and the row is rejected rather than masked approximately.

``prompt`` and ``completion`` are either texts, used as they are, or lists of messages, rendered by the chat template.
With messages each assistant turn of the completion is supervised, from after its generation prompt to its end token.
Text that a template writes after the end token, such as ChatML's newline, is never supervised, because the target never
writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

from hscache.corpus.containers import read_objects
from hscache.corpus.writer import CorpusReport, CorpusWriter
from hscache.errors import EnvironmentFault, InputError

REASONS: dict[str, str] = {
    "bad-json": "the line is not a JSON object",
    "bad-row": "the row has neither messages nor prompt and completion, or they are not text or messages",
    "empty-prompt": "the prompt has no tokens",
    "empty-completion": "the completion has no tokens",
    "template-refused": "the chat template raises an error on this row",
    "unstable-boundary": "the prompt's tokens are not a prefix of the whole row's tokens",
    "nothing-supervised": "no token of this row is the assistant's",
}
"""Why ``tokenize`` rejects a row."""


class RowFault(Exception):
    """A row cannot become a sample.

    Args:
        reason: A key of the command's ``REASONS``.
        detail: What was found.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def tokenize_files(inputs: list[Path], target: Path, out: Path, *, chat_template: Path | None = None) -> CorpusReport:
    """Tokenize files into one corpus.

    Args:
        inputs: JSONL(.gz) or parquet files.
        target: Checkpoint directory; its tokenizer is used.
        out: Parquet corpus to write; rejected rows go to ``*.rejected.jsonl`` beside it.
        chat_template: Jinja file to use instead of the tokenizer's template.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-empty``, ``template-without-generation``,
            ``template-missing``, ``template-invalid``.
        ConflictError: ``corpus-exists``.
        EnvironmentFault: ``target-missing``, ``target-config``.
    """
    tokenizer = load_tokenizer(target)
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
        with suppress(RowFault):  # reports a template that cannot be compiled before the first row
            render_chat(tokenizer, [{"role": "user", "content": "hello"}], tokenize=False)
    ends, names = _end_ids(tokenizer, target), file_names(inputs)
    with CorpusWriter(out) as writer:
        for path in inputs:
            for row, value, fault in read_rows(path):
                try:
                    if value is None:
                        raise RowFault("bad-json", fault)
                    ids, mask = encode_row(tokenizer, value, ends)
                except RowFault as error:
                    writer.reject(str(path), row, error.reason, error.detail)
                    continue
                writer.add(row_id(value, names[path], row), ids, mask, tag=_text(value.get("tag")), source=path.name)
    return writer.report


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
        what = f"{target}: no tokenizer can be loaded: {type(error).__name__}: {error}"
        raise EnvironmentFault("target-missing", what, hint=hint) from error
    # for some families transformers replaces missing files by an empty tokenizer, which encodes every text to nothing
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        what = f"{target}: the tokenizer has no vocabulary but {len(tokenizer)} added tokens"
        raise EnvironmentFault("target-missing", what, hint=hint)
    return tokenizer


def _end_ids(tokenizer: Any, target: Path) -> set[int]:
    """Return the tokens with which the target ends a turn: its tokenizer's, and those of its generation config."""
    path = target.expanduser() / "generation_config.json"
    ends = {tokenizer.eos_token_id}
    if path.is_file():
        try:
            eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise EnvironmentFault("target-config", f"{path}: {error}") from error
        ends |= set(eos) if isinstance(eos, list) else {eos}
    return ends - {None}


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Stream rows of a JSONL or parquet file: number, object or None, fault.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-truncated``.
    """
    for row in read_objects(path):
        yield row.number, row.value, row.fault


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


def encode_row(tokenizer: Any, value: Mapping[str, Any], ends: set[int]) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of one row, of equal length.

    Args:
        tokenizer: The target's.
        value: The row.
        ends: Tokens with which the target ends a turn.

    Raises:
        RowFault: The row has no exact mask.
        InputError: ``template-missing``, ``template-invalid``, ``template-without-generation``.
    """
    if value.get("messages") is not None:
        return _encode_marked(tokenizer, value["messages"], ends)
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return _encode_texts(tokenizer, prompt, completion, ends)
    if is_messages(prompt) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if is_messages(prompt) and is_messages(completion):
        return _encode_turns(tokenizer, prompt, completion, ends)
    raise RowFault("bad-row", f"found {', '.join(value)}; expected messages, or prompt and completion")


def _encode_texts(tokenizer: Any, prompt: str, completion: str, ends: set[int]) -> tuple[list[int], list[int]]:
    if not completion:
        raise RowFault("empty-completion", "the completion is empty")
    ids = list(tokenizer(prompt + completion)["input_ids"])
    # a completion that already ends with an end token gets no second one
    if tokenizer.eos_token_id is not None and (not ids or ids[-1] not in ends):
        ids.append(tokenizer.eos_token_id)
    start = _boundary(list(tokenizer(prompt)["input_ids"]), ids)
    if start == len(ids):
        raise RowFault("empty-completion", "the completion has no tokens")
    return ids, [0] * start + [1] * (len(ids) - start)


def _encode_turns(
    tokenizer: Any, prompt: list[dict[str, Any]], completion: list[dict[str, Any]], ends: set[int]
) -> tuple[list[int], list[int]]:
    turns = text_messages(tokenizer, [*prompt, *completion])
    answers = [i for i in range(len(prompt), len(turns)) if turns[i]["role"] == "assistant"]
    if not answers:
        raise RowFault("nothing-supervised", "the completion has no assistant turn")
    if not any(turns[i]["content"] or turns[i].get("tool_calls") for i in answers):
        raise RowFault("empty-completion", "the completion has no text")
    ids = encode_chat(tokenizer, turns)
    mask = [0] * len(ids)
    for i in answers:
        start = _boundary(encode_chat(tokenizer, turns[:i], add_generation_prompt=True), ids)
        stop = _turn_end(ids, start, _boundary(encode_chat(tokenizer, turns[: i + 1]), ids), ends)
        mask[start:stop] = [1] * (stop - start)
    if not any(mask):
        raise RowFault("empty-completion", "the template writes nothing for the completion")
    return ids, mask


def _encode_marked(tokenizer: Any, messages: Any, ends: set[int]) -> tuple[list[int], list[int]]:
    require_template(tokenizer)
    if "generation" not in str(tokenizer.chat_template).replace("add_generation_prompt", ""):
        raise InputError(
            "template-without-generation",
            "the chat template does not mark what the assistant wrote, so every token's mask would be 0",
            hint="--chat-template FILE with {% generation %} ... {% endgeneration %}, or rows of prompt and completion",
        )
    if not is_messages(messages):
        raise RowFault("bad-row", "messages is not a list of {role, content}")
    options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    encoded = render_chat(tokenizer, text_messages(tokenizer, messages), **options)
    ids, mask, first = list(encoded["input_ids"]), [], 0
    for marked, run in groupby(encoded["assistant_masks"]):
        n = len(list(run))
        stop = _turn_end(ids, first, first + n, ends) if marked else first
        mask += [1] * (stop - first) + [0] * (first + n - stop)
        first += n
    if not any(mask[1:]):
        raise RowFault("nothing-supervised", "the template marks no token; does the row have an assistant turn?")
    return ids, mask


def _boundary(before: list[int], whole: list[int]) -> int:
    """Return how many tokens of the whole row are before a boundary."""
    if not before:
        raise RowFault("empty-prompt", "nothing comes before the completion")
    if whole[: len(before)] != before:
        same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(whole))
        raise RowFault("unstable-boundary", f"prompt and whole row differ from token {same} of {len(before)}")
    return len(before)


def _turn_end(ids: list[int], start: int, stop: int, ends: set[int]) -> int:
    """Return where an assistant turn's mask ends: after its last end token, or at ``stop`` without an end token."""
    return next((i + 1 for i in reversed(range(start, stop)) if ids[i] in ends), stop)


def encode_chat(tokenizer: Any, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
    """Return the token ids of messages that :func:`text_messages` returned.

    Raises:
        RowFault: ``template-refused``.
        InputError: ``template-missing``, ``template-invalid``.
    """
    text = render_chat(tokenizer, messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> Any:
    """Apply the chat template.

    Raises:
        RowFault: ``template-refused``.
        InputError: ``template-missing``, ``template-invalid``.
    """
    import jinja2

    require_template(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except jinja2.TemplateSyntaxError as error:
        what = f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        raise InputError("template-invalid", what, hint="--chat-template FILE replaces it in tokenize") from error
    except Exception as error:  # a template is foreign code: it can raise any exception
        raise RowFault("template-refused", f"{type(error).__name__}: {error}") from error


def require_template(tokenizer: Any) -> None:
    """Check that a tokenizer has a chat template.

    Raises:
        InputError: ``template-missing``.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "template-missing", "the tokenizer has no chat template", hint="--chat-template FILE, or rows of plain text"
        )


def text_messages(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with each content as one text, OpenAI's lists of text parts joined.

    Raises:
        RowFault: ``bad-row``.
    """
    return [{**message, "content": _content(tokenizer, message)} for message in messages]


def _content(tokenizer: Any, message: dict[str, Any]) -> str | None:
    content, role = message.get("content"), message["role"]
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            return "".join(texts)
        raise RowFault("bad-row", f"a content of role {role} has other parts than text")
    # a template that knows no tool calls would write an answer of "None"
    if content is None and message.get("tool_calls") and "tool_calls" in str(tokenizer.chat_template):
        return None
    raise RowFault("bad-row", f"a content of role {role} is {type(content).__name__}, expected text")


def is_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether a value is a list of mappings with a role, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
