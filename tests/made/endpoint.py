"""A serving engine on the loopback that speaks the protocols of ``generate --endpoint`` and misbehaves as it is told.

Its model is a function of the prompt's ids, so that a test knows what belongs into the corpus.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KINDS = ("llama.cpp", "SGLang", "vLLM", "OpenAI-compatible")
PATHS = dict(zip(KINDS, ("/completion", "/generate", "/v1/completions", "/v1/completions"), strict=True))
WORDS = ["x = ", "return ", "value", "for i in range", "(10)", ":\n", "    ", "self", ".", "# done\n"]


@dataclass
class Stub:
    """What the engine is and does.

    Attributes:
        tokenizer: Of the target.
        kind: Whose protocol; ``OpenAI-compatible`` gives no ids.
        fault: Prompt and how often it was asked before -> name of a fault, or None.
        models: Its models.
        context: Its context in tokens.
        delay_s: Time that an answer takes.
        key: The only key that is accepted; None for any.
        asked: Prompt -> times.
        bodies: Each request's body.
        headers: Each request's headers.
        at_once: Most requests that ran at one time.
    """

    tokenizer: Any
    kind: str = "vLLM"
    fault: Callable[[tuple[int, ...], int], str | None] = lambda prompt, before: None
    models: Sequence[str] = ("tiny",)
    context: int | None = 4096
    delay_s: float = 0.0
    key: str | None = None
    asked: Counter[tuple[int, ...]] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    running: int = 0
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, prompt: Sequence[int], most: int) -> list[int]:
        """Return the completion of a prompt, with its end token if it has one."""
        numbers = hashlib.sha256(json.dumps(list(prompt)).encode()).digest()
        text = "".join(WORDS[number % len(WORDS)] for number in numbers[: 3 + numbers[0] % 16])
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return [int(token) for token in ids[:most]]

    def look(self, path: str) -> dict[str, Any] | None:
        """Return what a GET gives."""
        if path == "/v1/models":
            owner = {"vLLM": "vllm", "llama.cpp": "llamacpp", "SGLang": "sglang"}.get(self.kind, "somebody")
            length = {} if self.kind == "llama.cpp" else {"max_model_len": self.context}
            return {"data": [{"id": name, "owned_by": owner, **length} for name in self.models]}
        if path == "/props" and self.kind == "llama.cpp":
            return {"default_generation_settings": {"n_ctx": self.context}, "model_path": "tiny.gguf"}
        if path == "/get_model_info" and self.kind == "SGLang":
            return {"model_path": "tiny"}
        return None

    def answer(self, body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        """Return what a POST gives."""
        prompt = body["input_ids"] if self.kind == "SGLang" else body["prompt"]
        most = body.get("n_predict") or body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        ids = self.write(prompt, most)
        if fault == "too many":
            ids = [5] * (most + 1)
        elif fault == "empty":
            ids = [self.tokenizer.eos_token_id]
        stopped, count = ids[-1] == self.tokenizer.eos_token_id, len(ids)
        text = self.tokenizer.decode(ids[:-1] if stopped else ids)
        if fault == "other ids":
            ids = [(token + 700) % 2048 or 1 for token in ids[:-1]] + ids[-1:]
        elif fault == "large ids":
            ids[0] = 2048
        elif fault == "no numbers":
            ids[0] = True
        elif fault == "count":
            count += 3
        elif fault == "no end":
            ids = ids[:-1]
        elif fault == "unstable":  # the second half of a character
            text = "\ufffd" + text
        end = {"unfinished": "abort"}.get(str(fault), "stop" if stopped else "length")
        if self.kind == "llama.cpp":
            kinds = {"stop": "eos", "length": "limit", "abort": "none"}
            return {"content": text, "tokens": ids, "tokens_predicted": count, "stop_type": kinds[end]}
        if self.kind == "SGLang":
            return {
                "text": text,
                "output_ids": ids,
                "meta_info": {"completion_tokens": count, "finish_reason": {"type": end}},
            }
        choice = {"text": text, "finish_reason": end, "index": 0}
        if self.kind == "vLLM" and body.get("return_token_ids"):
            choice["token_ids"] = ids
        return {"choices": [choice], "usage": {"completion_tokens": count}}


@contextmanager
def serve(stub: Stub) -> Iterator[str]:
    """Let a stub answer at the address that is yielded."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stub.headers.append(dict(self.headers))
            found = stub.look(self.path)
            if stub.key and self.headers.get("Authorization") != f"Bearer {stub.key}":
                self._say(401, f"no: {self.headers.get('Authorization')}".encode())
            else:
                self._say(404 if found is None else 200, json.dumps(found or {}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = tuple(body["input_ids"] if stub.kind == "SGLang" else body["prompt"])
            with stub.lock:
                before = stub.asked[prompt]
                stub.asked[prompt] += 1
                stub.running += 1
                stub.at_once = max(stub.at_once, stub.running)
                stub.bodies.append(body)
                stub.headers.append(dict(self.headers))
            if stub.delay_s:
                stub.closing.wait(stub.delay_s)
            with stub.lock:  # before the answer: the client may send its next request as soon as it has it
                stub.running -= 1
            self._answer(body, stub.fault(prompt, before) if self.path == PATHS[stub.kind] else "404")

        def _answer(self, body: dict[str, Any], fault: str | None) -> None:
            if fault is not None and fault.split()[0].isdecimal():
                status, *after = fault.split(maxsplit=1)
                self._say(int(status), f"status {status}; {self.headers.get('Authorization')}".encode(), *after)
            elif fault == "hang":  # runs until the server ends, whether the client waits or not
                stub.running += 1
                stub.closing.wait(60)
            elif fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            elif fault == "html":
                self._say(200, b"<html>welcome</html>")
            elif fault == "other json":
                self._say(200, b'{"error": "out of memory"}')
            else:
                content = json.dumps(stub.answer(body, fault)).encode()
                self._say(200, content[:20] if fault == "cut" else content, length=len(content))

        def _say(self, status: int, content: bytes, after: str = "", *, length: int | None = None) -> None:
            self.send_response(status)
            if after:
                self.send_header("Retry-After", after)
            self.send_header("Content-Length", str(len(content) if length is None else length))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: Any, address: Any) -> None:
            pass

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stub.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
