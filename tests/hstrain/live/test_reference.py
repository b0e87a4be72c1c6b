"""A serving engine's text as the reference: the same walk where it writes what we do, and a record where it fails."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hstrain.live.decode import Draft, decode
from hstrain.live.reference import Reference, fetch_references, score_reference
from hstrain.live.server import Answer, Server
from hstrain.live.speculate import speculate_prompts
from hstrain.live.target import LiveTarget, Prompt, Sampling, load_tokenizer
from hstrain.run.checkpoint import load_drafter

import hscache
from hscache.errors import HscacheError
from hscache.store.head import load_head
from tests.made.engine import Engine, serve
from tests.made.hybrid import NEW_TOKENS, PROMPTS, TAPS, Hybrid
from tests.made.live import head_of, live, random_drafter

NAMES = ("add", "lines", "queue")
"""Prompts; the text after the second ends at an end token, the others by length."""

pytestmark = pytest.mark.usefixtures("no_disk")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture(scope="module")
def texts(hybrid: Hybrid) -> dict[tuple[int, ...], list[int]]:
    """The target's own greedy texts, from the store."""
    store, found = hscache.open(hybrid.store), {}
    for name in NAMES:
        sample = store.sample(store.index_of(name))
        ids, first = sample.input_ids.tolist(), int(sample.loss_mask.argmax())
        found[tuple(ids[:first])] = ids[first:]
    assert [ids[-1] == 0 for ids in found.values()] == [False, True, False]
    return found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": name, "prompt": PROMPTS[name]}) + "\n" for name in NAMES))
    return path


@pytest.fixture
def engine(hybrid: Hybrid, texts: dict[tuple[int, ...], list[int]]) -> Engine:
    return Engine(dict(texts), {0}, load_tokenizer(hybrid.target).decode)


@pytest.fixture
def at(hybrid: Hybrid, prompts: Path) -> list[object]:
    """Arguments of ``hstrain speculate``."""
    return [
        hybrid.run, "--store", hybrid.store, "--target", hybrid.target, "--prompts", prompts,
        "--dtype", "float32", "--device", "cpu", "--max-new-tokens", 8,
    ]  # fmt: skip


@pytest.fixture
def speculate(hybrid: Hybrid, prompts: Path) -> Callable[..., dict[str, Any]]:
    drafter, _ = load_drafter(hybrid.run)
    head = load_head(hybrid.store / "target")

    def run(engine: Engine, n_tokens: int = 8, **options: Any) -> dict[str, Any]:
        with serve(engine) as url:
            return speculate_prompts(
                drafter, head, str(hybrid.target), [prompts], Sampling(n_tokens), plain=False,
                reference=Server(url), dtype="float32", device="cpu", **options,
            )  # fmt: skip

    return run


@pytest.fixture
def target(hybrid: Hybrid) -> Iterator[LiveTarget]:
    with live(hybrid.target, TAPS) as opened:
        yield opened


# the engine writes what the target writes


@pytest.mark.parametrize(
    ("kind", "how", "ids_from"),
    [
        ("vllm", {}, "server"), ("llamacpp", {}, "server"), ("text", {}, "text"), ("vllm", {"tree_size": 8}, "server"),
        ("vllm", {"draft_tokens": [1]}, "server"), ("vllm", {"draft_tokens": [1, 2]}, "server"),
    ],
)  # fmt: skip
def test_over_the_same_text_the_walk_makes_the_live_steps(
    speculate: Callable[..., dict[str, Any]], engine: Engine, kind: Any, how: dict[str, Any], ids_from: str
) -> None:
    engine.kind = kind
    report = speculate(engine, NEW_TOKENS, **how)
    for entry in report["prompts"]:
        for figure in ("ids", "finish_reason", "anchors", "accepted", "streaks", "tau"):
            assert entry["reference"][figure] == entry[figure], figure
        assert (entry["reference"]["parts"], entry["reference"]["ids_from"]) == (None, ids_from)
    assert [entry["finish_reason"] for entry in report["prompts"]] == ["length", "stop", "length"]
    found = report["reference"]
    assert json.loads(json.dumps(found)) == found
    assert found["tau"] == found["tau_live"] == report["tau"] > 1
    assert (found["streaks"], found["steps"]) == (report["streaks"], report["steps"])
    assert (found["prompts"], found["equal"], found["unstable"], found["rejected"]) == (3, 3, 0, [])
    assert (found["ids_from"][ids_from], found["model"]) == (3, "tiny")
    assert found["tokens"] == sum(map(len, engine.texts.values()))


def test_a_prompt_is_sent_as_ids_to_be_continued_greedily(
    speculate: Callable[..., dict[str, Any]], engine: Engine
) -> None:
    speculate(engine)
    (path, _, _), *rest = engine.seen
    assert path == "/v1/models"
    assert [(where, tuple(asked["prompt"])) for where, _, asked in rest] == [
        ("/v1/completions", prompt) for prompt in engine.texts
    ]
    for _, _, asked in rest:
        assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("tiny", 8, 0)
        assert "logprobs" not in asked  # vLLM and SGLang would work for them


# it writes something else


def test_where_the_texts_part_is_told_with_our_logits(speculate: Callable[..., dict[str, Any]], engine: Engine) -> None:
    add, _, queue = engine.texts
    engine.texts[add] = [*engine.texts[add][:3], 77, *engine.texts[add][4:]]
    engine.texts[queue] = engine.texts[queue][:5]
    report = speculate(engine)
    first, same, cut = report["prompts"]
    parts = first["reference"]["parts"]
    assert (parts["position"], parts["server"], parts["ours"]) == (3, 77, first["ids"][3])
    assert parts["top_ids"][0] == first["ids"][3]
    assert parts["gap"] == parts["top_logits"][0] - parts["top_logits"][1] > 0
    assert first["reference"]["ids"] == engine.texts[add][:8] != first["ids"]
    assert same["reference"]["parts"] is None
    parts = cut["reference"]["parts"]
    assert (parts["position"], parts["server"], parts["ours"]) == (5, None, cut["ids"][5])
    assert report["reference"]["equal"] == 1
    assert report["reference"]["tau"] != report["reference"]["tau_live"]


def test_our_text_may_be_the_one_that_ended(target: LiveTarget, texts: dict[tuple[int, ...], list[int]]) -> None:
    prompt = Prompt("f", 0, "lines", list(list(texts)[1]), None)
    drafter, head = random_drafter(target), head_of(target)
    ours, draft = decode(target, prompt.ids, Sampling(8)), Draft(drafter, head, target.device)
    longer = Reference([*ours.ids[:-1], 5, 6, 7], None, False, "server", True)
    parts = score_reference(target, draft, prompt, longer, ours)["parts"]
    assert (parts["position"], parts["server"], parts["ours"]) == (4, 5, 0)
    short = Reference(list(ours.ids), None, False, "server", True)
    ours.ids.pop()
    parts = score_reference(target, draft, prompt, short, ours)["parts"]
    assert parts == {"position": 4, "server": 0, "ours": None, "top_ids": None, "top_logits": None, "gap": None}


def test_an_end_token_kept_back_is_the_likeliest(target: LiveTarget, texts: dict[tuple[int, ...], list[int]]) -> None:
    prompt = Prompt("f", 0, "lines", list(list(texts)[1]), None)
    drafter, head = random_drafter(target), head_of(target)
    draft, ours = Draft(drafter, head, target.device), decode(target, prompt.ids, Sampling(8))
    before, target.eos_ids = target.eos_ids, {0, 1, 1999}
    try:
        for end, wanted in ((None, 0), (1999, 1999)):
            kept_back = Reference(ours.ids[:-1], end, True, "server", True)
            assert score_reference(target, draft, prompt, kept_back, ours)["ids"] == [*ours.ids[:-1], wanted]
    finally:
        target.eos_ids = before


# one prompt is bad


def refuse(prompt: tuple[int, ...], **changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """Return an edit of one prompt's answer: what its choice, its ``usage`` or the ``whole`` is instead."""

    def edit(asked: dict[str, Any], body: dict[str, Any]) -> Any:
        if tuple(asked.get("prompt", ())) != prompt:
            return body
        choice = {**body["choices"][0], **changes.get("choice", {})}
        return changes.get("whole", {**body, "choices": [choice], **changes.get("more", {})})

    return edit


@pytest.mark.parametrize(
    ("reason", "detail", "changes"),
    [
        ("prompt-refused", "HTTP 400: too long", {"whole": (400, b"too long")}),
        ("empty-completion", "''", {"choice": {"text": "", "token_ids": [0]}}),
        ("other-prompt", "8 tokens were sent, the server read 8: [4, 5]", {"choice": {"prompt_token_ids": [4, 5]}}),
        ("other-prompt", "the server read 10", {"more": {"usage": {"prompt_tokens": 10}}}),
        ("other-tokens", "[2048, -1], expected ids below 2048", {"choice": {"token_ids": [5, 2048, -1]}}),
        ("other-tokens", "['a'], expected", {"choice": {"token_ids": ["a", 5]}}),
        ("other-tokens", "5000 tokens, expected at most 4087", {"choice": {"token_ids": [5] * 5000}}),
        ("unfinished", "'abort'", {"choice": {"finish_reason": "abort"}}),
        (
            "too-many-tokens",
            "50 tokens, expected at most 8",
            {"choice": {"token_ids": [5] * 50, "finish_reason": "length"}},
        ),
        ("too-many-tokens", "9 tokens, expected at most 8", {"choice": {"token_ids": [*[5] * 8, 0]}}),
        ("too-many-tokens", "expected at most 8", {"choice": {"token_ids": None, "text": "one two three\n" * 9}}),
        ("no-text", r"half a character in 'a\ud800'", {"choice": {"token_ids": None, "text": "a\ud800"}}),
        ("no-text", r"\udfff", {"choice": {"text": "\udfff"}}),
    ],
)
def test_a_prompt_without_a_reference_is_recorded(
    hybrid: Hybrid, target: LiveTarget, engine: Engine, reason: str, detail: str, changes: dict[str, Any]
) -> None:
    engine.edit = refuse(next(iter(engine.texts)), **changes)
    asked = [
        Prompt("f", i, name, list(ids), None) for i, (name, ids) in enumerate(zip(NAMES, engine.texts, strict=True))
    ]
    with serve(engine) as url:
        found, rejected = fetch_references(Server(url), target, load_tokenizer(hybrid.target), asked, 8)
    assert [reference is not None for reference in found] == [False, True, True]
    assert [(fault["id"], fault["reason"]) for fault in rejected] == [("add", reason)]
    assert detail in rejected[0]["detail"]
    assert rejected[0]["detail"].encode()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("stopped", [True, False])
def test_an_end_token_that_only_the_server_knows_is_the_end(
    hybrid: Hybrid, target: LiveTarget, special: bool, stopped: bool
) -> None:
    """With the target's own likeliest end behind it, the walk would have a token that nobody wrote."""
    tokenizer, text, ids = load_tokenizer(hybrid.target), "        return filepath", [265, 332, 482, 730]
    end = next(token for token in tokenizer.all_special_ids if token) if special else 77
    told = read(Answer(text, [*ids, end], 5, stopped), target, tokenizer, [2, 318, 3])
    if not stopped:
        assert (told.ids, told.end) == ([*ids, end], None)
        return
    assert (told.ids, told.end, told.stopped, told.stable) == (ids, end, True, True)
    kept_back = read(Answer(text, [*ids, end], 6, stopped), target, tokenizer, [2, 318, 3])
    assert (kept_back.ids, kept_back.end) == ([*ids, end], None)
    prompt, drafter = Prompt("f", 0, "a", [2, 318, 3], None), random_drafter(target)
    draft, ours = Draft(drafter, head_of(target), target.device), decode(target, prompt.ids, Sampling(8))
    assert score_reference(target, draft, prompt, told, ours)["ids"] == [*ids, end]


def test_figures_are_over_the_prompts_that_have_a_reference(hstrain: Any, engine: Engine, at: list[object]) -> None:
    engine.edit = refuse(next(iter(engine.texts)), whole=(422, b"no"))
    queue = list(engine.texts)[2]
    engine.texts[queue] = [*engine.texts[queue][:4], 77]
    with serve(engine) as url:
        report = hstrain("speculate", *at, "--reference", url, "--json").json
        answer = hstrain("speculate", *at, "--reference", f"{url}/v1/", "--reference-model", "tiny")
    assert [entry["reference"] is None for entry in report["prompts"]] == [True, False, False]
    steps = [n for entry in report["prompts"][1:] for n in entry["accepted"]]
    assert report["reference"]["tau_live"] == sum(steps) / len(steps)
    assert report["lossless"]["equal"] == 3
    assert answer.status == 0
    lines = {line[2:12].strip(): line[14:] for line in answer.out.splitlines()[1:]}
    assert lines["references"] == f"2 (1 without), 10 tokens of tiny at {url}/v1"
    assert lines["their tau"].endswith(f"{report['reference']['tau_live']:.3f} live on the same prompts")
    assert lines["their ids"].startswith("2 from the server")
    assert lines["their text"] == "1 of 2 equal to the target's own greedy text here"
    assert "add: no reference: prompt-refused: HTTP 422: no" in answer.err
    assert "queue: differs from the reference: {'position': 4, 'server': 77, 'ours':" in answer.err


def read(answer: Answer, target: LiveTarget, tokenizer: Any, prompt: list[int]) -> Reference:
    """Return the reference that becomes of an answer."""
    server: Any = SimpleNamespace(complete=lambda ids, max_tokens: answer)
    (found,), rejected = fetch_references(server, target, tokenizer, [Prompt("f", 0, "a", prompt, None)], 8)
    assert found is not None, rejected
    return found


@pytest.mark.parametrize(
    ("text", "ids", "n_tokens", "stopped", "stable"),
    [
        ("        return filepath", None, None, True, True),
        ("        return filepath", None, 5, True, True),
        ("        return filepath", None, 9, True, False),
        ("        return filepath", None, 5, False, False),
        ("        return filepath", [265, 332, 482, 730, 0], 5, True, True),
        ("        return filepath", [265, 332, 482], None, True, False),
        ("        return filepath<|endoftext|>", [265, 332, 482, 730, 0], 5, True, True),
        ("        return filepat", [265, 332, 482, 730, 0], 5, True, False),
        ("        return \ufffd", None, None, False, False),
    ],
)
def test_tokens_that_are_not_those_of_the_text_are_told(
    hybrid: Hybrid,
    target: LiveTarget,
    text: str,
    ids: list[int] | None,
    n_tokens: int | None,
    stopped: bool,
    stable: bool,
) -> None:
    found = read(Answer(text, ids, n_tokens, stopped), target, load_tokenizer(hybrid.target), [2, 318, 3])
    assert found.stable == stable
    if "filepath" in text and ids is None:
        assert found.ids == [265, 332, 482, 730]


def test_a_text_that_joins_the_prompts_last_token_keeps_its_own_tokens(hybrid: Hybrid, target: LiveTarget) -> None:
    tokenizer = load_tokenizer(hybrid.target)
    prompt, ids = (tokenizer(text)["input_ids"] for text in ("a\n", "\n\nb"))
    assert tokenizer("a\n\n\nb")["input_ids"][: len(prompt)] != prompt

    found = read(Answer("\n\nb", None, len(ids), False), target, tokenizer, prompt)
    assert found == Reference(ids, None, False, "text", False)


# the whole server is bad


def says(status: int, body: bytes) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    return lambda asked, given: (status, body) if asked else given


@pytest.mark.parametrize(
    ("code", "detail", "edit"),
    [
        ("server-refused", "HTTP 500: out of memory", says(500, b"out of memory")),
        ("server-refused", "HTTP 401", says(401, b"no key")),
        ("server-answer", "<html>", says(200, b"<html>")),
        ("server-answer", "[1]", says(200, b"[1]")),
        ("server-answer", "", says(200, b"\xff")),
        ("server-answer", "choices", says(200, b'{"choices": []}')),
        ("server-answer", "choices", says(200, b'{"choices": [{"message": 1}]}')),
        ("server-answer", "usage", says(200, b'{"choices": [{"text": "a"}], "usage": 3}')),
        (
            "server-answer",
            "none of 3 prompts has a completion; add: prompt-refused: HTTP 400: text",
            says(400, b"text"),
        ),
        ("server-answer", "v1/models", lambda asked, given: {"data": "x"}),
        ("server-answer", "v1/models", lambda asked, given: {"data": [{"id": "\ud800"}]}),
        ("server-refused", "v1/models: HTTP 404", lambda asked, given: (404, b"")),
    ],
)
def test_a_server_that_fails_is_one_clear_error(
    hstrain: Any, engine: Engine, at: list[object], code: str, detail: str, edit: Any
) -> None:
    engine.edit = edit
    with serve(engine) as url:
        answer = hstrain("speculate", *at, "--reference", url)
    assert (answer.status, answer.code, answer.out) == (3, code, "")
    assert detail in answer.err
    assert "hint: " in answer.err


def test_nothing_there_is_told_before_the_target_is_loaded(hstrain: Any, at: list[object]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        answer = hstrain("speculate", *at, "--target", "/no-such-target", "--reference", url)
    assert (answer.status, answer.code) == (3, "server-unreachable")
    assert f"{url}/v1/models" in answer.err


def test_a_connection_that_breaks_is_unreachable() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def hang_up() -> None:
            taken, _ = listening.accept()
            taken.recv(1)
            taken.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(HscacheError) as failed:
            Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    assert failed.value.code == "server-unreachable"


def test_an_answer_that_does_not_come_is_given_up(engine: Engine) -> None:
    done = threading.Event()
    engine.edit = lambda asked, given: given if not asked else (done.wait(60), given)[1]
    with serve(engine) as url:
        server = Server(url, timeout_s=0.2)
        try:
            with pytest.raises(HscacheError) as failed:
                server.complete(next(iter(engine.texts)), 8)
        finally:
            done.set()
    assert (failed.value.code, failed.value.exit_code) == ("server-timeout", 3)


def test_a_key_goes_along_but_not_to_where_a_redirect_points(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    elsewhere = Engine({}, set(), str)
    with serve(elsewhere) as other, serve(engine) as url:
        server = Server(url)
        for status in (302, 307):
            engine.edit = says(status, f"{other}/v1/completions".encode())
            with pytest.raises(HscacheError) as failed:
                server.complete(next(iter(engine.texts)), 8)
            assert (failed.value.code, f"HTTP {status}" in failed.value.message) == ("server-refused", True)
            assert "secret" not in failed.value.message
    assert [headers["Authorization"] for _, headers, _ in engine.seen] == ["Bearer secret"] * 3
    assert elsewhere.seen == []


@pytest.mark.parametrize("key", ["sec\nret", "sec ret", "s\u00e9cret", "sec\u20acret", "sec\x00ret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(os, "environ", {"OPENAI_API_KEY": key})
    with serve(engine) as url, pytest.raises(HscacheError) as refused:
        Server(url)
    assert (refused.value.code, refused.value.exit_code) == ("server-key", 2)
    assert "ret" not in refused.value.message
    assert engine.seen == []


@pytest.mark.parametrize("models", [(), ("one", "two")])
def test_of_several_models_one_is_named(engine: Engine, models: tuple[str, ...]) -> None:
    engine.models = models
    with serve(engine) as url:
        with pytest.raises(HscacheError) as refused:
            Server(url)
        assert (refused.value.code, refused.value.exit_code) == ("server-model", 2)
        assert Server(url, "two").model == "two"


@pytest.mark.parametrize("url", ["localhost:8000", "file:///etc/hostname", "http://", "http://a b", "", "http://x/\n"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(HscacheError) as refused:
        Server(url)
    assert refused.value.code == "server-url"


@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:port"])
def test_an_address_of_a_wrong_form_is_an_error_too(url: str) -> None:
    with pytest.raises(HscacheError) as refused:
        Server(url)
    assert refused.value.code == "server-unreachable"


def test_sampled_text_has_no_reference(hstrain: Any, engine: Engine, at: list[object]) -> None:
    with serve(engine) as url:
        answer = hstrain("speculate", *at, "--reference", url, "--temperature", 0.5)
    assert (answer.status, answer.code) == (2, "reference-sampled")
    answer = hstrain("speculate", *at, "--reference-model", "tiny")
    assert answer.status == 2
    assert "--reference-model needs --reference" in answer.err
