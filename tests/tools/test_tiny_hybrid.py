"""The committed tiny hybrid target is complete, trained, and fit for the tests that use it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOOLS = Path(__file__).parents[2] / "tools" / "targets"
TARGET = TOOLS / "tiny_hybrid"

# Written for this test, so that no Python version contains it.
SNIPPET = '''\
class TokenBucket:
    """Limit the rate of an operation.

    The bucket holds at most *capacity* tokens and gains *rate* of them every second.
    """

    def __init__(self, capacity, rate):
        if capacity <= 0:
            raise ValueError("capacity must be positive")
        self.capacity = capacity
        self.rate = rate
        self._level = capacity
        self._last = time.monotonic()
        self._lock = threading.Lock()

    def __repr__(self):
        return "<%s capacity=%r rate=%r>" % (self.__class__.__name__, self.capacity, self.rate)

    def _refill(self):
        now = time.monotonic()
        self._level = min(self.capacity, self._level + (now - self._last) * self.rate)
        self._last = now

    def take(self, amount=1, timeout=None):
        """Take *amount* tokens; return False if they are not there before *timeout*."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._refill()
                if self._level >= amount:
                    self._level -= amount
                    return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(amount / self.rate)
'''
SNIPPET_NATS_PER_TOKEN = 3.0  # the committed checkpoint has 2.61, an untrained model 7.7


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto", output_loading_info=True)


@pytest.fixture(scope="module")
def model():
    """fp32 arithmetic on the bf16 weights, in which batches and single rows can be compared."""
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def test_every_weight_is_in_the_checkpoint(loaded):
    model, info = loaded
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (TARGET / "model.safetensors").stat().st_size < 30e6


def test_both_kinds_of_layer_and_grouped_value_heads(loaded):
    config = loaded[0].config
    assert config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert config.linear_num_value_heads == 2 * config.linear_num_key_heads


@torch.inference_mode()
def test_it_has_learned_python(model, tokenizer):
    ids = tokenizer(SNIPPET, return_tensors="pt")["input_ids"]
    assert model(input_ids=ids, labels=ids).loss < SNIPPET_NATS_PER_TOKEN


@torch.inference_mode()
def test_deltanet_state_crosses_chunks(model, tokenizer):
    # Layers 0..2 are linear, without positions, and their convolutions reach back 9 tokens: past those, only the
    # recurrent state can know what came before the chunk end at 128. A kernel that drops it must show.
    ids = tokenizer(SNIPPET, return_tensors="pt")["input_ids"][:, :192]
    whole, cut = (model(input_ids=i, output_hidden_states=True).hidden_states[3][0] for i in (ids, ids[:, 128:]))
    whole, cut = whole[128 + 9 :], cut[9:]
    assert (whole - cut).norm() / whole.norm() > 0.03  # measured 0.11


@torch.inference_mode()
def test_right_padding_changes_nothing(model, tokenizer):
    texts = [SNIPPET[:700], SNIPPET[:90], SNIPPET[200:500]]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch["attention_mask"][1, -1] == 0
    padded = model(**batch, output_hidden_states=True, use_cache=False)
    for row, text in enumerate(texts):
        alone = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True, use_cache=False)
        n = alone.logits.shape[1]
        torch.testing.assert_close(padded.logits[row, :n], alone.logits[0], atol=2e-4, rtol=1e-4)
        for got, want in zip(padded.hidden_states, alone.hidden_states, strict=True):
            torch.testing.assert_close(got[row, :n], want[0], atol=2e-4, rtol=1e-4)


@torch.inference_mode()
def test_left_padded_generation_equals_generation_alone(model, tokenizer):
    heads = [SNIPPET[: SNIPPET.index(mark)] for mark in ("        if capacity", "        self.rate", "    def _refill")]
    batch = tokenizer(heads, return_tensors="pt", padding=True, padding_side="left")
    together = model.generate(**batch, max_new_tokens=16)[:, batch["input_ids"].shape[1] :]
    for row, head in enumerate(heads):
        prompt = tokenizer(head, return_tensors="pt")
        alone = model.generate(**prompt, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
        assert together[row, : len(alone)].tolist() == alone.tolist()


def test_chat_template_marks_what_the_assistant_wrote(tokenizer):
    turns = [("system", "Complete the Python code."), ("user", "def f(a):\n"), ("assistant", "    return a")] * 2
    messages = [{"role": role, "content": content} for role, content in turns]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, keep in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if keep]
    assert tokenizer.decode(marked) == "    return a<|endoftext|>" * 2
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded["input_ids"][: len(prompt)] == prompt
    assert encoded["assistant_masks"][: len(prompt)] == [0] * len(prompt)


@pytest.mark.thorough
def test_prompts_come_from_files_never_trained_on(tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(TOOLS)
    import heldout_prompts
    import stdlib_text

    for name in ("a", "b"):
        monkeypatch.setattr(sys, "argv", ["heldout_prompts.py", "--limit", "50", "--out", str(tmp_path / name)])
        heldout_prompts.main()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 50
    for row in rows:
        assert stdlib_text.is_held_out(row["id"].rpartition(":")[0])
        assert 64 <= len(tokenizer.encode(row["prompt"])) <= 192
        assert row["prompt"].endswith("\n")
