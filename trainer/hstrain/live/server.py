"""Request completions from a serving engine over HTTP.

``/v1/completions`` takes a prompt as token ids, so the engine's chat template and tokenizer are not involved. Answers
differ: vLLM and SGLang add ``token_ids`` to a choice when ``return_token_ids`` is asked for (older ones leave it out,
as other servers do); llama.cpp gives an ``id`` with every token of ``logprobs``; other answers have only the text. The
end token may be among the ids or not, and is not in the text.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hscache.errors import ConfigError, EnvironmentFault

REASONS: dict[str, str] = {
    "empty-completion": "the server wrote nothing but an end token",
    "no-text": "the server's text is no Unicode",
    "other-prompt": "the server read other tokens than were sent",
    "other-tokens": "the server gave ids that the target's vocabulary has not, or more than its positions hold",
    "prompt-refused": "the server answered this prompt with an HTTP status that blames the request",
    "too-many-tokens": "the server wrote more tokens than it was asked for",
    "unfinished": "the server ended the text neither at an end token nor at its length",
}
"""Why a prompt has no reference."""
_BLAMES_THE_PROMPT = (400, 413, 422)
_LLAMA_CPP = {"logprobs": 1, "n_probs": 1, "repeat_penalty": 1.0}
"""What llama.cpp wants beside OpenAI's fields to say ids; other engines would compute log-probabilities for nothing."""
_SHOWN = 300
"""Characters of an answer in a message."""


class PromptFault(Exception):
    """One prompt has no completion; others may have one.

    Args:
        reason: A key of :data:`REASONS`.
        detail: What was got and expected.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Answer:
    """A completion as the server gave it.

    Attributes:
        text: Without the prompt.
        ids: Its tokens as the server has them, of whatever type; None where it gives none.
        n_tokens: How many tokens the server counts, or None.
        stopped: It ended at an end token, not by its length.
    """

    text: str
    ids: list[Any] | None
    n_tokens: int | None
    stopped: bool


class Server:
    """An OpenAI-compatible server, found and asked for its models. ``OPENAI_API_KEY`` goes to its address alone.

    Args:
        url: Its address, with or without ``/v1``.
        model: As the server names it; None for the only one that it has.
        timeout_s: Seconds without a byte after which an answer is given up.

    Raises:
        ConfigError: ``server-url``; ``server-key``; ``server-model`` when none is named and the server has not just
            one.
        EnvironmentFault: ``server-unreachable``, ``server-timeout``, ``server-refused``, ``server-answer``.
    """

    def __init__(self, url: str, model: str | None = None, *, timeout_s: float = 600.0) -> None:
        self.url, self._timeout_s = url.rstrip("/").removesuffix("/v1") + "/v1", timeout_s
        if not re.fullmatch(r"https?://[!-~]+/v1", self.url):  # urllib opens files, too
            raise ConfigError("server-url", f"{url!r} is no address of a server", hint="such as http://localhost:8000")
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", self._key):  # http.client would say so, and show the key
            raise ConfigError(
                "server-key",
                f"OPENAI_API_KEY, {len(self._key)} characters, has one that is no visible ASCII",
                hint="set the one line that is the key, or unset it",
            )
        self._opener = urllib.request.build_opener(_AsTheyCome)
        found = self._ask("models")
        entries = found.get("data")
        if not isinstance(entries, list) or not all(isinstance(e, dict) and "id" in e for e in entries):
            raise self._strange("models", found)
        names = [str(entry["id"]) for entry in entries]
        if not all(map(is_text, names)):
            raise self._strange("models", found)
        if model is None and len(names) != 1:
            message = f"{self.url} has {len(names)} models: {names}"
            raise ConfigError("server-model", message, hint="choose one with --reference-model")
        self.model = names[0] if model is None else model
        self._llama_cpp = any(entry.get("owned_by") == "llamacpp" for entry in entries)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Return the greedy completion of a prompt.

        Args:
            prompt: Token ids.
            max_tokens: Tokens at most.

        Raises:
            PromptFault: ``prompt-refused``, ``other-prompt``, ``no-text``, ``unfinished``.
            EnvironmentFault: As the constructor.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens}
        # a server's own defaults may hold a penalty, with which temperature 0 is not greedy
        body |= {"temperature": 0, "repetition_penalty": 1.0, "return_token_ids": True, "skip_special_tokens": False}
        found = self._ask("completions", body | (_LLAMA_CPP if self._llama_cpp else {}))
        choices, usage = found.get("choices"), found.get("usage") or {}
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str) or not isinstance(usage, dict):
            raise self._strange("completions", found)
        read, counted = choice.get("prompt_token_ids") or list(prompt), usage.get("prompt_tokens") or len(prompt)
        if read != list(prompt) or counted != len(prompt):
            detail = f"{len(prompt)} tokens were sent, the server read {counted}: {str(read)[:_SHOWN]}"
            raise PromptFault("other-prompt", detail)
        if not is_text(choice["text"]):
            raise PromptFault("no-text", f"half a character in {choice['text'][:_SHOWN]!r}")
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise PromptFault("unfinished", f"finish_reason is {finish!r}, expected stop or length")
        return Answer(choice["text"], _ids(choice), usage.get("completion_tokens"), finish == "stop")

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object at a path; posts ``body`` if there is one."""
        where, headers = f"{self.url}/{path}", {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            request = urllib.request.Request(where, None if body is None else json.dumps(body).encode(), headers)
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                status, said = answer.status, answer.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                hint, late = "look at the server's log; ask for fewer tokens", f"no answer within {self._timeout_s:g} s"
                raise EnvironmentFault("server-timeout", f"{where}: {late}", hint=hint) from error
            hint = "start the server, or mend the address"
            raise EnvironmentFault("server-unreachable", f"{where}: {error}", hint=hint) from error
        shown = said.decode(errors="replace")[:_SHOWN]
        if body is not None and status in _BLAMES_THE_PROMPT:
            raise PromptFault("prompt-refused", f"HTTP {status}: {shown}")
        if status != 200:
            hint = "401 and 403 want a key in OPENAI_API_KEY, 404 another address or --reference-model"
            raise EnvironmentFault("server-refused", f"{where}: HTTP {status}: {shown}", hint=hint)
        try:
            found = json.loads(said)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._strange(path, shown)
        return found

    def _strange(self, path: str, said: object) -> EnvironmentFault:
        message = f"{self.url}/{path}: expected OpenAI's JSON, got {str(said)[:_SHOWN]!r}"
        return EnvironmentFault("server-answer", message, hint="name a server of vLLM, SGLang or llama.cpp")


def is_text(said: str) -> bool:
    """Tell whether a string is whole characters: JSON can name halves of them, which nothing prints or tokenizes."""
    return not any("\ud800" <= character <= "\udfff" for character in said)


def _ids(choice: dict[str, Any]) -> list[Any] | None:
    if isinstance(choice.get("token_ids"), list):
        return list(choice["token_ids"])
    try:
        return [token["id"] for token in choice["logprobs"]["content"]]
    except (KeyError, TypeError):
        return None


class _AsTheyCome(urllib.request.HTTPErrorProcessor):
    """Leaves every status to the caller. A redirect is one of them: the key would follow it to another host."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response
