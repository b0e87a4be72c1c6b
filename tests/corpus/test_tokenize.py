"""tokenize: exact masks from marked templates and stable boundaries, and a reason for every row that has none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from hscache.corpus.readers import read_corpus
from hscache.corpus.tokenize import REASONS, TokenizeOptions, file_names, load_tokenizer, row_id, tokenize_files
from hscache.errors import EnvironmentFault, InputError
from tests.conftest import TINY_HYBRID

WORDS = ["<unk>", "<eos>", "<user>", "<assistant>", "<system>"]
WORDS += ["hello", "world", "how", "are", "you", "fine", "thanks", "foo", "bar"]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <eos>{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
REFUSING = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if messages | length > 5 %}{{ 'long' + 3 }}{% endif %}"
) + MARKED
CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "how are you"},
    {"role": "user", "content": "fine thanks"},
    {"role": "assistant", "content": "foo"},
]


def make_target(folder: Path, template: str | None) -> Path:
    """Save a tokenizer whose tokens are whole words, so that expected masks can be read off."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    made.chat_template = template
    made.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    templates = {"marked": MARKED, "plain": PLAIN, "none": None, "refusing": REFUSING}
    made = {name: make_target(tmp_path_factory.mktemp(name), template) for name, template in templates.items()}
    (made["refusing"] / "config.json").write_text(json.dumps({"vocab_size": WORDS.index("bar")}))
    return made


@pytest.fixture
def tokenize(targets: dict[str, Path], tmp_path: Path) -> Callable[..., tuple[Any, list[tuple[str, str, list[int]]]]]:
    """Return a function: rows -> report, and (id, words, mask) of each sample."""

    def run(rows: list[Any], target: str = "marked", **options: Any) -> Any:
        source = tmp_path / "in.jsonl"
        source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        report = tokenize_files([source], targets[target], tmp_path / "out.parquet", TokenizeOptions(**options))
        return report, [
            (row.sample_id, " ".join(WORDS[i] for i in row.input_ids), row.loss_mask.tolist())
            for row in read_corpus(tmp_path / "out.parquet")
        ]

    return run


def test_marked_templates_supervise_what_the_assistant_wrote(tokenize: Any) -> None:
    report, samples = tokenize([{"id": "x", "messages": CHAT, "tag": "talk"}])
    text = "<user> hello <assistant> how are you <eos> <user> fine thanks <assistant> foo <eos>"
    assert samples == [("x", text, [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1])]
    assert (report.samples, report.tokens, report.loss_tokens, report.rejected) == (1, 13, 6, {})


def test_prompt_and_completion_texts_are_split_at_their_boundary_and_end_supervised(tokenize: Any) -> None:
    _, samples = tokenize([{"prompt": "hello world ", "completion": "how are you"}])
    assert samples == [("in-0", "hello world how are you <eos>", [0, 0, 1, 1, 1, 1])]


@pytest.mark.parametrize("completion", ["foo bar", [{"role": "assistant", "content": "foo bar"}]])
def test_a_prompt_of_messages_needs_no_marks(tokenize: Any, completion: object) -> None:
    row = {"prompt": CHAT[:1], "completion": completion}
    _, samples = tokenize([row], "plain")
    assert samples == [("in-0", "<user> hello <assistant> foo bar", [0, 0, 0, 1, 1])]


def test_a_completion_that_brings_its_end_token_gets_no_second_one(tokenize: Any) -> None:
    _, samples = tokenize([{"prompt": "hello ", "completion": "foo <eos>"}])
    assert samples == [("in-0", "hello foo <eos>", [0, 1, 1])]


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}MARKED{% endgeneration %}BEHIND"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's template with marks; the newline behind the end token stands in the marks, or behind them."""
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Hello.\n"},
    {"role": "user", "content": "more please"},
    {"role": "assistant", "content": "OK."},
]


def supervised(tmp_path: Path, target: Path, row: dict[str, Any], template: str | None = None) -> list[str]:
    """Return the texts that the mask of a row selects."""
    (tmp_path / "turns.jsonl").write_text(json.dumps(row))
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
    out = tmp_path / "turns.parquet"
    out.unlink(missing_ok=True)
    chat_template = tmp_path / "t.jinja" if template is not None else None
    tokenize_files([tmp_path / "turns.jsonl"], target, out, TokenizeOptions(chat_template=chat_template))
    (sample,) = read_corpus(out)
    decode = load_tokenizer(target).decode
    runs = groupby(zip(sample.loss_mask.tolist(), sample.input_ids.tolist(), strict=True), key=lambda pair: pair[0])
    return [decode([token for _, token in run]) for marked, run in runs if marked]


@pytest.mark.parametrize("before", [pytest.param(2, marks=pytest.mark.thorough), 4])
def test_turns_are_supervised_alike_by_marks_and_by_boundaries_smollm2(
    tmp_path: Path, smollm2: Path, before: int
) -> None:
    """ChatML writes a newline behind the end token, which the target never does."""
    given = {"prompt": TURNS[:before], "completion": TURNS[before:]}
    expected = ["Hello.\n<|im_end|>", "OK.<|im_end|>"]
    assert supervised(tmp_path, smollm2, given) == expected[before // 2 - 1 :]
    for marked, behind in (("", "{{ '\n' }}"), ("{{ '\n' }}", "")):
        template = CHATML.replace("MARKED", marked).replace("BEHIND", behind)
        assert supervised(tmp_path, smollm2, {"messages": TURNS}, template) == expected
        assert supervised(tmp_path, smollm2, given, template) == expected[before // 2 - 1 :]


def test_turns_are_supervised_alike_by_marks_and_by_boundaries_tiny_hybrid(tmp_path: Path) -> None:
    expected = ["Hello.\n<|endoftext|>", "OK.<|endoftext|>"]
    assert supervised(tmp_path, TINY_HYBRID, {"messages": TURNS}) == expected
    assert supervised(tmp_path, TINY_HYBRID, {"prompt": TURNS[:2], "completion": TURNS[2:]}) == expected
    behind = (TINY_HYBRID / "chat_template.jinja").read_text().replace("eos_token }}", "eos_token + '\\n' }}")
    assert supervised(tmp_path, TINY_HYBRID, {"messages": TURNS}, behind) == expected
    assert supervised(tmp_path, TINY_HYBRID, {"prompt": TURNS[:2], "completion": TURNS[2:]}, behind) == expected


def test_a_turn_may_end_with_a_token_of_the_generation_config(tmp_path: Path) -> None:
    """Gemma ends turns with another token than its tokenizer's eos."""
    target = make_target(tmp_path / "t", MARKED.replace("<eos>{% end", "<system> thanks{% end"))
    turns = {"prompt": CHAT[:1], "completion": "foo"}
    assert supervised(tmp_path, target, turns) == ["foo <system> thanks"]
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, WORDS.index("<system>")]}))
    assert supervised(tmp_path, target, turns) == ["foo <system>"]
    assert supervised(tmp_path, target, {"messages": CHAT[:2]}) == ["how are you <system>"]
    (target / "generation_config.json").write_text("{")
    with pytest.raises(EnvironmentFault, match="generation_config"):
        supervised(tmp_path, target, turns)


def test_text_parts_are_one_text(tokenize: Any) -> None:
    parts = [{"type": "text", "text": "how are "}, {"type": "text", "text": "you"}]
    _, samples = tokenize([{"messages": [CHAT[0], {"role": "assistant", "content": parts}]}])
    assert samples == [("in-0", "<user> hello <assistant> how are you <eos>", [0, 0, 0, 1, 1, 1, 1])]


def test_a_tool_call_without_text_is_the_templates_affair(tmp_path: Path) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "bar"}}]}
    template = MARKED.replace("m.content }} <eos>", "m.content or m.tool_calls[0].function.name }} <eos>")
    target = make_target(tmp_path / "t", template)
    assert supervised(tmp_path, target, {"messages": [CHAT[0], called]}) == ["bar <eos>"]
    assert supervised(tmp_path, target, {"prompt": CHAT[:1], "completion": [called]}) == ["bar <eos>"]
    with pytest.raises(InputError) as caught:
        supervised(tmp_path, make_target(tmp_path / "u", MARKED), {"messages": [CHAT[0], called]})
    assert "template-refused" in caught.value.message


FAULTS: dict[str, list[Any]] = {
    "bad-json": ["{cut", "[1]"],
    "bad-row": [
        {"text": "hello"},
        {"prompt": "hello"},
        {"prompt": 3, "completion": "x"},
        {"prompt": [], "completion": "foo"},
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"content": "no role"}]},
        {"messages": ["hi"]},
        {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": []}]},
        {"messages": [CHAT[0], {"role": "assistant"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, CHAT[1]]},
        {"messages": [{"role": "user", "content": {"text": "hello"}}, CHAT[1]]},
        {"messages": [{"role": None, "content": "hello"}, CHAT[1]]},
        {"prompt": [1, 2, 3], "completion": "foo"},
        {"prompt": CHAT[:1], "completion": [{"role": "assistant", "content": None}]},
    ],
    "empty-prompt": [{"prompt": "", "completion": "foo"}, {"prompt": " ", "completion": "foo"}],
    "template-refused": [
        {"messages": [{"role": "tool", "content": "3"}, *CHAT]},
        {"messages": CHAT * 2},
        {"prompt": CHAT, "completion": CHAT},
    ],
    "empty-completion": [{"prompt": "hello ", "completion": ""}, {"prompt": CHAT[:1], "completion": ""}],
    "unstable-boundary": [{"prompt": "hello wor", "completion": "ld"}],
    "nothing-supervised": [{"messages": CHAT[:1]}, {"prompt": CHAT[:2], "completion": CHAT[2:3]}],
    "cut-answer": [
        {"prompt": "hello ", "completion": "foo", "finish_reason": "length"},
        {"messages": CHAT, "finish_reason": "length"},
        {"input_ids": [5, 6], "loss_mask": [0, 1], "finish_reason": "length"},
    ],
    "ids-out-of-vocab": [{"prompt": "hello ", "completion": "bar"}, {"input_ids": [5, 99], "loss_mask": [0, 1]}],
    "length-mismatch": [{"input_ids": [5, 6], "loss_mask": [0]}],
    "bad-mask": [{"input_ids": [5, 6], "labels": [-100, 7]}],
    "damaged": [],
}


def test_the_faults_cover_all_reasons() -> None:
    assert FAULTS.keys() == REASONS.keys()


@pytest.mark.parametrize("reason", [reason for reason in REASONS if FAULTS[reason]])
def test_a_row_without_an_exact_mask_is_rejected_with_its_reason(tokenize: Any, tmp_path: Path, reason: str) -> None:
    good = {"messages": CHAT}
    report, samples = tokenize([good, *FAULTS[reason], good], "refusing", drop_cut=True)
    assert report.rejected == {reason: len(FAULTS[reason])}
    assert [name for name, _, _ in samples] == ["in-0", f"in-{len(FAULTS[reason]) + 1}"]
    lines = [json.loads(line) for line in (tmp_path / "out.rejected.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(1, len(FAULTS[reason]) + 1))
    assert all(line["detail"] for line in lines)


def test_a_template_needs_no_marks(tokenize: Any) -> None:
    _, samples = tokenize([{"messages": CHAT}], "plain")
    text = "<user> hello <assistant> how are you <user> fine thanks <assistant> foo"
    assert samples == [("in-0", text, [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1])]


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": CHAT[:1], "completion": "foo"}])
def test_messages_without_a_template_are_refused(tokenize: Any, row: Any) -> None:
    with pytest.raises(InputError) as caught:
        tokenize([row], "none")
    assert caught.value.code == "template-missing"


def test_a_template_file_replaces_the_tokenizers_own(tokenize: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(MARKED)
    _, samples = tokenize([{"messages": CHAT[:2]}], "none", chat_template=tmp_path / "t.jinja")
    assert samples == [("in-0", "<user> hello <assistant> how are you <eos>", [0, 0, 0, 1, 1, 1, 1])]


@pytest.mark.parametrize("content", ["{% for m in messages %}", "{% generation %}{{ m.content }", b"\xff\xfe{", None])
def test_a_template_that_is_none_is_refused_before_the_first_row(
    tokenize: Any, tmp_path: Path, content: str | bytes | None
) -> None:
    if content is not None:
        (tmp_path / "t.jinja").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError) as caught:
        tokenize([{"prompt": "hello ", "completion": "foo"}], chat_template=tmp_path / "t.jinja")
    assert caught.value.code == "template-invalid"


def test_no_usable_row_is_an_error_and_leaves_no_corpus(tokenize: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        tokenize(["{cut"])
    assert caught.value.code == "corpus-empty"
    assert not (tmp_path / "out.parquet").exists()


def test_a_rows_own_id_wins_over_its_number() -> None:
    assert row_id({"id": 7, "sample_id": "s"}, "f", 3) == "s"
    assert row_id({"task_id": "HumanEval/0", "id": None}, "f", 3) == "HumanEval/0"
    assert row_id({}, "f", 3) == "f-3"


def test_files_of_one_name_give_other_ids(targets: dict[str, Path], tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part-0.jsonl").write_text('{"prompt": "hello ", "completion": "foo"}\n')
    shutil.copy(tmp_path / "a/part-0.jsonl", tmp_path / "other.jsonl")
    inputs = [tmp_path / "a/part-0.jsonl", tmp_path / "b/part-0.jsonl", tmp_path / "other.jsonl"]
    tokenize_files(inputs, targets["none"], tmp_path / "out.parquet")
    ids = [row.sample_id for row in read_corpus(tmp_path / "out.parquet")]
    assert ids == ["a/part-0.jsonl-0", "b/part-0.jsonl-0", "other-0"]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x.jsonl", "b/y.jsonl"], ["x", "y"]),
        (["a/x.jsonl", "a/x.parquet"], ["x.jsonl", "x.parquet"]),
        (["a/x.jsonl", "a/x.jsonl"], ["x", "x"]),
        (["a/c/x.jsonl", "b/c/x.jsonl", "b/d/x.jsonl"], ["a/c/x.jsonl", "b/c/x.jsonl", "d/x.jsonl"]),
    ],
)
def test_as_much_of_a_path_as_tells_files_apart(paths: list[str], names: list[str]) -> None:
    given = [Path(path) for path in paths]
    assert [file_names(given)[path] for path in given] == names


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EnvironmentFault) as caught:
            load_tokenizer(path)
        assert caught.value.code == "target-missing"


NO_TOKENIZERS = [
    None,
    "{",
    "[]",
    '{"version": "1.0"}',
    '{"version": "1.0", "added_tokens": [], "model": {"type": "what"}}',
    '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}',
]


@pytest.mark.parametrize("content", NO_TOKENIZERS)
@pytest.mark.parametrize("added", [False, True])
def test_a_tokenizer_without_a_vocabulary_is_refused(tmp_path: Path, content: str | None, added: bool) -> None:
    """transformers makes an empty Qwen tokenizer out of a bare config, and says nothing."""
    shutil.copy(TINY_HYBRID / "config.json", tmp_path)
    if added:
        shutil.copy(TINY_HYBRID / "tokenizer_config.json", tmp_path)
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(EnvironmentFault) as caught:
        load_tokenizer(tmp_path)
    assert (caught.value.code, "tokenizer" in caught.value.message) == ("target-missing", True)
    assert "tokenizer.json" in str(caught.value.hint)
