"""A serving engine on the loopback that knows what to write after which prompt, for the tests of references."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Say = tuple[int, bytes]
"""HTTP status and body."""


@dataclass
class Engine:
    """What the engine says.

    Attributes:
        texts: Completion of each prompt, an end token included.
        ends: End tokens.
        decode: Text of tokens.
        kind: Whose answers: ids with the end token as vLLM has them, ids with log-probabilities as llama.cpp, or none.
        models: Its models.
        edit: Changes an answer's body, given the request's; or says something else altogether.
        seen: Path, headers and body of every request.
    """

    texts: dict[tuple[int, ...], list[int]]
    ends: set[int]
    decode: Callable[[Sequence[int]], str]
    kind: Literal["vllm", "llamacpp", "text"] = "vllm"
    models: Sequence[str] = ("tiny",)
    edit: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any] | Say] = lambda asked, body: body
    seen: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)

    def listing(self) -> dict[str, Any]:
        return {"data": [{"id": name, "owned_by": self.kind} for name in self.models]}

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        ids = self.texts[tuple(asked["prompt"])][: asked["max_tokens"]]
        stopped = ids[-1] in self.ends
        inner = ids[:-1] if stopped else ids
        choice = {"index": 0, "text": self.decode(inner), "finish_reason": "stop" if stopped else "length"}
        body: dict[str, Any] = {"model": asked["model"], "choices": [{**choice, "logprobs": None}]}
        if self.kind == "vllm" and asked["return_token_ids"]:
            body["choices"][0] |= {"token_ids": ids, "prompt_token_ids": asked["prompt"]}
        elif self.kind == "llamacpp" and asked["logprobs"]:
            body["choices"][0]["logprobs"] = {"content": [{"id": token, "logprob": 0.0} for token in inner]}
        if self.kind != "text":
            body["usage"] = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": len(ids)}
        return body


@contextmanager
def serve(engine: Engine) -> Iterator[str]:
    """Let an engine answer at the address that is yielded."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({}, engine.listing())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(asked, engine.complete(asked) if self.path == "/v1/completions" else (404, b"no such path"))

        def _answer(self, asked: dict[str, Any], body: dict[str, Any] | Say) -> None:
            engine.seen.append((self.path, dict(self.headers), asked))
            said = engine.edit(asked, body) if isinstance(body, dict) else body
            status, content = (200, json.dumps(said).encode()) if isinstance(said, dict) else said
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", content.decode())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
