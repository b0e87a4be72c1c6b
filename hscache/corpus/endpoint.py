"""Let a serving engine write the completions: requests over HTTP, and the checks of its answers.

A prompt goes out as token ids, so that neither the engine's chat template nor its tokenizer is involved, and ids come
back: ``/completion`` of llama.cpp, ``/generate`` of SGLang, ``/v1/completions`` of vLLM. Other OpenAI-compatible
servers give only text. The ids are then the target's tokenization of it, if that gives the text again and has as many
tokens as the server counted.

Nothing is believed: ids of another tokenizer, a wrong count or a missing end token would be learned silently. HTTP
proxies of the environment are not used, and redirects are not followed, because another host would get the key.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from hscache.console import Progress, check_stop, say
from hscache.corpus.boundaries import Encoder
from hscache.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from hscache.corpus.generate import Sampling
    from hscache.corpus.writer import Journal

REASONS: dict[str, str] = {
    "no-answer": "the server did not answer this prompt, however often it was asked",
    "prompt-refused": "the server refused this prompt with HTTP status 400, 413 or 422",
    "unfinished": "the server ended the text neither at an end token nor at its length",
    "ids-out-of-vocab": "the server gave ids that are not in the target's vocabulary",
    "other-count": "the server gave another number of ids than it says it generated",
    "other-text": "the server's ids decode to another text than the server gave",
    "other-end": "the server stopped at a token that is not an end token of the target",
    "too-many-tokens": "the server wrote more tokens than it was asked for",
    "unstable-text": "the server gives no ids, and the ids of its text give another text or another count",
}
"""Why a prompt has no completion from a server."""
_OTHER_TARGET = {"ids-out-of-vocab", "other-text", "unstable-text"}
_KEYS = ("HSCACHE_API_KEY", "OPENAI_API_KEY")
_TRIES = 6
"""Requests for one prompt."""
_BACKOFF_S = 1.0
"""Pause in seconds after the first failed try, on average; it doubles with every further one."""
_LONGEST_PAUSE_S = 600.0
_CONNECT_S = 10.0
_GRACE_S = 10.0
"""Seconds that running requests have after a signal."""
_POLL_S = 0.1
_MOST_FAILED = 16
"""Prompts in a row without an answer before the run stops."""
_FIRST_ANSWERS = 8
"""The run stops if all of this many first answers are of another tokenizer."""
_BLAMES_THE_PROMPT = (400, 413, 422)
_HINT = "start the server or correct its address; then run the same command again: finished prompts are kept"
_SHOWN = 300
"""Most characters of an answer that a message shows."""


class PromptFault(Exception):
    """One prompt has no completion; others may have one.

    Args:
        reason: A key of :data:`REASONS`.
        detail: The value that the server gave, and the expected one.
        error: What stops the run if prompt after prompt has it; None after an answer.
    """

    def __init__(self, reason: str, detail: str, error: EnvironmentFault | None = None) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail, self.error = reason, detail, error


class _Again(Exception):
    """A request failed, but may succeed when it is sent again ``after_s`` seconds later."""

    def __init__(self, error: EnvironmentFault, after_s: float = 0.0) -> None:
        super().__init__(error.message)
        self.error, self.after_s = error, after_s


@dataclass(frozen=True)
class Answer:
    """A completion as the server gave it, unchecked.

    Attributes:
        text: The text, without the end token.
        ids: The token ids; None if the server gives none.
        n_tokens: How many tokens the server says it generated; None if it does not say.
        end: ``stop`` at an end token, ``length`` at the limit, or the server's word for another end.
    """

    text: str
    ids: list[Any] | None
    n_tokens: int | None
    end: str


def _ask_llama_cpp(prompt: Sequence[int], sampling: Sampling, seed: int, ends: list[int]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"samplers": ["top_k"], "top_k": 1, "temperature": 0}
    if sampling.temperature > 0:
        chosen = {"samplers": ["temperature", "top_p"], "temperature": sampling.temperature, "top_p": sampling.top_p}
        chosen |= {"top_k": 0, "min_p": 0.0}
    # states that an earlier request left would make an answer depend on the order of the requests
    body = {"prompt": prompt, "n_predict": sampling.max_new_tokens, "return_tokens": True, "cache_prompt": False}
    return {**body, "seed": seed, **chosen}


def _read_llama_cpp(found: dict[str, Any]) -> Answer:
    end = {"eos": "stop", "limit": "length"}.get(found["stop_type"], found["stop_type"])
    return Answer(found["content"], found.get("tokens") or None, found.get("tokens_predicted"), end)


def _plain(sampling: Sampling, ends: list[int]) -> dict[str, Any]:
    """Return what vLLM and SGLang call alike: without it a server's own defaults would apply."""
    chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": -1, "min_p": 0.0}
    chosen |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return {**chosen, "stop_token_ids": ends, "skip_special_tokens": False, "spaces_between_special_tokens": False}


def _ask_sglang(prompt: Sequence[int], sampling: Sampling, seed: int, ends: list[int]) -> dict[str, Any]:
    chosen = {**_plain(sampling, ends), "max_new_tokens": sampling.max_new_tokens}
    if sampling.temperature > 0:  # older versions do not know it
        chosen["sampling_seed"] = seed
    return {"input_ids": prompt, "sampling_params": chosen}


def _read_sglang(found: dict[str, Any]) -> Answer:
    meta = found["meta_info"]
    return Answer(found["text"], found.get("output_ids"), meta.get("completion_tokens"), meta["finish_reason"]["type"])


def _ask_openai(prompt: Sequence[int], sampling: Sampling, seed: int, ends: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": sampling.max_new_tokens, "seed": seed, "return_token_ids": True}
    return {**body, **_plain(sampling, ends)}


def _read_openai(found: dict[str, Any]) -> Answer:
    choice, usage = found["choices"][0], found.get("usage") or {}
    return Answer(choice["text"], choice.get("token_ids"), usage.get("completion_tokens"), choice["finish_reason"])


_PROTOCOLS: dict[str, tuple[str, Callable[..., dict[str, Any]], Callable[[dict[str, Any]], Answer]]] = {
    "llama.cpp": ("/completion", _ask_llama_cpp, _read_llama_cpp),
    "SGLang": ("/generate", _ask_sglang, _read_sglang),
    "vLLM": ("/v1/completions", _ask_openai, _read_openai),
    "OpenAI-compatible": ("/v1/completions", _ask_openai, _read_openai),
}
"""Kind of server -> path, body of a request, and how to read the answer."""


class Server:
    """A serving engine; the constructor asks it for its kind, its models and its context.

    ``HSCACHE_API_KEY``, or else ``OPENAI_API_KEY``, is sent to it alone and never shown.

    Args:
        url: Its address, with or without ``/v1``.
        model: The server's name of the model; None for its only model.
        timeout_s: Longest time in seconds without a byte of an answer.

    Attributes:
        url: The address without ``/v1``, user and password.
        kind: ``llama.cpp``, ``SGLang``, ``vLLM`` or ``OpenAI-compatible``.
        model: The server's name of the model.
        context: Most tokens of prompt and completion; None if the server does not say.

    Raises:
        ConfigError: ``server-url``; ``server-key``; ``server-model`` if the server has not the model, or if no model is
            given and the server has none or several.
        EnvironmentFault: ``server-unreachable``, ``server-timeout``, ``server-refused``, ``server-answer``.
    """

    def __init__(self, url: str, model: str | None = None, *, timeout_s: float = 600.0) -> None:
        self._parse(url)
        self._timeout_s, self._halted, self._open = timeout_s, threading.Event(), set[socket.socket]()
        self.kind = "OpenAI-compatible"
        try:
            found = self._ask("/v1/models")
            entries = {str(entry["id"]): entry for entry in found["data"]}
        except _Again as failed:
            raise failed.error from None
        except (KeyError, TypeError):
            raise self._strange("/v1/models", found) from None
        if model is None and len(entries) != 1:
            message = f"{self.url} has {len(entries)} models: {sorted(entries)}"
            raise ConfigError("server-model", message, hint="choose one with --model")
        if model is not None and model not in entries:
            raise ConfigError("server-model", f"{self.url} has no model {model!r}, but {sorted(entries)}")
        self.model = next(iter(entries)) if model is None else model
        self.kind, context = self._probe(entries[self.model])
        self.context = context if isinstance(context, int) and context > 0 else None

    def describe(self) -> str:
        """Return address, kind, model and context in one line."""
        room = "unknown context" if self.context is None else f"context of {self.context:,} tokens"
        return f"{self.url}: {self.kind}, model {self.model!r}, {room}"

    def complete(self, prompt: Sequence[int], sampling: Sampling, seed: int, ends: list[int]) -> Answer:
        """Return the completion of a prompt, unchecked; ask again after failures that may pass.

        Args:
            prompt: Token ids.
            sampling: How tokens are chosen.
            seed: Seed of this request; less than 2**31.
            ends: Token ids at which to stop.

        Raises:
            PromptFault: ``no-answer``, ``prompt-refused``.
            EnvironmentFault: ``server-refused`` for a refusal that every prompt would get.
        """
        path, make, read = _PROTOCOLS[self.kind]
        body = {"model": self.model, "stream": False, **make(list(prompt), sampling, seed, ends)}
        for tried in range(1, _TRIES + 1):
            try:
                found = self._ask(path, body)
                with suppress(KeyError, TypeError, IndexError, AttributeError):
                    answer = read(found)
                    if isinstance(answer.text, str) and isinstance(answer.ids, list | None):
                        return answer
                raise _Again(self._strange(path, found))
            except _Again as failed:
                error = failed.error
                pause = max(failed.after_s, _BACKOFF_S * 2 ** (tried - 1) * random.uniform(0.5, 1.5))
            if tried < _TRIES and self._halted.wait(min(pause, _LONGEST_PAUSE_S)):
                break
        raise PromptFault("no-answer", f"asked {tried} times; the last time: {error.message}", error)

    def halt(self) -> None:
        """Let running requests finish, but send none again."""
        self._halted.set()

    def close(self) -> None:
        """Break off running requests."""
        self._halted.set()
        for connection in list(self._open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _parse(self, url: str) -> None:
        """Set address and headers."""
        base = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        try:
            parts = urlsplit(base)
            self._host, self._port, self._path = parts.hostname, parts.port, parts.path
        except ValueError:
            self._host = None
        shown = re.sub(r"//.*@", "//", base)
        if not self._host or not re.fullmatch(r"https?://[!-~]+", base) or parts.query or parts.fragment:
            what = f"{re.sub('//.*@', '//', url)!r}: expected the URL of a server"
            raise ConfigError("server-url", what, hint="such as http://localhost:8000")
        self.url, self._secure, self._headers = shown, parts.scheme == "https", {"Content-Type": "application/json"}
        name = next((name for name in _KEYS if os.environ.get(name, "").strip()), _KEYS[0])
        key = os.environ.get(name, "").strip()
        if not re.fullmatch("[!-~]*", key):  # the message of http.client would show the key
            raise ConfigError(
                "server-key",
                f"{name} ({len(key)} characters): expected visible ASCII characters only",
                hint="set it to the key alone, in one line, or unset it",
            )
        password = unquote(parts.password or "")
        self._secrets = [secret for secret in (key, password) if secret]
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        elif parts.username:
            login = f"{unquote(parts.username)}:{password}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(login).decode()}"

    def _probe(self, entry: dict[str, Any]) -> tuple[str, Any]:
        """Return the kind of server and its context, given its description of the model."""
        settings = self._look("/props").get("default_generation_settings")
        if isinstance(settings, dict):
            return "llama.cpp", settings.get("n_ctx")
        context = entry.get("max_model_len")
        if "model_path" in {**self._look("/get_model_info"), **self._look("/model_info")}:
            return "SGLang", context or self._look("/get_server_info").get("context_length")
        return "vLLM" if entry.get("owned_by") == "vllm" else "OpenAI-compatible", context

    def _look(self, path: str) -> dict[str, Any]:
        """Return the object at a path that not every kind of server has."""
        try:
            return self._ask(path)
        except (EnvironmentFault, _Again):
            return {}

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object at a path; post a body if there is one."""
        where = f"{self.url}{path}"
        try:
            status, after, said = self._send(path, body)
        except TimeoutError:
            late = f"{where}: no answer within {self._timeout_s:g} s"
            raise _Again(EnvironmentFault("server-timeout", late, hint=_HINT)) from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            what = f"{where}: {type(error).__name__}: {self._shown(error)}"
            raise _Again(EnvironmentFault("server-unreachable", what, hint=_HINT)) from None
        text = said.decode(errors="replace")
        if status != 200:
            hint = f"set {_KEYS[0]} or {_KEYS[1]} to the server's key" if status in (401, 403) else _HINT
            refused = EnvironmentFault("server-refused", f"{where}: HTTP {status}: {self._shown(text)}", hint=hint)
            if status == 429 or status >= 500:
                raise _Again(refused, _seconds(after))
            if body is not None and status in _BLAMES_THE_PROMPT:
                raise PromptFault("prompt-refused", f"HTTP {status}: {self._shown(text)}", refused)
            raise refused
        with suppress(ValueError):
            found = json.loads(said)
            if isinstance(found, dict):
                return found
        raise _Again(self._strange(path, text))

    def _send(self, path: str, body: dict[str, Any] | None) -> tuple[int, str | None, bytes]:
        """Return status, Retry-After and body of an answer."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        assert self._host
        connection = kind(self._host, self._port, timeout=min(_CONNECT_S, self._timeout_s))
        connection.connect()
        wire: socket.socket = connection.sock
        self._open.add(wire)
        try:
            wire.settimeout(self._timeout_s)
            content = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", self._path + path, content, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get("Retry-After"), answer.read()
        finally:
            self._open.discard(wire)
            connection.close()

    def _strange(self, path: str, said: object) -> EnvironmentFault:
        message = f"{self.url}{path}: expected an answer as {self.kind} gives it, got {self._shown(said)}"
        return EnvironmentFault("server-answer", message, hint=_HINT)

    def _shown(self, said: object) -> str:
        """Return a server's words, without what it must not repeat."""
        text = str(said)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return repr(text[:_SHOWN])


def _seconds(after: str | None) -> float:
    """Return the seconds of a Retry-After header."""
    try:
        return max(0.0, float(after or 0))
    except ValueError:
        with suppress(ValueError, TypeError):
            return max(0.0, parsedate_to_datetime(str(after)).timestamp() - time.time())
    return 0.0


class AnswerCheck:
    """Checks answers against the target.

    Args:
        tokenizer: The target's.
        ends: Its end tokens.
        vocab_size: Rows of its embedding.
        max_new_tokens: Most tokens of a completion.
    """

    def __init__(self, tokenizer: Any, ends: set[int], vocab_size: int, max_new_tokens: int) -> None:
        self._tokenizer, self._encoder = tokenizer, Encoder(tokenizer)
        self.ends, self._vocab_size, self._most = ends, vocab_size, max_new_tokens
        self._special, self._end = set(tokenizer.all_special_ids), tokenizer.eos_token_id

    def __call__(self, answer: Answer) -> tuple[list[int], list[str]]:
        """Return the ids of a completion up to its first end token, and notes of what was done to them.

        Raises:
            PromptFault: With a reason of :data:`REASONS`.
        """
        if answer.end not in ("stop", "length"):
            raise PromptFault("unfinished", f"the server's finish reason is {answer.end!r}, expected stop or length")
        ids, notes = (self._from_text(answer), ["from_text"]) if answer.ids is None else (self._given(answer), [])
        end = next((i for i, token in enumerate(ids) if token in self.ends), None)
        left_out = answer.end == "stop" and end is None
        if len(ids) + left_out > self._most:
            raise PromptFault("too-many-tokens", f"{len(ids) + left_out} tokens, {self._most} were asked for")
        if end is not None:
            return ids[: end + 1], notes
        if left_out:
            if self._end is None or (ids and ids[-1] in self._special):
                raise PromptFault("other-end", f"the last id is {ids[-1:]}, expected one of {sorted(self.ends)}")
            return [*ids, self._end], [*notes, "end_added"]
        return ids, notes

    def _given(self, answer: Answer) -> list[int]:
        ids = list(answer.ids or ())
        bad = next((token for token in ids if type(token) is not int or not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise PromptFault("ids-out-of-vocab", f"{bad!r:.40}, expected an id below {self._vocab_size}")
        ended = any(token in self.ends for token in ids)
        left_out = answer.end == "stop" and not ended
        if answer.n_tokens is not None and answer.n_tokens not in (len(ids), len(ids) + left_out):
            raise PromptFault("other-count", f"{len(ids)} ids, but the server says it generated {answer.n_tokens!r}")
        before = next((ids[:i] for i, token in enumerate(ids) if token in self.ends), ids)
        # llama.cpp leaves special tokens out of the text, and no server gives the end token
        texts = (self._decode(part, hide) for part in (before, ids) for hide in (False, True))
        if _comparable(answer.text) not in map(_comparable, texts):
            detail = f"the text is {answer.text[:_SHOWN]!r}, the ids decode to {self._decode(before, False)[:_SHOWN]!r}"
            raise PromptFault("other-text", detail)
        return ids

    def _from_text(self, answer: Answer) -> list[int]:
        ids = self._encoder.encode([answer.text], special=False)[0].ids
        if self._decode(ids, False) != answer.text:
            raise PromptFault("unstable-text", f"its ids decode to another text than {answer.text[:_SHOWN]!r}")
        if answer.n_tokens not in (len(ids), len(ids) + (answer.end == "stop")):
            raise PromptFault("unstable-text", f"{len(ids)} tokens, but the server generated {answer.n_tokens!r}")
        return ids

    def _decode(self, ids: list[int], hide_special: bool) -> str:
        hidden = {"skip_special_tokens": hide_special, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **hidden))


def _comparable(text: str) -> str:
    """Return a text without that in which engines differ: half a character at its end, and spaces at its beginning."""
    return re.sub("\ufffd+", "\ufffd", text).removesuffix("\ufffd").lstrip(" ")


def ask(
    server: Server,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    check: AnswerCheck,
    journal: Journal,
    stop: Sequence[int],
    *,
    concurrency: int,
) -> dict[int, PromptFault]:
    """Let a server complete the prompts that the journal does not have.

    Args:
        server: The server; it is closed at the end.
        prompts: Token ids of all prompts.
        sampling: How tokens are chosen; the seed of a request follows from the seed and the prompt's number.
        check: What an answer must be.
        journal: Gets each completion as soon as it is there.
        stop: Signals that have come.
        concurrency: Requests at once.

    Returns:
        Number of each prompt without a completion -> why.

    Raises:
        EnvironmentFault: ``server-refused`` for a wrong key, model or address; ``server-other-target``;
            ``server-unreachable``, ``server-timeout``, ``server-refused`` or ``server-answer`` after many prompts in a
            row without an answer.
        Interrupted: After a signal, when the running requests have finished or a short time has passed.
    """
    todo = [i for i in range(len(prompts)) if i not in journal]
    following, faults = iter(todo), dict[int, PromptFault]()
    progress, ends = Progress("generate", len(todo), "prompts"), sorted(check.ends)
    running: dict[Future[Answer], int] = {}
    guard, deadline = _Guard(server), float("inf")
    pool = ThreadPoolExecutor(concurrency)
    try:
        while True:
            while not stop and len(running) < concurrency and (i := next(following, None)) is not None:
                running[pool.submit(server.complete, prompts[i], sampling, _seed(sampling.seed, i), ends)] = i
            if stop and deadline == float("inf"):
                server.halt()
                deadline = time.monotonic() + _GRACE_S
            if not running or time.monotonic() > deadline:
                break
            for future in wait(running, _POLL_S, FIRST_COMPLETED).done:
                i, fault = running.pop(future), None
                try:
                    ids, notes = check(future.result())
                    journal.append({i: ids}, notes)
                except PromptFault as error:
                    fault = faults[i] = error
                if not stop:
                    guard.see(fault)
                progress.advance(1)
    finally:
        server.close()
        pool.shutdown(cancel_futures=True)
        progress.close()
    check_stop(stop)
    return faults


class _Guard:
    """Stops a run that cannot succeed."""

    def __init__(self, server: Server) -> None:
        self._server, self._failed, self._strange, self._good = server, 0, 0, False

    def see(self, fault: PromptFault | None) -> None:
        """Note how a prompt ended."""
        self._good |= fault is None
        self._failed = self._failed + 1 if fault and fault.error else 0
        if fault and fault.error and self._failed == _MOST_FAILED:
            say(f"{self._failed} prompts in a row have no answer; the last error:")
            raise fault.error
        if fault and fault.reason in _OTHER_TARGET and not self._good:
            self._strange += 1
            if self._strange == _FIRST_ANSWERS:
                raise EnvironmentFault(
                    "server-other-target",
                    f"{self._server.describe()}: none of the first answers fits the target's tokenizer; {fault}",
                    hint="let it serve the checkpoint of --target, or choose the model with --model",
                )


def _seed(seed: int, number: int) -> int:
    """Return the seed of a prompt's request: less than 2**31, which every engine takes."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4]) >> 1
