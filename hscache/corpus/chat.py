"""Conversations as a server would render them, and where in the text the target writes.

A server renders the messages before an answer with the generation prompt, and the target continues that text. So the
supervised run of an answer begins where that text ends, and ends with the end token that stops the server. Everything
here is derived from those renderings; the marks of a template (``{% generation %}``) only choose which answers count.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

from hscache.console import say
from hscache.errors import InputError

Message = dict[str, Any]
_MARKS = re.compile(r"{%-?\s*generation\s*-?%}")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
          "function_call": "assistant", "observation": "tool", "function": "tool"}  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("thinking", "reasoning")
_CUT = ("length", "max_tokens")


class RowFault(Exception):
    """A row cannot become a sample.

    Args:
        reason: A key of the command's ``REASONS``.
        detail: What was found.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Messages as a server is given them, and the answers to learn from.

    Attributes:
        messages: Role, content (text or None) and what else the template reads.
        answers: Numbers of the assistant messages that are supervised, ascending.
        tools: Definitions of the tools, or None.
        template_kwargs: Further variables of the template, such as ``enable_thinking``.
        finish_reason: Why the last answer ended; None where that is unknown, and for earlier answers.
        unprompted: Assistant messages before the first user message; nothing that a server would generate.
    """

    messages: list[Message]
    answers: list[int]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    unprompted: int = 0

    @property
    def cut(self) -> bool:
        """Whether the last message is a supervised answer that was cut off: the target wrote no end token."""
        return is_cut(self.finish_reason) and self.answers[-1:] == [len(self.messages) - 1]

    def until(self, stop: int) -> Conversation:
        """Return the conversation up to and including an answer, which alone is supervised."""
        ended = self.finish_reason if stop == len(self.messages) - 1 else None
        return Conversation(self.messages[: stop + 1], [stop], self.tools, self.template_kwargs, ended)


def conversation(
    messages: list[Any],
    value: Mapping[str, Any],
    template_kwargs: Mapping[str, Any],
    *,
    first: int = 0,
    finish_reason: object = None,
) -> Conversation:
    """Check messages, and bring their spellings to the one that chat templates read.

    Args:
        messages: ``{role, content}`` or ShareGPT's ``{from, value}``; ``content`` is text or a list of text parts,
            ``tool_calls`` and the ``arguments`` in them may be JSON text.
        value: The row; its ``tools`` and ``chat_template_kwargs`` are used.
        template_kwargs: The command's; those of the row win.
        first: Messages before this one are a prompt, whose answers are not supervised.
        finish_reason: Why the last answer ended.

    Raises:
        RowFault: ``bad-row``.
    """
    tools, own = _parsed(value, "tools", list), _parsed(value, "chat_template_kwargs", dict)
    turns = [_message(message, i) for i, message in enumerate(messages)]
    if isinstance(value.get("system"), str) and value["system"] and turns and turns[0]["role"] != "system":
        turns, first = [{"role": "system", "content": value["system"]}, *turns], first + bool(first)
    prompted = next((i for i, turn in enumerate(turns) if turn["role"] in ("user", "tool")), len(turns))
    answers = [i for i, t in enumerate(turns) if t["role"] == "assistant" and i >= first and t.pop("weight", 1) != 0]
    kept = [i for i in answers if i > prompted]
    ended = None if finish_reason is None else str(finish_reason)
    return Conversation(turns, kept, tools, {**template_kwargs, **(own or {})}, ended, len(answers) - len(kept))


def is_cut(finish_reason: object) -> bool:
    """Return whether an answer ended at a limit of length, without an end token."""
    return finish_reason in _CUT


def is_messages(value: object) -> TypeGuard[list[Message]]:
    """Return whether a value is a list of messages, of OpenAI's or ShareGPT's spelling, and not empty."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role", m.get("from")), str) for m in value)
    )


def role_of(message: Mapping[str, Any]) -> str:
    """Return a message's role in OpenAI's spelling."""
    role = str(message.get("role", message.get("from")))
    return _ROLES.get(role, role)


def _parsed(value: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field that may be JSON text; None where it is absent or empty."""
    found = value.get(name)
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except ValueError as error:
            raise RowFault("bad-row", f"{name} is not valid JSON: {error}") from None
    if not found:
        return None
    if not isinstance(found, kind):
        raise RowFault("bad-row", f"{name} is {type(found).__name__}, expected {kind.__name__} or JSON text of one")
    return found


def _message(message: Any, number: int) -> Message:
    if not is_messages([message]):
        raise RowFault("bad-row", f"message {number} has no role")
    named = ("role", "from", "content", "value")
    out = {name: item for name, item in message.items() if item is not None and name not in named}
    role = role_of(message)
    content = message.get("content", message.get("value"))
    if message.get("from") == "function_call":  # LLaMA-Factory's ShareGPT: the call is the message
        out["tool_calls"], content = [_parsed({"call": content}, "call", dict)], None
    if "reasoning" in out and "reasoning_content" not in out:  # what vLLM and OpenRouter call it
        out["reasoning_content"] = out.pop("reasoning")
    if isinstance(content, list):
        content = _joined(content, role, out)
    elif content is not None and not isinstance(content, str):
        raise RowFault("bad-row", f"content of role {role} is {type(content).__name__}, expected text")
    if (legacy := out.pop("function_call", None)) and not out.get("tool_calls"):
        out["tool_calls"] = [legacy]
    if calls := _parsed(out, "tool_calls", list):
        out["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        out.pop("tool_calls", None)
    if content is None and role == "assistant" and out.get("reasoning_content"):
        content = ""
    if content is None and not (role == "assistant" and calls):
        raise RowFault("bad-row", f"content of role {role} is missing, expected text")
    return {"role": role, "content": content, **out}


def _joined(parts: list[Any], role: str, message: Message) -> str:
    """Return the text of a list of parts; thoughts among them go into ``reasoning_content``."""
    texts, thoughts = [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in _THOUGHT_PARTS and isinstance(part.get(kind), str) and role == "assistant":
            thoughts.append(part[kind])
        else:
            raise RowFault("bad-row", f"content of role {role} has a part that is not text: {kind}")
    if thoughts:
        message.setdefault("reasoning_content", "".join(thoughts))
    return "".join(texts)


def _tool_call(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are a mapping, as vLLM and SGLang give them to the template."""
    if not isinstance(call, dict):
        raise RowFault("bad-row", f"a tool call is {type(call).__name__}, expected an object")
    flat = "function" not in call
    function = call if flat else call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RowFault("bad-row", "a tool call has no function name")
    function = {**function, "arguments": _parsed(function, "arguments", dict) or {}}
    return {"type": "function", "function": function} if flat else {**call, "function": function}


class ChatTemplate:
    """A target's chat template.

    Args:
        tokenizer: The target's.

    Attributes:
        ignored: What rows gave and the template does not use -> rows.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.ignored: Counter[str] = Counter()

    @cached_property
    def _sources(self) -> str:
        require_template(self._tokenizer)
        template = self._tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else str(template)

    @property
    def marks(self) -> bool:
        """Whether the template marks what the assistant wrote."""
        return bool(_MARKS.search(self._sources))

    def render(self, chat: Conversation, stop: int | None = None, *, add_generation_prompt: bool = False) -> str:
        """Return the text of the messages before number ``stop``.

        Raises:
            RowFault: ``template-refused``.
            InputError: ``template-missing``, ``template-invalid``.
        """
        return str(self._apply(chat, stop, tokenize=False, add_generation_prompt=add_generation_prompt))

    def marked(self, chat: Conversation) -> list[int]:
        """Return for each token of the text 1 where the template marks it as the assistant's.

        Raises:
            RowFault: ``template-refused``.
        """
        made = self._apply(chat, None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(made["assistant_masks"])

    def check(self, chat: Conversation) -> None:
        """Note what a row gives and the template does not mention, so that it cannot reach the target.

        Raises:
            RowFault: ``template-refused`` when an answer calls tools and the template would not write the calls.
        """
        calls = [i for i in chat.answers if chat.messages[i].get("tool_calls")]
        if calls and "tool_calls" not in self._sources:
            raise RowFault("template-refused", f"the template does not write the tool_calls of message {calls[0]}")
        given = {name for message in chat.messages for name in ("tool_calls", "reasoning_content") if message.get(name)}
        given |= {"tools"} if chat.tools else set()
        names = given | chat.template_kwargs.keys()
        self.ignored.update(name for name in names if not re.search(rf"\b{re.escape(name)}\b", self._sources))

    def say_ignored(self) -> None:
        """Report what :meth:`check` noted."""
        for name, n in sorted(self.ignored.items()):
            say(f"the chat template does not use {name}: it is not in the ids (rows that have it: {n})")

    def hint(self) -> str:
        """Return a remark for a prompt that the row does not go on from, when the template can leave thoughts out."""
        if "enable_thinking" not in self._sources:
            return ""
        return "; for rows without thoughts: --chat-template-kwargs '{\"enable_thinking\": false}'"

    def _apply(self, chat: Conversation, stop: int | None, **options: Any) -> Any:
        import jinja2

        require_template(self._tokenizer)
        try:
            # a variable of the template may not replace the template itself
            fixed = {"tools": chat.tools, "chat_template": None, **options}
            return self._tokenizer.apply_chat_template(chat.messages[:stop], **{**chat.template_kwargs, **fixed})
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
