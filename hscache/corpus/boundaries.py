"""Tokens of a text, and where a prefix of the text ends among them.

Whether a prefix's own tokens are a prefix of the text's tokens could be told by tokenizing every prefix; a conversation
of n answers would be tokenized n times. Tokenizers split a text at added tokens such as ``<|im_start|>`` before all
else, so it is enough to tokenize the prefix from its last added token on. These pieces are short and repeat in every
row: most of them are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_MOST_BACK = 64
"""Tokens to look back for an added token before the whole prefix is tokenized."""


@dataclass(frozen=True)
class TextTokens:
    """A tokenized text.

    Attributes:
        text: The text.
        special: Whether the tokenizer added its own tokens, such as BOS.
        ids: Token ids.
        encoding: Knows the characters of each token; None for a tokenizer without a Rust backend.
    """

    text: str
    special: bool
    ids: list[int]
    encoding: Any = None


class Encoder:
    """A tokenizer that finds boundaries.

    Args:
        tokenizer: The target's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # a tokenizer.json may ask for either; a call of the tokenizer would turn it off
            self._backend.no_truncation()
            self._backend.no_padding()
        self._added = set(tokenizer.get_added_vocab().values())
        bos = tokenizer.bos_token
        adds_bos = bos is not None and list(tokenizer("")["input_ids"])[:1] == [tokenizer.bos_token_id]
        self._bos = bos if adds_bos else None
        self._piece = lru_cache(4096)(self._piece_ids)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[TextTokens]:
        """Tokenize texts.

        Args:
            texts: Texts.
            special: Let the tokenizer add its own tokens. A text that begins with BOS gets no second one.
        """
        asked = [special and not self._has_bos(text) for text in texts]
        if self._backend is None:
            return [
                TextTokens(text, add, list(self._tokenizer(text, add_special_tokens=add)["input_ids"]))
                for text, add in zip(texts, asked, strict=True)
            ]
        made: dict[int, TextTokens] = {}
        for add in (False, True):
            which = [i for i, one in enumerate(asked) if one == add]
            encodings = self._backend.encode_batch([texts[i] for i in which], add_special_tokens=add)
            made |= {i: TextTokens(texts[i], add, e.ids, e) for i, e in zip(which, encodings, strict=True)}
        return [made[i] for i in range(len(texts))]

    def boundary(self, tokens: TextTokens, end: int) -> int | None:
        """Return how many tokens the first ``end`` characters have.

        Returns:
            None when the tokens of these characters alone are not a prefix of the text's tokens.
        """
        first = self._added_before(tokens, end)
        if first is None:
            ids = self.encode([tokens.text[:end]], special=tokens.special)[0].ids
            return len(ids) if tokens.ids[: len(ids)] == ids else None
        piece = self._piece(tokens.text[tokens.encoding.token_to_chars(first)[0] : end])
        stop = first + len(piece)
        return stop if tuple(tokens.ids[first:stop]) == piece else None

    def ends_by(self, tokens: TextTokens, number: int, end: int) -> bool:
        """Return whether a token ends within the first ``end`` characters."""
        if tokens.encoding is not None:
            chars = tokens.encoding.token_to_chars(number)
            return chars is not None and chars[1] <= end
        return number < len(self.encode([tokens.text[:end]], special=tokens.special)[0].ids)

    def _has_bos(self, text: str) -> bool:
        return self._bos is not None and text.startswith(self._bos)

    def _added_before(self, tokens: TextTokens, end: int) -> int | None:
        """Return the last added token that begins before a character, if it is near."""
        if tokens.encoding is None:
            return None
        # a tokenizer may trim spaces from the ranges of its tokens: look for the nearest character that has a token
        near = (tokens.encoding.char_to_token(at) for at in range(end - 1, max(end - 8, -1), -1))
        last = next((number for number in near if number is not None), None)
        if last is None:
            return None
        added = (i for i in range(last, max(last - _MOST_BACK, -1), -1) if tokens.ids[i] in self._added)
        first = next(added, None)
        # a token that the tokenizer put there, such as BOS, has no characters
        return None if first is None or tokens.encoding.token_to_chars(first) is None else first

    def _piece_ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode([text], special=False)[0].ids)
