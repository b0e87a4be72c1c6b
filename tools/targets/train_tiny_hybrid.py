"""Train a tiny Qwen3.5-architecture language model on the sources of Python's own standard library.

    python tools/targets/train_tiny_hybrid.py --out runs/tiny_hybrid

No package ships a pretrained hybrid model, and random weights are a poor target: their hidden states carry nothing
that a drafter could learn. This one has both kinds of layer (three gated-DeltaNet to one full attention, two value
heads per key head, as the large ones have), writes recognisable Python, and fits in the repository. The result is a
complete checkpoint: bf16 weights, tokenizer with a chat template that marks what the assistant generated, model card.

How the text flows: files are split by a hash of their name; one training file in four is cut into functions that
become conversations (user: the first lines, assistant: the rest, then the end token), the others stay whole; all are
shuffled and packed into rows. So both a bare prompt and a chat prompt lead to Python, and a chat answer ends.

Shapes: B rows per step, T tokens per row, V vocabulary. About 35 minutes on one core of a CPU with AVX512-BF16; the
same seed, machine and package versions give the same weights.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import time
from pathlib import Path

import stdlib_text
import tokenizers
import torch
import torch.nn.functional as F  # noqa: N812  (the name that torch's own code uses)
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

VOCAB = 2048
EOS, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"
SYSTEM_PROMPT = "Complete the Python code."
# No line break after a marker: it would melt into the indentation that follows, and the token boundary with it.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% elif message.role in ['system', 'user'] %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% else %}{{ raise_exception('unknown role: ' + message.role) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Qwen's own rule. A line break always belongs to the token on its left, so text cut at a line is cut at a token.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
B, T = 4, 512
LR_MUON, LR_ADAMW = 1.5e-2, 3e-3
WARMUP_STEPS, DECAY_FRACTION = 20, 0.5


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE; ids 0..3 are the markers."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=EOS,
        pad_token=EOS,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def documents(files: list[tuple[str, str]], rng: random.Random) -> list[str]:
    """Render files as training documents, in random order: three in four whole, the rest as conversations."""
    texts = []
    for name, text in files:
        if rng.random() >= 0.25:
            texts.append(text + EOS)
            continue
        for unit in stdlib_text.units(name, text):
            n_lines = unit.text.count("\n") + 1
            if n_lines >= 3:
                head, tail = stdlib_text.cut(unit, rng.randrange(1, n_lines))
                system = SYSTEM + SYSTEM_PROMPT if rng.random() < 0.25 else ""
                texts.append(system + USER + head + ASSISTANT + tail + EOS)
    rng.shuffle(texts)
    return texts


def pack(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """Concatenate documents into rows of T + 1 tokens: int64 [rows, T + 1]."""
    ids = [i for encoding in tokenizer.backend_tokenizer.encode_batch(texts) for i in encoding.ids]
    n_rows = (len(ids) - 1) // T
    stream = torch.tensor(ids[: n_rows * T + 1])
    return stream.unfold(0, T + 1, T)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5ForCausalLM:
    """Initialise the model in fp32."""
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            # the default, log(U(0, 16)), forgets within a token: then nothing would cross a chunk of 64. With a neutral
            # gate input these half-lives are 5 to 530 tokens, evenly in the logarithm
            torch.nn.init.uniform_(parameter.data, math.log(0.001), math.log(0.1))
    return model


def optimizers(model: Qwen3_5ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks; AdamW for embeddings, gates, convolutions and scales."""
    matrices, vectors, embeddings = [], [], []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            embeddings.append(parameter)
        else:
            (matrices if parameter.ndim == 2 and min(parameter.shape) >= 32 else vectors).append(parameter)
    adamw = torch.optim.AdamW(
        [{"params": embeddings, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR_ADAMW,
        betas=(0.9, 0.95),
    )
    built = [torch.optim.Muon(matrices, lr=LR_MUON, weight_decay=0.1), adamw]
    for optimizer in built:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return built


def lr_factor(step: int, n_steps: int) -> float:
    """Warm up, hold, then go linearly to zero."""
    return min((step + 1) / WARMUP_STEPS, 1.0, (n_steps - step) / (DECAY_FRACTION * n_steps))


def loss_sum(model: Qwen3_5ForCausalLM, rows: Tensor, *, autocast: bool) -> Tensor:
    """Return the summed cross-entropy in nats of rows [B, T + 1], each token but a row's first being predicted."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


@torch.inference_mode()
def held_out_loss(model: Qwen3_5ForCausalLM, rows: Tensor, *, autocast: bool) -> float:
    """Return the mean loss in nats per token."""
    model.eval()
    total = sum(float(loss_sum(model, batch, autocast=autocast)) for batch in rows.split(B))
    model.train()
    return total / (rows.shape[0] * T)


def train(model: Qwen3_5ForCausalLM, rows: Tensor, held_out: Tensor, args: argparse.Namespace) -> float:
    """Train in place and return the seconds it took."""
    built = optimizers(model)
    order = torch.Generator().manual_seed(args.seed)
    queue: list[int] = []
    autocast = args.precision == "bf16"
    start = time.monotonic()
    for step in range(args.steps):
        if len(queue) < B:  # a new epoch
            queue = torch.randperm(rows.shape[0], generator=order).tolist()
        batch, queue = rows[queue[:B]], queue[B:]
        factor = lr_factor(step, args.steps)
        for optimizer in built:
            for group in optimizer.param_groups:
                group["lr"] = factor * group["peak_lr"]
        loss = loss_sum(model, batch, autocast=autocast) / (B * T)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in built:
            optimizer.step()
            optimizer.zero_grad()
        check = ""
        if step % 100 == 0 or step + 1 == args.steps:
            check = f"held-out {held_out_loss(model, held_out[:16], autocast=autocast):.3f} "
        if step % 10 == 0 or check:
            elapsed, seen = time.monotonic() - start, (step + 1) * B * T
            print(
                f"step {step + 1:5d}/{args.steps} loss {loss:.3f} {check}norm {norm:.2f} lr x{factor:.2f} "
                f"tok {seen / 1e6:.2f}M epoch {seen / (rows.shape[0] * T):.2f} tok/s {seen / elapsed:,.0f} "
                f"{elapsed / 60:.1f}min",
                flush=True,
            )
    return time.monotonic() - start


def memory_tokens(model: Qwen3_5ForCausalLM) -> str:
    """Say after how many tokens a DeltaNet head has forgotten half, for a neutral gate input, over all heads."""
    rates = torch.cat(
        [m.A_log.float().exp() * F.softplus(m.dt_bias.float()) for m in model.modules() if hasattr(m, "A_log")]
    )
    half_lives = (math.log(2) / rates.detach()).sort().values
    return f"min {half_lives[0]:.1f}, median {half_lives.median():.0f}, max {half_lives[-1]:.0f}"


@torch.inference_mode()
def greedy(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str, n_tokens: int = 96) -> str:
    """Return the greedy continuation of a text."""
    model.eval()
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=n_tokens)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(output, skip_special_tokens=True)


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [hscache, qwen3_5_text, hybrid, test-model]
---
# Tiny hybrid target

A {parameters:,}-parameter `Qwen3_5ForCausalLM` for tests and demonstrations: {layers} layers, three gated-DeltaNet to
one full attention, 4 value heads to 2 key heads, tied embeddings, vocabulary {vocab}. It imitates Python source code
and is good for nothing else.

- **Held-out loss**: **{nats:.3f} nats/token, {bits:.3f} bits/byte** ({bytes_per_token:.2f} bytes/token), fp32
  arithmetic on the saved bf16 weights, {held_tokens:,} tokens in rows of {T}; {nats_before:.3f} nats/token before
  rounding.
- **Made by**: `python tools/targets/train_tiny_hybrid.py --steps {steps} --seed {seed} --threads {threads}
  --precision {precision}` in {minutes:.1f} minutes ({rate:,.0f} tokens/s), with torch {torch}, transformers
  {transformers}, tokenizers {tokenizers}.
- **Text**: the standard library of Python {python} (PSF licence) without tests and encoding tables,
  {train_mb:.1f} MB in {train_files} files; {held_files} more files ({held_mb:.1f} MB) are held out by a hash of their
  name.
- **Recipe**: {B} rows of {T} tokens a step, {tokens:.2f} M tokens ({epochs:.2f} epochs); Muon {lr_muon} for matrices,
  AdamW {lr_adamw} for the rest; {warmup} steps of warm-up, linear decay over the last {decay:.0%}.
- **Memory**: half-life of the DeltaNet heads' state, for a neutral gate input: {memory} tokens.
- **Numbers**: all weights are bf16, `A_log` and the gated norms included, as published checkpoints have them.
- **Tokens**: `{eos}` ends a document and pads. In a chat, the user gives the first lines of a function and the
  assistant writes the rest; the template marks it with `{{% generation %}}`.
- **Beware**: greedy text falls into loops, as small models' does, and loops are easy to draft: acceptance lengths on it
  flatter a drafter. Sample (temperature 0.5 to 0.8) where the figure matters.

## Greedy text from held-out prompts

{samples}"""


def card_samples(model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, files: list[tuple[str, str]]) -> str:
    """Show three held-out functions: the prompt, then what the model makes of it."""
    found = [u for name, text in files for u in stdlib_text.units(name, text) if 8 <= u.text.count("\n") <= 30]
    blocks = []
    for unit in random.Random(0).sample(found, 3):
        head, _ = stdlib_text.cut(unit, 4)
        answer = greedy(model, tokenizer, USER + head + ASSISTANT)
        blocks.append(f"`{unit.name}`\n\n```python\n{head}# --- the model's from here on\n{answer.rstrip()}\n```\n")
    return "\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny_hybrid"), help="checkpoint directory to write")
    parser.add_argument("--steps", type=int, default=1000, help=f"optimizer steps of {B * T} tokens (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; more than the idle cores collapses")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16", help="bf16: autocast in matmuls")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    train_files, held_files = stdlib_text.files(held_out=False), stdlib_text.files(held_out=True)
    tokenizer = train_tokenizer([text for _, text in train_files])
    rows = pack(tokenizer, documents(train_files, rng))
    held_out = pack(tokenizer, documents(held_files, rng))[:128]
    model = build_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters:,} parameters, {rows.numel():,} training tokens, {held_out.numel():,} held-out tokens", flush=True
    )

    seconds = train(model, rows, held_out, args)

    nats_before = held_out_loss(model, held_out, autocast=False)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    # what is reported is what anyone gets who loads the files
    model = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    nats = held_out_loss(model, held_out, autocast=False)
    held_bytes = sum(len(tokenizer.decode(row[1:]).encode()) for row in held_out)
    card = CARD.format(
        **{name: getattr(args, name) for name in ("steps", "seed", "threads", "precision")},
        **{
            "B": B,
            "T": T,
            "vocab": VOCAB,
            "eos": EOS,
            "lr_muon": LR_MUON,
            "lr_adamw": LR_ADAMW,
            "decay": DECAY_FRACTION,
        },
        warmup=WARMUP_STEPS,
        parameters=parameters,
        layers=model.config.num_hidden_layers,
        python=platform.python_version(),
        train_mb=sum(len(text) for _, text in train_files) / 1e6,
        train_files=len(train_files),
        held_mb=sum(len(text) for _, text in held_files) / 1e6,
        held_files=len(held_files),
        tokens=args.steps * B * T / 1e6,
        epochs=args.steps * B / rows.shape[0],
        minutes=seconds / 60,
        rate=args.steps * B * T / seconds,
        nats=nats,
        nats_before=nats_before,
        bits=nats * held_out.shape[0] * T / math.log(2) / held_bytes,
        bytes_per_token=held_bytes / (held_out.shape[0] * T),
        held_tokens=held_out.shape[0] * T,
        memory=memory_tokens(model),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
        samples=card_samples(model, tokenizer, held_files),
    )
    (args.out / "README.md").write_text(card)
    print(card)


if __name__ == "__main__":
    main()
