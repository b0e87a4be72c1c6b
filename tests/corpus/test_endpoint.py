"""generate --endpoint: each prompt is answered once or rejected with a reason, whatever the server does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hscache.cli import main
from hscache.console import Interrupted
from hscache.corpus import endpoint
from hscache.corpus.endpoint import REASONS, Answer, AnswerCheck, PromptFault, Server
from hscache.corpus.generate import Sampling, generate_corpus
from hscache.corpus.tokenize import load_tokenizer
from hscache.corpus.writer import CorpusReport, journal_path, rejects_path
from hscache.errors import ConflictError, EnvironmentFault, HscacheError, InputError
from tests.conftest import TINY_HYBRID
from tests.made.commands import Answer as Done
from tests.made.commands import runner
from tests.made.endpoint import KINDS, Stub, serve

GREEDY = Sampling(24)
KEY = "sk-0123456789-secret"


@pytest.fixture
def hscache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    return runner("hscache", main, capsys, monkeypatch)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, no_disk: None) -> None:
    monkeypatch.setattr(endpoint, "_BACKOFF_S", 0.002)
    monkeypatch.setattr(endpoint, "_GRACE_S", 1.0)
    for name in ("HSCACHE_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_HYBRID)


@pytest.fixture
def stub(tokenizer: Any) -> Stub:
    return Stub(tokenizer)


def write_prompts(folder: Path, n: int) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{i}", "prompt": f"x{i} = {i}\n"}) + "\n" for i in range(n)))
    return path


def ids_of(tokenizer: Any, i: int) -> tuple[int, ...]:
    return tuple(tokenizer(f"x{i} = {i}\n")["input_ids"])


def run(url: str, prompts: Path, out: Path, sampling: Sampling = GREEDY, **options: Any) -> CorpusReport:
    server = Server(url, options.pop("model", None), timeout_s=options.pop("timeout_s", 30.0))
    return generate_corpus([prompts], TINY_HYBRID, out, sampling, raw=True, server=server, **options)


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out).to_pylist()
    return rows


def rejects_of(out: Path) -> dict[int, tuple[str, str]]:
    lines = map(json.loads, rejects_path(out).read_text().splitlines())
    return {line["row"]: (line["reason"], line["detail"]) for line in lines}


def expected(stub: Stub, i: int, most: int = GREEDY.max_new_tokens) -> dict[str, Any]:
    """Return the row of a prompt."""
    prompt = list(ids_of(stub.tokenizer, i))
    ids = stub.write(prompt, most)
    return {
        "sample_id": f"p{i}",
        "input_ids": prompt + ids,
        "loss_mask": [0] * len(prompt) + [1] * len(ids),
        "tag": None,
        "source": "prompts.jsonl",
        "finish_reason": "stop" if ids[-1] == stub.tokenizer.eos_token_id else "length",
    }


# every prompt is answered once or rejected

ONCE = ["hang", "429", "429 0.01", "500", "503 Wed, 21 Oct 2015 07:28:00 GMT", "reset", "cut", "html", "other json"]
ALWAYS = {
    "count": "other-count",
    "other ids": "other-text",
    "large ids": "ids-out-of-vocab",
    "no numbers": "ids-out-of-vocab",
    "too many": "too-many-tokens",
    "unfinished": "unfinished",
    "400": "prompt-refused",
    "413": "prompt-refused",
    "empty": "empty-completion",
}
WITHOUT_IDS = {"count": "unstable-text", "unstable": "unstable-text", "unfinished": "unfinished"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_prompt_is_in_the_corpus_once_or_rejected(
    stub: Stub, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    always = WITHOUT_IDS if kind == "OpenAI-compatible" else ALWAYS
    n, faults = 200, [*ONCE, *always]
    planned = {i: faults[i // 10 % len(faults)] for i in range(3, n, 10)}
    by_ids = {ids_of(stub.tokenizer, i): fault for i, fault in planned.items()}
    stub.kind = kind
    stub.fault = lambda prompt, before: by_ids.get(prompt) if before == 0 or by_ids.get(prompt) in always else None
    stub.delay_s = 0.005
    out = tmp_path / "c.parquet"
    with serve(stub) as url:
        report = run(url, write_prompts(tmp_path, n), out, timeout_s=1.0)
    wrong = {i: always[fault] for i, fault in planned.items() if fault in always}
    assert rows_of(out) == [expected(stub, i) for i in range(n) if i not in wrong]
    assert {i: reason for i, (reason, _) in rejects_of(out).items()} == wrong
    assert (report.rows, report.samples, sum(report.rejected.values())) == (n, n - len(wrong), len(wrong))
    assert {row["finish_reason"] for row in rows_of(out)} == {"stop", "length"}
    assert 1 < stub.at_once <= 8
    assert not journal_path(out).exists()
    said = capsys.readouterr().err
    assert ("tokenized from the server's text" in said) == (kind == "OpenAI-compatible")
    retried = [i for i, fault in planned.items() if fault not in always]
    assert all(stub.asked[ids_of(stub.tokenizer, i)] > 1 for i in retried)


@pytest.mark.parametrize("fault", [*ONCE, *ALWAYS, "no end"])
def test_a_fault_that_lasts_has_its_reason(stub: Stub, tmp_path: Path, fault: str) -> None:
    bad = ids_of(stub.tokenizer, 1)
    stub.fault = lambda prompt, before: fault if prompt == bad else None
    out = tmp_path / "c.parquet"
    with serve(stub) as url:
        report = run(url, write_prompts(tmp_path, 3), out, timeout_s=0.2 if fault == "hang" else 30.0)
    if fault == "no end":
        assert rows_of(out) == [expected(stub, i) for i in range(3)]
        assert report.notes == {"end_added": 1}
        return
    ((row, (reason, detail)),) = rejects_of(out).items()
    assert (row, reason) == (1, ALWAYS.get(fault, "no-answer"))
    assert detail.startswith("p1: ")
    assert stub.asked[bad] == (endpoint._TRIES if fault in ONCE else 1)
    assert rows_of(out) == [expected(stub, i) for i in (0, 2)]


def test_every_reason_of_a_check_is_explained(tokenizer: Any) -> None:
    check = AnswerCheck(tokenizer, {0}, 2048, 8)
    ids = tokenizer("x = 3")["input_ids"]
    special = next(token for token in tokenizer.all_special_ids if token != 0)
    seen = set()
    for answer in (
        Answer("x = 3", ids, len(ids) + 2, "stop"),
        Answer("x = 4", ids, len(ids), "length"),
        Answer("x = 3", [*ids, special], len(ids) + 1, "stop"),
        Answer("x = 3", ids, len(ids), "tool"),
        Answer("x = 3", [*ids[:-1], 2048], len(ids), "length"),
        Answer("x = 3" * 9, None, 9 * len(ids), "length"),
        Answer("x = 3", None, None, "length"),
    ):
        with pytest.raises(PromptFault) as fault:
            check(answer)
        seen.add(fault.value.reason)
    assert seen == REASONS.keys() - {"no-answer", "prompt-refused"}


def test_what_engines_give_differently_is_the_same(tokenizer: Any) -> None:
    """The end token among the ids or not and counted or not, special tokens in the text or not, half a character."""
    check = AnswerCheck(tokenizer, {0}, 2048, 64)
    ids = tokenizer("x = 3")["input_ids"]
    special = next(token for token in tokenizer.all_special_ids if token != 0)
    for given, counted in (([*ids, 0], len(ids) + 1), ([*ids, 0], None), (ids, len(ids)), (ids, len(ids) + 1)):
        assert check(Answer("x = 3", given, counted, "stop"))[0] == [*ids, 0]
    assert check(Answer("x = 3", [*ids, 0, *ids], 2 * len(ids) + 1, "length")) == ([*ids, 0], [])
    for text in ("x = 3", "x = 3" + tokenizer.decode([special])):
        assert check(Answer(text, [*ids, special], None, "length"))[0] == [*ids, special]
    half = tokenizer("é漢")["input_ids"][:-1]
    assert tokenizer.decode(half).endswith("\ufffd")
    for text in (tokenizer.decode(half), tokenizer.decode(half).rstrip("\ufffd")):
        assert check(Answer(text, half, len(half), "length"))[0] == half
    assert check(Answer("x = 3", None, len(ids) + 1, "stop")) == ([*ids, 0], ["from_text", "end_added"])


# what is asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(24, temperature=0.7, top_p=0.9, seed=5)])
def test_a_request_says_how_tokens_are_chosen(stub: Stub, tmp_path: Path, kind: str, sampling: Sampling) -> None:
    stub.kind = kind
    with serve(stub) as url:
        run(f"{url}/v1/", write_prompts(tmp_path, 3), tmp_path / "c.parquet", sampling, concurrency=1)
    bodies = [body.get("sampling_params", body) for body in stub.bodies]
    assert {body["temperature"] for body in bodies} == {sampling.temperature}
    seeds = {body.get("seed", body.get("sampling_seed")) for body in bodies}
    assert len(seeds) == (1 if kind == "SGLang" and sampling == GREEDY else 3)
    if kind == "llama.cpp":
        assert {tuple(body["samplers"]) for body in bodies} == {
            ("top_k",) if sampling == GREEDY else ("temperature", "top_p")
        }
        assert {body["top_k"] for body in bodies} == {1 if sampling == GREEDY else 0}
    else:
        assert [(body["top_p"], body["top_k"], body["stop_token_ids"]) for body in bodies] == [
            (sampling.top_p, -1, [0])
        ] * 3


class Clock:
    """Stands for the event on which pauses wait; never set."""

    def __init__(self) -> None:
        self.pauses: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return False


@pytest.mark.parametrize("after", ["", "7", "Wed, 21 Oct 2099 07:28:00 GMT", "soon"])
def test_pauses_grow_and_are_as_long_as_the_server_asks(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    monkeypatch.setattr(endpoint.random, "uniform", lambda low, high: 1.0)
    stub.fault = lambda prompt, before: f"429 {after}"
    with serve(stub) as url:
        server, clock = Server(url), Clock()
        monkeypatch.setattr(server, "_halted", clock)
        with pytest.raises(PromptFault) as fault:
            server.complete([1, 2], GREEDY, 0, [0])
    assert (fault.value.reason, "HTTP 429" in fault.value.detail) == ("no-answer", True)
    growing = [endpoint._BACKOFF_S * 2**i for i in range(5)]
    expected = {"7": [7.0] * 5, "Wed, 21 Oct 2099 07:28:00 GMT": [endpoint._LONGEST_PAUSE_S] * 5}
    assert clock.pauses == expected.get(after, growing)


# stopped and resumed


def begin(url: str, prompts: Path, out: Path, *more: object) -> subprocess.Popen[bytes]:
    words = ["generate", prompts, "--target", TINY_HYBRID, "-o", out, "--raw", "--endpoint", url, *more]
    words += ["--max-new-tokens", GREEDY.max_new_tokens]
    command = [sys.executable, "-c", "from hscache.cli import main; main()", *map(str, words)]
    return subprocess.Popen(command, cwd=TINY_HYBRID.parents[1], stderr=subprocess.PIPE)


def done(out: Path) -> set[int]:
    """Return the prompts of a journal whose lines are complete."""
    path = journal_path(out)
    lines = path.read_bytes().split(b"\n")[1:-1] if path.exists() else []
    return {json.loads(line)[0] for line in lines}


def wait_for(process: subprocess.Popen[bytes], out: Path, n: int) -> None:
    limit = time.monotonic() + 120
    while len(done(out)) < n:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.002)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_a_stopped_run_resumes_without_asking_again(
    stub: Stub, tmp_path: Path, how: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    n, prompts, out = 60, write_prompts(tmp_path, 60), tmp_path / "out" / "c.parquet"
    stub.delay_s = 0.2
    with serve(stub) as url:
        with begin(url, prompts, out) as process:
            wait_for(process, out, 9)
            process.send_signal(how)
            assert process.stderr
            said = process.stderr.read().decode()
        assert process.returncode == (-9 if how == signal.SIGKILL else 128 + how), said
        assert ("To resume:\n" in said) == (how != signal.SIGKILL)
        kept = done(out)
        assert 9 <= len(kept) < n
        if how != signal.SIGKILL:  # the running requests finished
            assert len(kept) == len(stub.asked)
        stub.delay_s = 0.0
        with serve(stub) as other:  # the address is not one of the settings
            run(other, prompts, out)
    assert rows_of(out) == [expected(stub, i) for i in range(n)]
    assert {stub.asked[ids_of(stub.tokenizer, i)] for i in kept} == {1}
    assert f"{len(kept)} of them were completed in an earlier run" in capsys.readouterr().err


def test_a_signal_does_not_wait_for_requests_that_hang(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_GRACE_S", 0.1)

    def hang(prompt: tuple[int, ...], before: int) -> str:
        if len(stub.asked) == 3:
            signal.raise_signal(signal.SIGINT)
        return "hang"

    stub.fault = hang
    with serve(stub) as url:
        with pytest.raises(Interrupted):
            run(url, write_prompts(tmp_path, 3), tmp_path / "c.parquet")
        assert stub.running == 3  # the server has not given them up


def test_other_settings_of_the_server_are_refused(stub: Stub, tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path, 2), tmp_path / "c.parquet"
    with serve(stub) as url:
        stub.fault = lambda prompt, before: "403"
        with pytest.raises(EnvironmentFault):
            run(url, prompts, out)
        header = journal_path(out).read_text()
        assert url not in header
        stub.models = ("other",)
        with pytest.raises(ConflictError, match="model: tiny there, other here"):
            run(url, prompts, out)
        stub.models, stub.kind = ("tiny",), "llama.cpp"
        with pytest.raises(ConflictError, match=r"server: vLLM there, llama\.cpp here"):
            run(url, prompts, out)


# a server that is not well, or not the right one


@pytest.mark.parametrize(
    ("fault", "code"),
    [("500", "server-refused"), ("400", "server-refused"), ("reset", "server-unreachable"), ("html", "server-answer")],
)
def test_many_failures_in_a_row_stop_the_run_and_keep_what_is_finished(
    stub: Stub, tmp_path: Path, fault: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_TRIES", 2)
    prompts, out = write_prompts(tmp_path, 60), tmp_path / "c.parquet"
    good = {ids_of(stub.tokenizer, i) for i in range(10)}
    stub.fault = lambda prompt, before: None if prompt in good else fault
    with serve(stub) as url:
        with pytest.raises(EnvironmentFault) as caught:
            run(url, prompts, out)
        assert (caught.value.code, "again" in str(caught.value.hint)) == (code, True)
        assert len(stub.asked) < 60
        assert done(out) == set(range(10))
        stub.fault = lambda prompt, before: None
        run(url, prompts, out)
    assert rows_of(out) == [expected(stub, i) for i in range(60)]


@pytest.mark.parametrize("fault", ["401", "403", "404", "307"])
def test_a_refusal_of_all_prompts_stops_at_once(stub: Stub, tmp_path: Path, fault: str) -> None:
    stub.fault = lambda prompt, before: fault
    with serve(stub) as url, pytest.raises(EnvironmentFault) as caught:
        run(url, write_prompts(tmp_path, 60), tmp_path / "c.parquet", concurrency=2)
    assert (caught.value.code, f"HTTP {fault}" in caught.value.message) == ("server-refused", True)
    assert ("HSCACHE_API_KEY" in str(caught.value.hint)) == (fault in ("401", "403"))
    assert len(stub.bodies) <= 3


@pytest.mark.parametrize("fault", ["other ids", "large ids"])
def test_a_server_of_another_target_stops_the_run(stub: Stub, tmp_path: Path, fault: str) -> None:
    stub.fault = lambda prompt, before: fault
    with serve(stub) as url, pytest.raises(EnvironmentFault) as caught:
        run(url, write_prompts(tmp_path, 60), tmp_path / "c.parquet")
    assert caught.value.code == "server-other-target"
    assert len(stub.asked) < 60


def test_a_short_context_rejects_what_does_not_fit(stub: Stub, tmp_path: Path) -> None:
    stub.context = GREEDY.max_new_tokens + len(ids_of(stub.tokenizer, 1))
    prompts, out = write_prompts(tmp_path, 2), tmp_path / "c.parquet"
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "x = 3\n" * 50}) + "\n")
    with serve(stub) as url:
        run(url, prompts, out)
    assert {row: reason for row, (reason, _) in rejects_of(out).items()} == {2: "too-long"}


@pytest.mark.parametrize(("models", "model"), [((), None), (("a", "b"), None), (("a", "b"), "c")])
def test_the_model_is_one_of_the_servers(stub: Stub, models: tuple[str, ...], model: str | None) -> None:
    stub.models = models
    with serve(stub) as url:
        with pytest.raises(HscacheError) as caught:
            Server(url, model)
        assert (caught.value.code, caught.value.exit_code) == ("server-model", 2)
        assert all(name in caught.value.message for name in models)
        if models:
            assert Server(url, "b").describe() == f"{url}: vLLM, model 'b', context of 4,096 tokens"


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "file:///etc/hostname", "http://", "http://a b", "", "http://[", "http://x:port", "http://x?y"],
)
def test_a_url_that_is_not_valid_is_refused(url: str) -> None:
    with pytest.raises(HscacheError) as caught:
        Server(url)
    assert (caught.value.code, caught.value.exit_code) == ("server-url", 2)


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path, hscache: Callable[..., Done]) -> None:
    with serve(Stub(None)) as url:
        pass
    out = tmp_path / "out" / "c.parquet"
    answer = hscache("generate", write_prompts(tmp_path, 1), "--target", TINY_HYBRID, "-o", out, "--endpoint", url)
    assert (answer.status, answer.code, out.parent.exists()) == (3, "server-unreachable", False)


# the key


@pytest.mark.parametrize("accepted", [True, False])
def test_the_key_is_sent_and_shown_nowhere(
    stub: Stub, tmp_path: Path, hscache: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another")
    monkeypatch.setenv("HSCACHE_API_KEY", KEY)
    bad = ids_of(stub.tokenizer, 1)
    # a server that repeats the key in its errors
    monkeypatch.setattr(endpoint, "_TRIES", 2)
    stub.key, stub.fault = KEY if accepted else "no", lambda prompt, before: "500" if prompt == bad else None
    out = tmp_path / "out" / "c.parquet"
    with serve(stub) as url:
        address = url.replace("//", "//user:passw0rd@")
        answer = hscache(
            "generate", write_prompts(tmp_path, 3), "--target", TINY_HYBRID, "-o", out, "--raw", "--endpoint", address
        )
    assert answer.status == (1 if accepted else 3)
    assert {headers["Authorization"] for headers in stub.headers} == {f"Bearer {KEY}"}
    written = [answer.out, answer.err, *(path.read_bytes().decode("latin-1") for path in out.parent.glob("*"))]
    assert not any(word in text for word in (KEY, "passw0rd", "sk-another") for text in written)
    assert accepted or "***" in answer.err


def test_the_command_that_resumes_has_no_password(stub: Stub, tmp_path: Path) -> None:
    out = tmp_path / "c.parquet"
    stub.delay_s = 0.2
    with serve(stub) as url, begin(url.replace("//", "//user:passw0rd@"), write_prompts(tmp_path, 60), out) as process:
        wait_for(process, out, 1)
        process.send_signal(signal.SIGINT)
        assert process.stderr
        said = process.stderr.read().decode()
    assert f"--endpoint {url}" in said
    assert "passw0rd" not in said + journal_path(out).read_text()
    assert all(headers["Authorization"].startswith("Basic ") for headers in stub.headers)


@pytest.mark.parametrize("key", ["sec\nret", "sec ret", "s\u00e9cret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSCACHE_API_KEY", key)
    with pytest.raises(HscacheError) as caught:
        Server("http://127.0.0.1:9")
    assert (caught.value.code, "ret" in caught.value.message) == ("server-key", False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "tiny"], "--model needs --endpoint"),
        (["--endpoint", "http://x", "--batch-size", 4], "--batch-size and --endpoint"),
        (["--endpoint", "http://x", "--dtype", "float32"], "--dtype and --endpoint"),
        (["--endpoint", "http://x", "--device", "cpu"], "--device and --endpoint"),
    ],
)
def test_an_option_without_effect_is_refused(hscache: Callable[..., Done], words: list[object], said: str) -> None:
    answer = hscache("generate", "p.jsonl", "--target", TINY_HYBRID, "-o", "c.parquet", *words)
    assert (answer.status, said in " ".join(answer.err.split())) == (2, True)


def test_nothing_but_rejects_leaves_no_journal(stub: Stub, tmp_path: Path) -> None:
    stub.fault = lambda prompt, before: "unfinished"
    out = tmp_path / "c.parquet"
    with serve(stub) as url, pytest.raises(InputError, match="2 unfinished"):
        run(url, write_prompts(tmp_path, 2), out)
    assert not journal_path(out).exists()
