"""Every supervised run is what a server would have generated: by hand for each format and template, and by chance."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from hscache.corpus.readers import read_corpus
from hscache.corpus.tokenize import TokenizeOptions, load_tokenizer, tokenize_files
from hscache.rows import Sample
from tests.made.templates import QWEN, TEMPLATES, make_tokenizer

USER = {"role": "user", "content": "hi"}
OK = {"role": "assistant", "content": "ok"}
TURNS = [USER, OK, {"role": "user", "content": "more"}, {"role": "assistant", "content": "no"}]
FORMATS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, OK]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, "i"]}, OK]},
    "prompt and text": {"prompt": [USER], "completion": "ok"},
    "prompt and messages": {"prompt": [USER], "completion": [OK]},
    "sharegpt from": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]},
    "sharegpt role": {"conversations": [USER, OK]},
    "alpaca": {"instruction": "hi", "input": "", "output": "ok"},
    "openai batch": {"body": {"messages": [USER]}, "response": {"body": {"choices": [{"message": OK}]}}},
}
ONE_TURN = {
    "chatml": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n",
    "marked": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n",
    "qwen": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n⟦\n</think>\n\nok<|im_end|>⟧\n",
    "llama": "<|begin|><|header|>user<|/header|>\n\nhi<|eot|><|header|>assistant<|/header|>\n\n⟦ok<|eot|>⟧",
    "bos": "<s>[hi]⟦ok<|im_end|>⟧",
}
"""Template -> the row's text, its supervised run in brackets."""
TWO_TURNS = {
    "chatml": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n"
    "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    "marked": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok<|im_end|>⟧\n"
    "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n",
    "llama": "<|begin|><|header|>user<|/header|>\n\nhi<|eot|><|header|>assistant<|/header|>\n\n⟦ok<|eot|>⟧"
    "<|header|>user<|/header|>\n\nmore<|eot|><|header|>assistant<|/header|>\n\n⟦no<|eot|>⟧",
    "bos": "<s>[hi]⟦ok<|im_end|>⟧[more]⟦no<|im_end|>⟧",
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tokenizer(tmp_path_factory.mktemp(name), name) for name in TEMPLATES}


def samples_of(folder: Path, target: Path, rows: list[dict[str, Any]], **options: Any) -> list[Sample]:
    source, out = folder / "rows.jsonl", folder / "corpus.parquet"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out.unlink(missing_ok=True)
    tokenize_files([source], target, out, TokenizeOptions(**options))
    samples = list(read_corpus(out))
    assert all(isinstance(sample, Sample) for sample in samples)
    return samples  # type: ignore[return-value]


def drawn(target: Path, sample: Sample) -> str:
    """Return a sample's text with its supervised runs in brackets."""
    tokenizer = load_tokenizer(target)
    text, before = "", 0
    for token, marked in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        text += {(0, 1): "⟦", (1, 0): "⟧"}.get((before, marked), "") + tokenizer.convert_ids_to_tokens(token)
        before = marked
    return text + "⟧" * before


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("spelling", FORMATS)
def test_a_row_means_the_same_in_every_format(
    tmp_path: Path, tokenizers: dict[str, Path], spelling: str, template: str
) -> None:
    (sample,) = samples_of(tmp_path, tokenizers[template], [{"id": "x", **FORMATS[spelling]}])
    assert sample.sample_id == "x"
    assert drawn(tokenizers[template], sample) == ONE_TURN[template]


@pytest.mark.parametrize("template", TWO_TURNS)
def test_every_turn_of_a_conversation_is_supervised(tmp_path: Path, tokenizers: dict[str, Path], template: str) -> None:
    (sample,) = samples_of(tmp_path, tokenizers[template], [{"messages": TURNS}])
    assert drawn(tokenizers[template], sample) == TWO_TURNS[template]
    (sample,) = samples_of(tmp_path, tokenizers[template], [{"prompt": TURNS[:2], "completion": TURNS[2:]}])
    assert drawn(tokenizers[template], sample) == TWO_TURNS[template].replace("⟦", "", 1).replace("⟧", "", 1)
    (sample,) = samples_of(tmp_path, tokenizers[template], [{"messages": TURNS}], turns="last")
    assert drawn(tokenizers[template], sample) == TWO_TURNS[template].replace("⟦", "", 1).replace("⟧", "", 1)


THOUGHTFUL = [
    USER,
    {"role": "assistant", "reasoning_content": "hm", "content": "ok"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "ah"}, {"type": "text", "text": "no"}]},
]


def test_thoughts_that_the_template_leaves_out_make_a_sample_of_each_turn(
    tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    first, second = samples_of(tmp_path, tokenizers["qwen"], [{"id": "x", "messages": THOUGHTFUL}])
    assert (first.sample_id, second.sample_id) == ("x#0", "x#1")
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert drawn(tokenizers["qwen"], first) == f"{start}<think>\n⟦hm\n</think>\n\nok<|im_end|>⟧\n"
    assert drawn(tokenizers["qwen"], second) == (
        f"{start}ok<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "⟦ah\n</think>\n\nno<|im_end|>⟧\n"
    )


@pytest.mark.parametrize("where", ["row", "text in the row", "command"])
def test_the_templates_arguments_come_from_the_row_or_the_command(
    tmp_path: Path, tokenizers: dict[str, Path], where: str
) -> None:
    off = {"enable_thinking": False}
    given = {"row": off, "text in the row": json.dumps(off), "command": None}[where]
    row = {"messages": [USER, OK], "chat_template_kwargs": given}
    kwargs = off if where == "command" else {"enable_thinking": True}  # the row's win
    (sample,) = samples_of(tmp_path, tokenizers["qwen"], [row], template_kwargs=kwargs)
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert drawn(tokenizers["qwen"], sample) == f"{start}<think>\n\n</think>\n\n⟦ok<|im_end|>⟧\n"


CALL = {"name": "area", "arguments": {"r": 2}}
TOOLS = [{"type": "function", "function": {"name": "area"}}]
CALLS: dict[str, Any] = {
    "objects": [{"id": "a", "type": "function", "function": CALL}],
    "arguments as text": [{"id": "a", "type": "function", "function": {**CALL, "arguments": '{"r": 2}'}}],
    "calls as text": json.dumps([{"id": "a", "type": "function", "function": CALL}]),
    "without type": [CALL],
}


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
@pytest.mark.parametrize("spelling", CALLS)
def test_tools_and_their_calls_reach_the_template(
    tmp_path: Path, tokenizers: dict[str, Path], spelling: str, tools: object
) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": CALLS[spelling]}
    messages = [USER, called, {"role": "tool", "tool_call_id": "a", "content": "12"}, OK]
    row = {"messages": messages, "tools": tools, "chat_template_kwargs": {"enable_thinking": True}}
    (sample,) = samples_of(tmp_path, tokenizers["qwen"], [row])
    assert drawn(tokenizers["qwen"], sample) == (
        "<|im_start|>system\narea;<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "⟦\n</think>\n\n<tool_call>area r=2</tool_call><|im_end|>⟧\n"
        "<|im_start|>user\n12<|im_end|>\n<|im_start|>assistant\n<think>\n⟦\n</think>\n\nok<|im_end|>⟧\n"
    )


def test_what_the_template_does_not_use_is_reported(
    tmp_path: Path, tokenizers: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"messages": [USER, {**OK, "reasoning": "hm"}], "tools": TOOLS, "chat_template_kwargs": {"verbosity": 1}}
    ] * 2
    samples_of(tmp_path, tokenizers["chatml"], [{**row, "id": i} for i, row in enumerate(rows)])
    err = capsys.readouterr().err
    for name in ("tools", "reasoning_content", "verbosity"):
        assert f"the chat template does not use {name}: it is not in the ids (rows that have it: 2)" in err


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, OK], "finish_reason": "length"},
        {"prompt": [USER], "completion": "ok", "finish_reason": "max_tokens"},
        {
            "body": {"messages": [USER]},
            "response": {"body": {"choices": [{"message": OK, "finish_reason": "length"}]}},
        },
    ],
    ids=["messages", "prompt", "batch"],
)
def test_a_cut_answer_has_no_end_token(tmp_path: Path, tokenizers: dict[str, Path], row: dict[str, Any]) -> None:
    (sample,) = samples_of(tmp_path, tokenizers["chatml"], [row])
    assert drawn(tokenizers["chatml"], sample) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦ok⟧"
    assert sample.finish_reason in ("length", "max_tokens")


def test_only_the_last_answer_is_cut(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    row = {"messages": TURNS, "finish_reason": "length"}
    first, last = samples_of(tmp_path, tokenizers["chatml"], [row], turns="each")
    assert drawn(tokenizers["chatml"], first).endswith("⟦ok<|im_end|>⟧\n")
    assert drawn(tokenizers["chatml"], last).endswith("⟦no⟧")
    assert (first.finish_reason, last.finish_reason) == (None, "length")
    silent = {"messages": [*TURNS[:3], {**TURNS[3], "weight": 0}], "finish_reason": "length"}
    (sample,) = samples_of(tmp_path, tokenizers["chatml"], [silent])
    text = TWO_TURNS["chatml"]
    assert drawn(tokenizers["chatml"], sample) == text[:-20] + text[-20:].replace("⟦", "").replace("⟧", "")


def test_a_row_cannot_bring_another_template(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    row = {"messages": [USER, OK], "chat_template_kwargs": {"chat_template": "{{ 'x' }}"}}
    (sample,) = samples_of(tmp_path, tokenizers["chatml"], [row])
    assert drawn(tokenizers["chatml"], sample) == ONE_TURN["chatml"]


def test_cut_texts_get_no_end_token_and_keep_their_reason(
    tmp_path: Path, tokenizers: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "x", "completion": "y", "finish_reason": reason} for reason in ("length", "stop")]
    cut, ended = samples_of(tmp_path, tokenizers["chatml"], rows)
    assert [drawn(tokenizers["chatml"], one) for one in (cut, ended)] == ["x⟦y⟧", "x⟦y<|im_end|>⟧"]
    assert (cut.finish_reason, ended.finish_reason) == ("length", "stop")
    assert "\ncut off, so without an end token: 1 answer\n" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["x", "<s>x"])
def test_a_text_has_one_bos(tmp_path: Path, tokenizers: dict[str, Path], prompt: str) -> None:
    (sample,) = samples_of(tmp_path, tokenizers["bos"], [{"prompt": prompt, "completion": "y"}])
    assert drawn(tokenizers["bos"], sample) == "<s>x⟦y<|im_end|>⟧"


def test_a_run_ends_where_generation_stops(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    """An answer that holds an end token was not written in one go."""
    row = {"messages": [USER, {"role": "assistant", "content": "o<|im_end|>k"}]}
    (sample,) = samples_of(tmp_path, tokenizers["chatml"], [row])
    assert drawn(tokenizers["chatml"], sample).endswith("assistant\n⟦o<|im_end|>⟧k<|im_end|>\n")


def test_messages_of_weight_0_and_answers_to_nothing_are_not_supervised(
    tmp_path: Path, tokenizers: dict[str, Path]
) -> None:
    silent = [USER, {**OK, "weight": 0}, *TURNS[2:]]
    greeting = [OK, *TURNS[2:]]
    one, other = samples_of(tmp_path, tokenizers["chatml"], [{"messages": silent}, {"messages": greeting}])
    assert drawn(tokenizers["chatml"], one).count("⟦") == drawn(tokenizers["chatml"], other).count("⟦") == 1
    assert drawn(tokenizers["chatml"], other).startswith("<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user")


def test_a_conversation_without_an_answer_to_a_prompt_is_rejected(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    turns = [{"from": "gpt", "value": "begins with the assistant"}, {"from": "human", "value": "no answer follows"}]
    samples_of(tmp_path, tokenizers["chatml"], [{"id": "s3", "conversations": turns}, {"messages": [USER, OK]}])
    (line,) = map(json.loads, (tmp_path / "corpus.rejected.jsonl").read_text().splitlines())
    assert (line["line"], line["reason"]) == (1, "nothing-supervised")


def test_a_text_with_markers_is_supervised_between_them(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    markers = ("<|im_start|>assistant\n", "<|im_end|>")
    row = {"text": TWO_TURNS["chatml"].replace("⟦", "").replace("⟧", "")}
    (sample,) = samples_of(tmp_path, tokenizers["chatml"], [row], markers=markers)
    assert drawn(tokenizers["chatml"], sample) == TWO_TURNS["chatml"]


def test_tokens_pass_through(tmp_path: Path, tokenizers: dict[str, Path]) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, 9]},
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 1, 1]},
    ]
    for sample in samples_of(tmp_path, tokenizers["chatml"], rows):
        assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == ([5, 6, 7, 8, 9], [0, 0, 1, 1, 1])


# by chance

ONE_NEWLINE = QWEN.replace("</think>\n\n", "</think>\n")
"""SmolLM2's pre-tokenizer splits two newlines before a word, and keeps them together at the end of a prompt."""

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["\nx", " x", "x ", "a\n\nb", "ünïcödé 🚀", "<|im_end|>", "1234567", "\t", "  "]
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(WORDS)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(WORDS)})
        for _ in range(draw(st.integers(0, 1))):
            call = {"name": "f", "arguments": json.dumps({"a": draw(WORDS)})}
            messages.append({"role": "assistant", "content": draw(WORDS), "tool_calls": [{"function": call}]})
            messages.append({"role": "tool", "content": draw(WORDS)})
        answer = {"role": "assistant", "content": draw(WORDS)}
        messages.append(answer | ({"reasoning_content": draw(WORDS)} if draw(st.booleans()) else {}))
    return messages


def as_given_to_the_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    plain = json.loads(json.dumps(messages))
    for message in plain:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return plain  # type: ignore[no-any-return]


@pytest.mark.thorough
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(conversations(), min_size=20, max_size=20), thinking=st.booleans())
def test_every_supervised_run_is_what_a_server_would_have_generated(
    smollm2: Path, tmp_path_factory: pytest.TempPathFactory, rows: list[list[dict[str, Any]]], thinking: bool
) -> None:
    """The oracle is the tokenizer's own rendering of the prompt at each turn."""
    folder = tmp_path_factory.mktemp("chance")
    rows = [[USER, OK], *rows]  # a corpus without any sample is refused
    (folder / "qwen.jinja").write_text(ONE_NEWLINE)
    tokenizer = load_tokenizer(smollm2)
    kwargs = {"enable_thinking": thinking}
    options = TokenizeOptions(folder / "qwen.jinja", kwargs)
    lines = "".join(json.dumps({"id": str(i), "messages": row}) + "\n" for i, row in enumerate(rows))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    table = pa.Table.from_pylist([json.loads(line) for line in lines.splitlines()])
    pq.write_table(table, folder / "c.parquet")
    with pa.OSFile(str(folder / "d.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    made: list[list[tuple[str, list[int], list[int]]]] = []
    for source in ("a.jsonl", "b.jsonl.gz", "c.parquet", "d.arrow"):
        report = tokenize_files([folder / source], smollm2, folder / f"{source}.parquet", options)
        corpus = [s for s in read_corpus(folder / f"{source}.parquet") if isinstance(s, Sample)]
        made.append([(s.sample_id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in corpus])
        assert report.rows == len(rows)
    assert all(one == made[0] for one in made)

    seen = 0
    for sample_id, ids, mask in made[0]:
        number, _, part = sample_id.partition("#")
        messages = as_given_to_the_template(rows[int(number)])
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [answers[int(part)]] if part else answers
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        prompts = [
            tokenizer.apply_chat_template(
                messages[:i], chat_template=ONE_NEWLINE, add_generation_prompt=True, return_dict=False, **kwargs
            )
            for i in answers
        ]
        assert [ids[:start] for start in starts] == prompts
        for start in starts:
            stop = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            assert ids[stop - 1] == tokenizer.eos_token_id
            assert tokenizer.eos_token_id not in ids[start : stop - 1]
            seen += 1
    assert seen
