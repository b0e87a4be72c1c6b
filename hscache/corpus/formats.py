"""The spellings of training rows that the world uses, each turned into one of three sources.

::

    row -> detect -> read_row -> Conversation | Texts | Tokens

A format is recognised by the row's columns. :data:`FORMATS` is the list that users see.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hscache.corpus.chat import Conversation, RowFault, conversation, is_cut, is_messages, role_of

Format = Literal["messages", "prompt+completion", "sharegpt", "alpaca", "openai-batch", "text", "tokens"]
FORMATS: dict[Format, str] = {
    "messages": "messages, with tools and chat_template_kwargs",
    "prompt+completion": "prompt and completion, texts or lists of messages",
    "sharegpt": "conversations of {from, value} or {role, content}",
    "alpaca": "instruction, input and output, with system and history",
    "openai-batch": "body.messages and response.body.choices",
    "text": "text to which a template was applied",
    "tokens": "input_ids with loss_mask, labels, completion_mask or assistant_masks",
}
"""Format -> its columns."""


@dataclass(frozen=True)
class Texts:
    """A text of which some ranges are supervised.

    Attributes:
        text: The whole row, tokenized as it is.
        runs: Begin and end of each supervised range, in characters.
        finish_reason: Why the last range ended; None where that is unknown.
        closed: Whether the text ends where it should: no end token is added.
    """

    text: str
    runs: list[tuple[int, int]]
    finish_reason: str | None = None
    closed: bool = False

    @property
    def cut(self) -> bool:
        """Whether the target wrote no end token after the last range."""
        return is_cut(self.finish_reason)


@dataclass(frozen=True)
class Tokens:
    """A row that is tokenized already; its columns are read as those of a corpus."""

    value: Mapping[str, Any] = field(repr=False)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended."""
        ended = self.value.get("finish_reason")
        return None if ended is None else str(ended)

    @property
    def cut(self) -> bool:
        """Whether the answer was cut off."""
        return is_cut(self.finish_reason)


Source = Conversation | Texts | Tokens


def detect(value: Mapping[str, Any]) -> Format:
    """Return the format of a row.

    Raises:
        RowFault: ``bad-row``.
    """
    has = {name for name, item in value.items() if item is not None}
    if "input_ids" in has:
        return "tokens"
    if "messages" in has:
        return "messages"
    if "conversations" in has or "conversation" in has:
        return "sharegpt"
    if {"prompt", "completion"} <= has:
        return "prompt+completion"
    if {"instruction", "output"} <= has:
        return "alpaca"
    if "body" in has or "response" in has:
        return "openai-batch"
    if "text" in has:
        return "text"
    raise RowFault(
        "bad-row", f"found {', '.join(map(str, value)) or 'no columns'}; expected one of {', '.join(FORMATS)}"
    )


def read_row(
    value: Mapping[str, Any],
    kind: Format,
    template_kwargs: Mapping[str, Any],
    markers: tuple[str, str] | None = None,
) -> Source:
    """Return what a row holds.

    Args:
        value: The row.
        kind: A key of :data:`FORMATS`.
        template_kwargs: Variables of the chat template that the command was given.
        markers: What precedes and what ends an assistant's answer, for ``text``.

    Raises:
        RowFault: ``bad-row``, ``empty-completion``.
    """
    if kind == "tokens":
        return Tokens(value)
    if kind == "text":
        return _marked_text(value.get("text"), markers)
    ended = value.get("finish_reason")
    if kind == "prompt+completion":
        prompt, completion = value.get("prompt"), value.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise RowFault("empty-completion", "the completion is empty")
            whole = prompt + completion
            return Texts(whole, [(len(prompt), len(whole))], None if ended is None else str(ended))
        if is_messages(prompt) and isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        if is_messages(prompt) and is_messages(completion):
            turns, first = [*prompt, *completion], len(prompt)
            return conversation(turns, value, template_kwargs, first=first, finish_reason=ended)
        raise _unreadable(value, "prompt", "completion")
    if kind == "alpaca":
        return conversation(_alpaca(value), value, template_kwargs, finish_reason=ended)
    if kind == "openai-batch":
        value, messages, ended = _batch(value)
        return conversation(messages, value, template_kwargs, first=len(messages) - 1, finish_reason=ended)
    column = "messages" if kind == "messages" else "conversations" if "conversations" in value else "conversation"
    chat: Any = value.get(column)
    if not is_messages(chat):
        raise _unreadable(value, column)
    return conversation(chat, value, template_kwargs, finish_reason=ended)


def read_prompt(value: Mapping[str, Any], template_kwargs: Mapping[str, Any]) -> str | Conversation:
    """Return what a row asks: a text, or a conversation that ends before the answer.

    Args:
        value: A row with ``prompt`` (text or messages), ``turns`` (texts; the first), or of a format of
            :data:`FORMATS` with messages; answers after the last message of another role are left out.
        template_kwargs: Variables of the chat template that the command was given.

    Raises:
        RowFault: ``bad-row``.
    """
    prompt, turns, body = value.get("prompt"), value.get("turns"), value.get("body")
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return turns[0]
    if isinstance(value.get("instruction"), str):
        messages = _alpaca({**value, "output": ""})
    else:
        value = body if isinstance(body, dict) else value
        found = (value.get(name) for name in ("prompt", "messages", "conversations", "conversation"))
        messages = next((one for one in found if is_messages(one)), list[dict[str, Any]]())
    stop = max((i + 1 for i, message in enumerate(messages) if role_of(message) != "assistant"), default=0)
    if not stop:
        kinds = ", ".join(f"{name} ({type(item).__name__})" for name, item in value.items())
        raise RowFault("bad-row", f"found {kinds}; expected prompt (text or messages), messages or turns (texts)")
    return replace(conversation(messages[:stop], value, template_kwargs), answers=[])


def _unreadable(value: Mapping[str, Any], *columns: str) -> RowFault:
    found = ", ".join(f"{name} is {type(value.get(name)).__name__}" for name in columns)
    return RowFault("bad-row", f"{found}; expected texts or lists of messages with a role")


def _alpaca(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = ("instruction", "input", "output")
    fields = [value.get(name) or "" for name in names]
    if not all(isinstance(item, str) for item in fields):
        raise _unreadable(value, *names)
    instruction, extra, output = fields
    turns = []
    for pair in value.get("history") or []:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise RowFault("bad-row", "history holds something else than pairs of texts")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = f"{instruction}\n{extra}" if extra else instruction
    return [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": output}]


def _batch(value: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], object]:
    """Return request, its messages with the answer, and why the answer ended."""
    body, response = value.get("body"), value.get("response")
    if not isinstance(body, dict) or not is_messages(body.get("messages")):
        hint = "; join requests and responses by custom_id" if isinstance(response, dict) else ""
        raise RowFault("bad-row", f"the row has no body.messages{hint}")
    try:
        choice = response["body"]["choices"][0]  # type: ignore[index]
        return dict(body), [*body["messages"], choice["message"]], choice.get("finish_reason")
    except (TypeError, KeyError, IndexError, AttributeError):
        raise RowFault("bad-row", "the row has no response.body.choices[0].message") from None


def _marked_text(text: object, markers: tuple[str, str] | None) -> Texts:
    if not isinstance(text, str):
        raise RowFault("bad-row", f"text is {type(text).__name__}, expected text")
    if markers is None:
        raise RowFault("bad-row", "a text alone does not say what the assistant wrote; give --assistant-markers")
    opening, closing = markers
    runs, at = [], 0
    while (found := text.find(opening, at)) >= 0:
        start = found + len(opening)
        end = text.find(closing, start)
        at = len(text) if end < 0 else end + len(closing)
        runs.append((start, at))
    if not runs:
        raise RowFault("nothing-supervised", f"the text has no {opening!r}")
    return Texts(text, runs, closed=True)
