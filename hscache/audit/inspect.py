"""What a corpus or a store teaches: lengths, masks, the text around each boundary, repeats, duplicates, cut answers.

A person checks first what stands before and after each supervised run. A corpus of one chat template has the same
tokens there in every row, and an end token at the end of each run: whatever departs from that is a finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hscache.corpus.chat import is_cut
from hscache.corpus.readers import read_corpus
from hscache.corpus.tokenize import load_tokenizer
from hscache.errors import InputError
from hscache.model.facts import end_token_ids, tokenizer_files
from hscache.rows import Reject, Sample, count_supervised
from hscache.store.layout import StorePaths
from hscache.store.reader import Store

FINDINGS: dict[str, str] = {
    "boundary": "runs begin after other tokens than most",
    "begins-special": "runs begin with a special token, such as the one before a role",
    "unended": "runs end without an end token, and no finish_reason says that the answer was cut off",
    "cut": "answers were cut off at a limit of length",
    "repeats": "supervised tokens end a sequence of four that their sample had before",
    "duplicates": "samples have the ids and mask of an earlier one",
    "rejected": "rows cannot be used",
}
"""What a verdict names -> meaning."""
_MOST_REPEATS = 0.25
_MOST_CUT = 0.05
_MOST_DUPLICATES = 0.01
_MOST_OTHER = 0.01
_USUAL = 0.5
"""Share of the runs that begin after the same token, from which on a corpus is taken for one of chats."""
_SHOWN = 5
_PERCENTILES = {"least": 0, "median": 50, "p95": 95, "most": 100}


def runs_of(loss_mask: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """Return begin and end of each supervised run."""
    edges = np.flatnonzero(np.diff(loss_mask, prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def store_samples(store: Store) -> Iterator[Sample]:
    """Yield ids and masks of a store's samples, without their states."""
    for i, sample_id in enumerate(store.sample_ids):
        yield Sample(i, sample_id, store.input_ids(i), store.loss_mask(i), store.tags[i])


def samples_of(path: Path) -> Iterator[Sample | Reject]:
    """Yield the rows of a corpus, or the samples of a store.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-truncated``.
    """
    if StorePaths(path).manifest.exists():
        yield from store_samples(Store(path))
    else:
        yield from read_corpus(path)


def inspect_path(path: Path, target: Path | None = None) -> dict[str, Any]:
    """Return :func:`inspect` of a corpus or a store.

    Args:
        path: File, folder or pattern of a corpus, or a store.
        target: Checkpoint directory whose tokenizer writes the text; None for the store's copy, or ids as numbers.

    Raises:
        InputError: ``corpus-missing``, ``corpus-format``, ``corpus-truncated``, ``corpus-empty``.
        EnvironmentFault: ``target-missing``, ``target-config``.
    """
    return inspect(samples_of(path), *_tokenizer(path, target))


def sample_text(path: Path, sample_id: str, target: Path | None = None) -> str:
    """Return the text of one sample, its supervised runs between ``[[`` and ``]]``.

    Raises:
        InputError: ``sample-unknown``, and those of :func:`inspect_path`.
    """
    for row in samples_of(path):
        if isinstance(row, Sample) and (row.sample_id or row.content.hex()) == sample_id:
            return marked_text(row, _tokenizer(path, target)[0])
    raise InputError("sample-unknown", f"{path}: has no sample {sample_id!r}")


def _tokenizer(path: Path, target: Path | None) -> tuple[Any, set[int]]:
    if target is None and tokenizer_files(StorePaths(path).target):
        target = StorePaths(path).target
    if target is None:
        return None, set()
    tokenizer = load_tokenizer(target)
    return tokenizer, end_token_ids(target.expanduser(), tokenizer)


def inspect(
    rows: Iterable[Sample | Reject], tokenizer: Any = None, ends: AbstractSet[int] = frozenset()
) -> dict[str, Any]:
    """Return statistics of a corpus, and a verdict.

    Args:
        rows: Its rows.
        tokenizer: Writes tokens as text; None leaves them ids.
        ends: Tokens at which a serving engine stops; empty leaves ends unjudged.

    Returns:
        JSON-plain: ``samples``, ``tokens``, ``supervised``, ``lengths``, ``runs``, ``before``, ``after`` and ``last``
        (text -> runs, the most frequent), ``repeats``, ``cut``, ``duplicates``, ``rejected``, ``tags``, and
        ``findings``, a list of ``{code, detail}``.

    Raises:
        InputError: ``corpus-empty``.
    """
    text = _names(tokenizer)
    added = set() if tokenizer is None else set(tokenizer.get_added_vocab().values()) - _opening(tokenizer)
    lengths: list[int] = []
    before: Counter[tuple[int, ...]] = Counter()
    after: Counter[tuple[int, ...]] = Counter()
    last: Counter[int] = Counter()
    tags: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    seen: set[bytes] = set()
    sums: Counter[str] = Counter()
    for row in rows:
        if isinstance(row, Reject):
            rejected[row.reason] += 1
            continue
        ids, mask = row.input_ids, row.loss_mask
        lengths.append(len(ids))
        sums["supervised"] += count_supervised(mask)
        sums["repeats"] += row.repeats
        sums["duplicates"] += row.content in seen
        seen.add(row.content)
        cut = is_cut(row.finish_reason)
        sums["cut"] += cut
        if row.tag:
            tags[row.tag] += 1
        runs = runs_of(mask)
        for number, (start, stop) in enumerate(runs):
            before[tuple(ids[max(start - 3, 0) : start].tolist())] += 1
            after[tuple(ids[start : start + 2].tolist())] += 1
            last[int(ids[stop - 1])] += 1
            sums["begins-special"] += int(ids[start]) in added - ends
            sums["unended"] += bool(ends) and int(ids[stop - 1]) not in ends and not (cut and number == len(runs) - 1)
    if not lengths:
        raise InputError("corpus-empty", f"no row can be used ({dict(rejected)})")
    n_runs = sum(last.values())
    usual = Counter[int]()
    for tokens, n in before.items():
        usual[tokens[-1] if tokens else -1] += n
    (_, most), *_ = usual.most_common(1) or [(0, 0)]
    sums["boundary"] = n_runs - most if most >= _USUAL * n_runs else 0
    limits = {
        "boundary": (n_runs, _MOST_OTHER), "begins-special": (n_runs, _MOST_OTHER), "unended": (n_runs, _MOST_OTHER),
        "cut": (len(lengths), _MOST_CUT), "repeats": (sums["supervised"], _MOST_REPEATS),
        "duplicates": (len(lengths), _MOST_DUPLICATES), "rejected": (len(lengths) + rejected.total(), 0.0),
    }  # fmt: skip
    sums["rejected"] = rejected.total()
    findings = [
        {"code": code, "detail": f"{sums[code]:,} of {of:,} {FINDINGS[code]}"}
        for code, (of, most_share) in limits.items()
        if of and sums[code] / of > most_share
    ]
    return {
        "samples": len(lengths),
        "tokens": sum(lengths),
        "supervised": sums["supervised"],
        "lengths": {name: int(np.percentile(lengths, at)) for name, at in _PERCENTILES.items()},
        "runs": n_runs,
        "before": _top(before, text),
        "after": _top(after, text),
        "last": _top(Counter({(token,): n for token, n in last.items()}), text),
        "repeats": sums["repeats"] / max(sums["supervised"], 1),
        "cut": sums["cut"],
        "duplicates": sums["duplicates"],
        "rejected": dict(rejected),
        "tags": dict(tags.most_common()),
        "findings": findings,
    }


def marked_text(sample: Sample, tokenizer: Any = None) -> str:
    """Return a sample's text with its supervised runs between ``[[`` and ``]]``."""
    text, out, at, ids = _names(tokenizer), "", 0, sample.input_ids.tolist()
    for start, stop in runs_of(sample.loss_mask):
        out += text(ids[at:start]) + "[[" + text(ids[start:stop]) + "]]"
        at = stop
    return out + text(ids[at:])


def _names(tokenizer: Any) -> Callable[[list[int]], str]:
    if tokenizer is None:
        return lambda ids: " ".join(map(str, ids))
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _opening(tokenizer: Any) -> set[int]:
    """Return special tokens that a target may well write first, such as the one before its thoughts."""
    return {token for name, token in tokenizer.get_added_vocab().items() if "think" in name or "tool_call" in name}


def _top(found: Counter[tuple[int, ...]], text: Callable[[list[int]], str]) -> dict[str, int]:
    return {text(list(tokens)): n for tokens, n in found.most_common(_SHOWN)}
