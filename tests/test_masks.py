"""tokenize: exact masks from marked templates and stable boundaries, and a reason for every row that has none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hscache.corpus.masks import REASONS, load_tokenizer, read_rows, row_id, tokenize_files
from hscache.corpus.readers import read_corpus
from hscache.errors import EnvironmentFault, InputError

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
    templates = {"marked": MARKED, "plain": PLAIN, "none": None}
    return {name: make_target(tmp_path_factory.mktemp(name), template) for name, template in templates.items()}


@pytest.fixture
def tokenize(targets: dict[str, Path], tmp_path: Path) -> Callable[..., tuple[Any, list[tuple[str, str, list[int]]]]]:
    """Return a function: rows -> report, and (id, words, mask) of each sample."""

    def run(rows: list[Any], target: str = "marked", **options: Any) -> Any:
        source = tmp_path / "in.jsonl"
        source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        report = tokenize_files([source], targets[target], tmp_path / "out.parquet", **options)
        samples = []
        for row in read_corpus(tmp_path / "out.parquet"):
            assert row.input_ids is not None
            assert row.loss_mask is not None
            samples.append((row.sample_id, " ".join(WORDS[i] for i in row.input_ids), row.loss_mask.tolist()))
        return report, samples

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
    ],
    "empty-completion": [{"prompt": "hello ", "completion": ""}],
    "unstable-boundary": [{"prompt": "hello wor", "completion": "ld"}],
    "nothing-supervised": [{"messages": CHAT[:1]}],
}


def test_the_faults_cover_all_reasons() -> None:
    assert FAULTS.keys() == REASONS.keys()


@pytest.mark.parametrize("reason", REASONS)
def test_a_row_without_an_exact_mask_is_rejected_with_its_reason(tokenize: Any, tmp_path: Path, reason: str) -> None:
    good = {"messages": CHAT}
    report, samples = tokenize([good, *FAULTS[reason], good])
    assert report.rejected == {reason: len(FAULTS[reason])}
    assert [name for name, _, _ in samples] == ["in-0", f"in-{len(FAULTS[reason]) + 1}"]
    lines = [json.loads(line) for line in (tmp_path / "out.rejected.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(1, len(FAULTS[reason]) + 1))
    assert all(line["detail"] for line in lines)


def test_a_template_without_marks_is_refused_not_masked_to_zero(tokenize: Any) -> None:
    with pytest.raises(InputError) as caught:
        tokenize([{"messages": CHAT}], "plain")
    assert caught.value.code == "template-without-generation"
    assert "--chat-template" in str(caught.value.hint)


@pytest.mark.parametrize("row", [{"messages": CHAT}, {"prompt": CHAT[:1], "completion": "foo"}])
def test_messages_without_a_template_are_refused(tokenize: Any, row: Any) -> None:
    with pytest.raises(InputError) as caught:
        tokenize([row], "none")
    assert caught.value.code == "template-missing"


def test_a_template_file_replaces_the_tokenizers_own(tokenize: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(MARKED)
    _, samples = tokenize([{"messages": CHAT[:2]}], "none", chat_template=tmp_path / "t.jinja")
    assert samples == [("in-0", "<user> hello <assistant> how are you <eos>", [0, 0, 0, 1, 1, 1, 1])]


def test_no_usable_row_is_an_error_and_leaves_no_corpus(tokenize: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        tokenize(["{cut"])
    assert caught.value.code == "corpus-empty"
    assert not (tmp_path / "out.parquet").exists()


ROWS = [{"prompt": "hello ", "completion": "world"}, {"prompt": "foo ", "completion": "bar"}]


def test_rows_are_the_same_from_every_format(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    expected = [(0, ROWS[0], ""), (1, ROWS[1], "")]
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.parquet"):
        assert list(read_rows(tmp_path / name)) == expected, name


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.jsonl", None, "corpus-missing"),
        ("a.csv", b"x", "corpus-format"),
        ("a.parquet", b"x" * 40, "corpus-format"),
        ("a.parquet", b"PAR1" + b"x" * 40, "corpus-truncated"),
    ],
)
def test_files_that_are_not_there_or_of_no_known_kind_are_refused(
    tmp_path: Path, name: str, content: bytes | None, code: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(read_rows(tmp_path / name))
    assert caught.value.code == code


def test_a_rows_own_id_wins_over_its_number() -> None:
    assert row_id({"id": 7, "sample_id": "s"}, Path("f.jsonl"), 3) == "s"
    assert row_id({"task_id": "HumanEval/0", "id": None}, Path("f.jsonl"), 3) == "HumanEval/0"
    assert row_id({}, Path("d/f.jsonl"), 3) == "f-3"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(EnvironmentFault) as caught:
            load_tokenizer(path)
        assert caught.value.code == "target-missing"
