"""Chat templates as released models have them, and a tokenizer whose tokens are characters and special tokens."""

from __future__ import annotations

import string
from pathlib import Path

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|begin|>", "<|header|>", "<|/header|>", "<|eot|>", "<s>",
    "<tool_call>", "</tool_call>",
]  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}"
    "{% generation %}assistant\n{{ m.content }}{% endgeneration %}<|im_end|>\n"  # on purpose too early, and too short
    "{% else %}{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }};{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}</tool_call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""Thoughts of turns before the last user message are left out; arguments must be a mapping."""
LLAMA = (
    "<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
"""No generation prompt; the tokenizer would add BOS to other texts."""
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", None),
    "marked": (MARKED_CHATML, "<|im_end|>", None),
    "qwen": (QWEN, "<|im_end|>", None),
    "llama": (LLAMA, "<|eot|>", "<|begin|>"),
    "bos": (MISTRAL, "<|im_end|>", "<s>"),
}
"""Name -> template, end token, BOS that the tokenizer adds."""


def make_tokenizer(folder: Path, name: str) -> Path:
    """Save a tokenizer with one of the templates; every character that is no special token is a token."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    template, end, bos = TEMPLATES[name]
    pieces = ["<unk>", *SPECIAL, *string.printable]
    made = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.add_special_tokens(SPECIAL)
    if bos is not None:
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, pieces.index(bos))]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token=end, bos_token=bos, chat_template=template
    )
    fast.save_pretrained(str(folder))
    return folder
