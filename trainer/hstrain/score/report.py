"""``hstrain eval``: compare checkpoints on held-out samples of one or more stores, as tables and JSON.

A checkpoint records which share of the samples its training held out, and the trainings of the drafters that it started
from recorded theirs. Since a hash of its id decides whether a sample is held out, all of these trainings held out the
samples of the smallest share. The test samples are those with the lowest hashes: if every training kept some, those of
the smallest test share were not even validated on.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import hscache
from hscache.console import Column, counted, figures, say, table
from hscache.device import pick_device
from hscache.errors import HscacheError, InputError
from hscache.store.head import load_head
from hscache.store.layout import StorePaths
from hscache.store.reader import Store
from hstrain.data.packs import split
from hstrain.drafter.attention import Backend
from hstrain.drafter.losses import Head
from hstrain.drafter.model import Drafter
from hstrain.exchange.importer import CONFIG_FILE, check_store, open_drafter, warn_of_other_target
from hstrain.run.checkpoint import load_drafter, weights_digest
from hstrain.score.baselines import baseline_scores
from hstrain.score.ddtree import SIZES
from hstrain.score.walk import (
    Cost,
    SampleScore,
    by_tag,
    difference,
    score_store,
    speed_by_length,
    summarise,
)

Part = Literal["test", "validation", "held-out"]
"""Samples that are scored: those that no validation reads, those that it may read, or both."""
POSITIONS = (0, 16, 64, 256, 1024)
"""Lower bounds of the bins by the place of an anchor in its sample, counted in anchors."""


def evaluate(
    checkpoints: Sequence[Path],
    stores: Sequence[Path],
    *,
    held_out: float | None = None,
    part: Part | None = None,
    samples: int | None = None,
    precision: str = "fp32",
    device: str | None = None,
    cost: Cost | None = None,
) -> dict[str, Any]:
    """Score checkpoints on the held-out samples of stores.

    Args:
        checkpoints: As in :func:`hstrain.exchange.importer.open_drafter`.
        stores: Complete stores with the drafters' taps.
        held_out: Share of the samples to hold out; None for the smallest share that a checkpoint, or a drafter that it
            started from, was trained with; 1 for every sample.
        part: Which of the samples held out are scored; None for ``test`` if ``held_out`` is None and all trainings kept
            such samples, else ``held-out``.
        samples: Score only the first of these samples, this many; None for all.
        precision: ``fp32`` or ``bf16``.
        device: Such as ``cuda:0``; None for CUDA if there is one.
        cost: Cost of a step, from which speeds are predicted; None for no predictions.

    Returns:
        JSON-plain: ``held_out``, ``part``, ``precision``, and ``rows``, one for each checkpoint and store, as
        :func:`hstrain.score.walk.summarise`, with ``weights``, the digest of the drafter's; ``by_tag``;
        ``by_position``; ``trained_on``, the number of samples that it, or a drafter that it started from, is known to
        have been trained on, None if that is unknown; ``test``, the figures over the samples that did not choose its
        checkpoint, None if no such choice is known; and ``less_first``, the :func:`hstrain.score.walk.difference` from
        the first row, None in the first row. And ``baselines``: the same figures, without trees, of drafting without a
        model (:mod:`hstrain.score.baselines`) on the samples of each corpus; ``cost`` as given, and with it in each row
        ``speed``: for ``all`` samples and for each tag the predictions of :func:`hstrain.score.walk.speed_by_length`.

    Raises:
        HscacheError: For errors that a user can fix.
    """
    where = pick_device(device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    pasts = [_pasts(path) for path in checkpoints]
    shares = _shares(checkpoints, pasts, held_out)
    part = part or ("test" if shares.test and held_out is None else "held-out")
    rows: list[dict[str, Any]] = []
    baselines: list[dict[str, Any]] = []
    corpora: list[dict[str, Any]] = []
    first: list[SampleScore] | None = None
    block_size = 0
    for store_path in stores:
        store, target = hscache.open(store_path), load_head(StorePaths(store_path).target)
        head = Head(target, where, dtype)
        for path, past in zip(checkpoints, pasts, strict=True):
            drafter, facts = open_drafter(path, target)
            check_store(path, drafter.config, store)
            warn_of_other_target(path, facts, store)
            numbers = shares.numbers(store, part)[:samples]
            say(f"{path} on {store_path}: {counted(len(numbers), 'sample')}")
            weights = weights_digest(drafter.state_dict())
            scores = _score(drafter, head, store, numbers)
            found = {**summarise(scores), "by_tag": by_tag(scores), "by_position": _by_position(scores)}
            if cost is not None:
                found["speed"] = _speeds(scores, cost)
            found["trained_on"] = _trained_on(store, numbers, past)
            chosen = _chosen_on(store, past)
            rest = [score for score, number in zip(scores, numbers, strict=True) if number not in chosen]
            found["test"] = summarise(rest) if chosen else None
            found["less_first"] = None if first is None else difference(scores, first)
            first = first or scores
            rows.append(
                {
                    "checkpoint": str(path),
                    "resolved": facts["path"],
                    "store": str(store_path),
                    "weights": weights,
                    **found,
                }
            )
            block_size = max(block_size, drafter.config.block_size)
        if store.manifest["corpus"] in corpora:  # the same text once more
            continue
        corpora.append(store.manifest["corpus"])
        training = split(store, shares.held_out - shares.test, shares.test)[0] if shares.held_out < 1 else []
        drafted = baseline_scores(store, training, shares.numbers(store, part)[:samples], block_size)
        for name, scores in drafted.items():
            found = {**summarise(scores), "by_tag": by_tag(scores), "by_position": _by_position(scores)}
            found["less_first"] = difference(scores, first or [])
            baselines.append({"baseline": name, "store": str(store_path), **found})
    costs = None if cost is None else asdict(cost)
    found = {"held_out": shares.held_out, "part": part, "precision": precision}
    return {**found, "rows": rows, "baselines": baselines, "cost": costs}


def _speeds(scores: Sequence[SampleScore], cost: Cost) -> dict[str, list[float]]:
    tags = sorted({score.tag for score in scores if score.tag and len(score.anchors_N)})
    found = {tag: speed_by_length([score for score in scores if score.tag == tag], cost) for tag in tags}
    return {"all": speed_by_length(scores, cost), **(found if len(tags) > 1 else {})}


def _score(drafter: Drafter, head: Head, store: Store, numbers: Sequence[int]) -> list[SampleScore]:
    """Score samples on the head's device and in its precision; at least one of them must have an anchor."""
    device, dtype = head.lm_head_VH.device, head.lm_head_VH.dtype
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        backend: Backend = "flex" if device.type == "cuda" else "sdpa"
        scores = score_store(drafter.to(device), head, store, numbers, backend=backend, trees=SIZES, sampling=True)
    if not any(len(score.anchors_N) for score in scores):
        raise InputError(
            "sample-unknown",
            f"{store.path}: none of the {len(scores)} samples has two supervised tokens in a row to score",
            hint="give a larger --held-out or --samples",
        )
    return scores


def print_evaluation(found: dict[str, Any]) -> None:
    """Print what :func:`evaluate` returned as tables."""
    rows, drafters = [*found["rows"], *found["baselines"]], found["rows"]
    several = len({row["store"] for row in rows}) > 1
    names = [row.get("checkpoint") or row["baseline"] for row in rows]
    names = [f"{name} on {row['store']}" if several else name for name, row in zip(names, rows, strict=True)]
    known = found["held_out"] < 1 and not any(row["trained_on"] for row in drafters)
    what = counted(rows[0]["samples"], f"{found['part']} sample" if known else "sample")
    forms = {"tau": ".3f", "95 %": ">", "per response": ".3f", "tau_all": ".3f", "streak": ".3f", "full block": ".1%"}
    cells = [
        [
            name, row["tau"], "{:.2f} .. {:.2f}".format(*row["tau_interval"]), row["tau_per_response"], row["tau_all"],
            row["streak"], row["full_block"], *(row["ddtree"].get(str(n)) for n in SIZES),
        ]
        for name, row in zip(names, rows, strict=True)
    ]  # fmt: skip
    table(
        f"{what}, {counted(rows[0]['anchors'], 'anchor')}, {found['precision']}",
        ["drafter", *forms.items(), *((f"DDTree-{n}", ".3f") for n in SIZES)],
        cells,
    )
    for name, row in zip(names, drafters, strict=False):
        if row["trained_on"]:
            print(f"{name}: it was trained on {row['trained_on']} of these samples, so its figures are too high")
        elif row["trained_on"] is None:
            print(f"{name}: it is unknown whether it, or a drafter it started from, was trained on these samples")
        if (test := row["test"]) is not None and (n := row["samples"] - test["samples"]):
            others = "no other was scored"
            if test["samples"]:
                others = f"on the other {test['samples']}, tau is {test['tau']:.3f}"
                others += " ({:.2f} .. {:.2f})".format(*test["tau_interval"])
            print(f"{name}: validation on {n} of these samples chose its checkpoint; {others}")
    apart = [[name, *_apart(row["less_first"])] for name, row in zip(names, rows, strict=True)]
    if any(row["less_first"] for row in rows):
        forms = {"tau": "+.3f", "95 %": ">", "samples": "d", "other walks": "d"}
        table("tau less that of the first row, on the same samples", ["drafter", *forms.items()], apart[1:])

    def print_by(title: str, keys: Sequence[object], values: list[dict[Any, float]]) -> None:
        body = [[name, *map(by_key.get, keys)] for name, by_key in zip(names, values, strict=True)]
        table(title, ["drafter", *((str(key), ".3f") for key in keys)], body)

    slots = range(1, max(len(row["acc"]) for row in rows) + 1)
    print_by("accuracy by slot", slots, [dict(enumerate(row["acc"], 1)) for row in rows])
    given = [dict(enumerate(row["acc_after_right"], 1)) for row in rows]
    print_by("accuracy by slot where all slots before it are right", slots, given)
    if sampled := [(name, row["sampling"]) for name, row in zip(names, drafters, strict=False) if row["sampling"]]:
        by_slot = [(name, dict(enumerate(bounds["acc"], 1)), bounds["tau_all"]) for name, bounds in sampled]
        body = [[name, _span(tau_all), *(_span(acc.get(k)) for k in slots)] for name, acc, tau_all in by_slot]
        columns: list[Column] = ["drafter", ("tau_all", ">"), *((str(k), ">") for k in slots)]
        table("expected when both sample at temperature 1: tau_all, and acceptance by slot", columns, body)
    if cost := found["cost"]:
        body = [
            [f"{name}, {tag}", *speeds, max(range(len(speeds)), key=speeds.__getitem__) + 1]
            for name, row in zip(names, drafters, strict=False)
            for tag, speeds in row["speed"].items()
        ]
        title = "predicted speed by drafted tokens, in times that without a drafter"
        terms = figures({name: value for name, value in cost.items() if value is not None}, "g") + " tokens"
        table(f"{title} ({terms})", ["drafter", *((str(k), ".2f") for k in slots), ("best", "d")], body)
    titles = {"by_tag": "tau by tag", "by_position": "tau_all by place of the anchor in the answer"}
    for kind, title in titles.items():
        keys = list(dict.fromkeys(key for row in rows for key in row[kind]))
        if len(keys) > 1:
            print_by(title, keys, [row[kind] for row in rows])


def _span(bounds: Sequence[float] | None) -> str | None:
    """Return bounds as text: one number where they agree to two places."""
    if bounds is None:
        return None
    low, high = (f"{bound:.2f}" for bound in bounds)
    return low if low == high else f"{low} .. {high}"


@dataclass(frozen=True)
class _Past:
    """A training that led to a drafter.

    Attributes:
        validation: Share of the samples that it held out to validate on.
        test: Share of the samples that it held out and did not read.
        corpus: The store's record of its corpus.
        validated: Most samples that it validated on, which chose the checkpoint.
    """

    validation: float
    test: float
    corpus: object
    validated: int

    @property
    def held_out(self) -> float:
        """Share of the samples that it was not trained on."""
        return self.validation + self.test

    def split(self, store: Store) -> tuple[list[int], list[int], list[int]]:
        """Return which samples of a store it trained on, held out to validate on, and did not read."""
        return split(store, self.validation, self.test)


@dataclass(frozen=True)
class _Shares:
    """Which samples several trainings held out.

    Attributes:
        held_out: Share of the samples that all of them held out, or the share that is asked for.
        test: Share of the samples that none of them read.
        tests: Share of the samples among which all that some of them did not read are.
    """

    held_out: float
    test: float
    tests: float

    def numbers(self, store: Store, part: Part) -> list[int]:
        """Return the samples of a part.

        Raises:
            InputError: ``sample-unknown`` if there are none.
        """
        if part == "validation":
            found = split(store, max(self.held_out - self.tests, 0.0), self.tests)[1]
        elif self.held_out >= 1 and part == "held-out":
            found = list(range(len(store)))
        else:
            _, validation, test = split(store, self.held_out - self.test, self.test)
            found = test if part == "test" else sorted(validation + test)
        if found:
            return found
        raise InputError(
            "sample-unknown",
            f"{store.path}: no {part} sample: of all, {self.held_out:g} are held out, {self.test:g} for the test",
            hint="give another --part, or --held-out; the drafter may have been trained on the samples that are then "
            "scored",
        )


def smallest_share(checkpoints: Sequence[Path]) -> float:
    """Return the share of samples that all known trainings of the checkpoints held out.

    Args:
        checkpoints: As in :func:`hstrain.exchange.importer.open_drafter`.

    Raises:
        InputError: ``not-a-checkpoint`` if none of them records a training.
        IntegrityError: ``checkpoint-damaged``.
    """
    return _shares(checkpoints, [_pasts(path) for path in checkpoints], None).held_out


def _shares(checkpoints: Sequence[Path], pasts: Sequence[Sequence[_Past | None]], held_out: float | None) -> _Shares:
    known = [one for past in pasts for one in past if one is not None]
    if not known and held_out is None:
        raise InputError(
            "not-a-checkpoint",
            f"{', '.join(map(str, checkpoints))}: there is no record of which samples it was trained on",
            hint="give --held-out: the share to hold out, or 1 to score every sample",
        )
    share = min(one.held_out for one in known) if held_out is None else held_out
    tests = [one.test for one in known] or [0.0]
    return _Shares(share, min(*tests, share), max(tests))


def _pasts(path: Path) -> list[_Past | None]:
    """Return the trainings that led to a checkpoint, its own first; None stands for an unknown one."""
    if (path / CONFIG_FILE).exists():
        return [None]
    _, facts = load_drafter(path)
    pasts: list[_Past | None] = [_past(facts)]
    start = facts["provenance"].get("start")
    while start:  # a run records the path of its starting drafter, and a digest of the weights
        try:
            drafter, before = load_drafter(Path(start["path"]))
            same = weights_digest(drafter.state_dict()) == start["weights"]
        except HscacheError:
            same = False
        pasts.append(_past(before) if same else None)
        start = start.get("start")
    return pasts


def _past(facts: dict[str, Any]) -> _Past:
    provenance = facts["provenance"]
    manifest = provenance["manifest"]
    data, validated = manifest["data"], int(manifest["run"]["validation_samples"])
    test = float(data.get("test", 0.0))  # runs from before it existed lack it
    return _Past(float(data["validation"]), test, provenance["store"]["corpus"], validated)


def _trained_on(store: Store, numbers: Sequence[int], pasts: Sequence[_Past | None]) -> int | None:
    """Return how many of these samples are known to have been trained on; None if none is known but some may be."""
    trained: set[int] = set()
    known = True
    for past in pasts:
        theirs = set(numbers) if past is None else set(numbers) & set(past.split(store)[0])
        if past is not None and past.corpus == store.manifest["corpus"]:
            trained |= theirs
        elif theirs:
            known = False
    return len(trained) or (0 if known else None)


def _chosen_on(store: Store, pasts: Sequence[_Past | None]) -> set[int]:
    """Return the samples on which a known training of a drafter chose its checkpoint."""
    known = [past for past in pasts if past is not None and past.corpus == store.manifest["corpus"]]
    return {number for past in known for number in past.split(store)[1][: past.validated]}


def _by_position(scores: Sequence[SampleScore]) -> dict[str, float]:
    place = np.concatenate([np.arange(len(score.anchors_N)) for score in scores])
    yields = np.concatenate([np.minimum(score.streak + 1, score.left_N) for score in scores])
    bins = np.searchsorted(POSITIONS, place, side="right") - 1
    names = [f"{low} .. {high - 1}" for low, high in itertools.pairwise(POSITIONS)] + [f"{POSITIONS[-1]} .."]
    return {name: float(yields[bins == b].mean()) for b, name in enumerate(names) if (bins == b).any()}


def _apart(less: dict[str, Any] | None) -> list[object]:
    if less is None:
        return [None, None, 0, None]
    return [less["tau"], "{:+.3f} .. {:+.3f}".format(*less["interval"]), less["samples"], less["other_walks"]]
