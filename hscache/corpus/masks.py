"""Chats and prompt+completion rows to token ids with an exact, token-level loss mask.

A mask comes from one of two sources, never from searching for strings. Chat ``messages`` need a template that marks
what the assistant wrote (``{% generation %}``); the tokenizer turns the marks into a mask. ``prompt`` + ``completion``
rows are tokenized twice, the prompt alone and the whole; if the prompt's tokens are not a prefix of the whole's, the
boundary lies inside a token and the row is rejected rather than masked approximately.

``prompt`` and ``completion`` are either texts, used as they are, or lists of messages, rendered by the chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hscache.corpus.readers import open_parquet, parquet_batches, read_jsonl
from hscache.corpus.writer import CorpusReport, CorpusWriter
from hscache.errors import EnvironmentFault, InputError

REASONS: dict[str, str] = {
    "bad-json": "the line is not a JSON object",
    "bad-row": "the row has neither messages nor prompt and completion, or they are not text or messages",
    "empty-completion": "the completion has no tokens",
    "unstable-boundary": "the prompt's tokens are not a prefix of the whole row's tokens",
    "nothing-supervised": "the template marks no token of this row",
}
"""Why ``tokenize`` rejects a row."""


class _RowFault(Exception):
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
            ``template-missing``.
        ConflictError: ``corpus-exists``.
        EnvironmentFault: ``target-missing``.
    """
    tokenizer = load_tokenizer(target)
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    with CorpusWriter(out) as writer:
        for path in inputs:
            for row, value, fault in read_rows(path):
                try:
                    if value is None:
                        raise _RowFault("bad-json", fault)
                    ids, mask = encode_row(tokenizer, value)
                except _RowFault as error:
                    writer.reject(str(path), row, error.reason, error.detail)
                    continue
                writer.add(row_id(value, path, row), ids, mask, tag=_text(value.get("tag")), source=path.name)
    return writer.report


def load_tokenizer(target: Path) -> Any:
    """Load a target's tokenizer.

    Raises:
        EnvironmentFault: ``target-missing``.
    """
    target = target.expanduser()
    if not target.is_dir():  # transformers would take it for a hub id and ask the network, for a minute
        raise EnvironmentFault("target-missing", f"{target}: no such target directory")
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(target))
    except (OSError, ValueError) as error:
        raise EnvironmentFault("target-missing", f"{target}: no tokenizer can be loaded: {error}") from error


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Stream rows of a JSONL or parquet file: number, object or None, fault.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-truncated``.
    """
    if not path.is_file():
        raise InputError("corpus-missing", f"{path}: no such file")
    if path.suffix == ".parquet":
        row = 0
        for batch in parquet_batches(path, open_parquet(path), batch_size=256):
            for line in batch.to_pylist():
                yield row, line, ""
                row += 1
    elif path.suffix in (".jsonl", ".json") or path.suffixes[-2:] == [".jsonl", ".gz"]:
        yield from read_jsonl(path)
    else:
        raise InputError("corpus-format", f"{path}: expected .jsonl, .jsonl.gz or .parquet")


def row_id(value: Mapping[str, Any], path: Path, row: int) -> str:
    """Return a row's id: its own, or file name and row number."""
    for name in ("sample_id", "id", "uuid", "conversation_id", "task_id", "question_id"):
        if value.get(name) is not None:
            return str(value[name])
    return f"{path.stem}-{row}"


def encode_row(tokenizer: Any, value: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of one row, of equal length."""
    if value.get("messages") is not None:
        return _encode_messages(tokenizer, value["messages"])
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        whole = tokenizer(prompt + completion)["input_ids"]
        if tokenizer.eos_token_id is not None:
            whole = [*whole, tokenizer.eos_token_id]
        return _split(list(tokenizer(prompt)["input_ids"]), list(whole), completion)
    if _is_messages(prompt) and isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    if _is_messages(prompt) and _is_messages(completion):
        require_template(tokenizer)
        before = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        ids_before, ids = (list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (before, text))
        return _split(ids_before, ids, "".join(str(m.get("content") or "") for m in completion))
    raise _RowFault("bad-row", f"found {', '.join(value)}; expected messages, or prompt and completion")


def require_template(tokenizer: Any) -> None:
    """Check that a tokenizer has a chat template.

    Raises:
        InputError: ``template-missing``.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "template-missing", "the tokenizer has no chat template", hint="--chat-template FILE, or rows of plain text"
        )


def _encode_messages(tokenizer: Any, messages: Any) -> tuple[list[int], list[int]]:
    require_template(tokenizer)
    if "generation" not in str(tokenizer.chat_template).replace("add_generation_prompt", ""):
        raise InputError(
            "template-without-generation",
            "the chat template does not mark what the assistant wrote, so every token's mask would be 0",
            hint="--chat-template FILE with {% generation %} ... {% endgeneration %}, or rows of prompt and completion",
        )
    if not _is_messages(messages):
        raise _RowFault("bad-row", "messages is not a list of {role, content}")
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(encoded["input_ids"]), [int(m) for m in encoded["assistant_masks"]]
    if not any(mask[1:]):
        raise _RowFault("nothing-supervised", "the template marks no token; has the row an assistant turn?")
    return ids, mask


def _split(prompt: list[int], whole: list[int], completion: str) -> tuple[list[int], list[int]]:
    if not completion or len(whole) <= len(prompt):
        raise _RowFault("empty-completion", "the completion has no tokens")
    if whole[: len(prompt)] != prompt:
        same = next(i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b)
        raise _RowFault("unstable-boundary", f"prompt and whole row differ from token {same} of {len(prompt)}")
    return whole, [0] * len(prompt) + [1] * (len(whole) - len(prompt))


def _is_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
