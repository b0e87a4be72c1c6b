"""Request completions from a serving engine over HTTP.

``/v1/completions`` takes a prompt as token ids, so the engine's chat template and tokenizer are not involved. Answers
differ: vLLM and SGLang add ``token_ids`` to a choice if the request has ``return_token_ids`` (older versions and other
servers do not); llama.cpp gives an ``id`` with every token of ``logprobs``; other answers have only the text. The end
token is not in the text, but may be among the ids.
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
    "no-text": "the server's text is not valid Unicode",
    "other-prompt": "the server read other tokens than were sent",
    "other-tokens": "the server gave ids outside the target's vocabulary, or more tokens than its positions allow",
    "prompt-refused": "the server refused this prompt with HTTP status 400, 413 or 422",
    "too-many-tokens": "the server wrote more tokens than it was asked for",
    "unfinished": "the server ended the text neither at an end token nor at its length",
}
"""Why a prompt has no reference."""
_BLAMES_THE_PROMPT = (400, 413, 422)
_LLAMA_CPP = {"logprobs": 1, "n_probs": 1, "repeat_penalty": 1.0}
"""Fields with which llama.cpp returns ids; other engines would compute log-probabilities in vain."""
_SHOWN = 300
"""Most characters of an answer that a message shows."""


class PromptFault(Exception):
    """One prompt has no completion; others may have one.

    Args:
        reason: A key of :data:`REASONS`.
        detail: The value that the server gave, and the expected one.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Answer:
    """A completion as the server gave it.

    Attributes:
        text: The text, without the prompt.
        ids: The token ids, unchecked and of any type; None if the server gives none.
        n_tokens: The server's count of tokens, or None.
        stopped: Whether the text ended at an end token; if not, it reached its length.
    """

    text: str
    ids: list[Any] | None
    n_tokens: int | None
    stopped: bool


class Server:
    """An OpenAI-compatible server; the constructor asks it for its models. ``OPENAI_API_KEY`` is sent to it alone.

    Args:
        url: Its address, with or without ``/v1``.
        model: The server's name of the model; None for its only model.
        timeout_s: Longest time in seconds without a byte of the answer.

    Raises:
        ConfigError: ``server-url``; ``server-key``; ``server-model`` if no model is given and the server has none or
            several.
        EnvironmentFault: ``server-unreachable``, ``server-timeout``, ``server-refused``, ``server-answer``.
    """

    def __init__(self, url: str, model: str | None = None, *, timeout_s: float = 600.0) -> None:
        self.url, self._timeout_s = url.rstrip("/").removesuffix("/v1") + "/v1", timeout_s
        if not re.fullmatch(r"https?://[!-~]+/v1", self.url):  # urllib also opens files
            raise ConfigError(
                "server-url", f"{url!r}: expected the URL of a server", hint="such as http://localhost:8000"
            )
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not re.fullmatch("[!-~]*", self._key):  # the message of http.client would show the key
            raise ConfigError(
                "server-key",
                f"OPENAI_API_KEY ({len(self._key)} characters): expected visible ASCII characters only",
                hint="set it to the key alone, in one line, or unset it",
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
            max_tokens: Most tokens of the completion.

        Raises:
            PromptFault: ``prompt-refused``, ``other-prompt``, ``no-text``, ``unfinished``.
            EnvironmentFault: As the constructor.
        """
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": max_tokens}
        # a server's defaults may contain a penalty, with which temperature 0 is not greedy
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
        """Return the JSON object at a path; if there is a ``body``, post it."""
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
            hint = "start the server, or correct the address"
            raise EnvironmentFault("server-unreachable", f"{where}: {error}", hint=hint) from error
        shown = said.decode(errors="replace")[:_SHOWN]
        if body is not None and status in _BLAMES_THE_PROMPT:
            raise PromptFault("prompt-refused", f"HTTP {status}: {shown}")
        if status != 200:
            hint = "for 401 and 403 set OPENAI_API_KEY; for 404 correct the address or --reference-model"
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
        return EnvironmentFault("server-answer", message, hint="use a server of vLLM, SGLang or llama.cpp")


def is_text(text: str) -> bool:
    """Return whether a string has no lone surrogates: JSON can contain them, but nothing prints or tokenizes them."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _ids(choice: dict[str, Any]) -> list[Any] | None:
    if isinstance(choice.get("token_ids"), list):
        return list(choice["token_ids"])
    try:
        return [token["id"] for token in choice["logprobs"]["content"]]
    except (KeyError, TypeError):
        return None


class _AsTheyCome(urllib.request.HTTPErrorProcessor):
    """Returns answers of every status to the caller. Redirects are not followed: another host would get the key."""

    def http_response(self, request: urllib.request.Request, response: Any) -> Any:
        return response

    https_response = http_response
