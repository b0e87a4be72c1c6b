"""``STORE/target/``: the parts of the target that a trainer needs, so that it never opens the checkpoint.

::

    target/
      head.safetensors   embed_tokens.weight, norm.weight, and lm_head.weight unless it is tied to the embedding
      target.json        how logits follow from the head, the embedding's scale, the norm's kind, shapes, digests of
                         these files
      config.json, tokenizer files

The weights are the ones that ran, stored as bf16 where bf16 holds them exactly: a bf16 checkpoint run in float32 is
stored as bf16 again. But an embedding that the target multiplies (``embed_scale``) keeps the type in which it ran, so
that rows times scale, computed in that type, round as they did in the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from hscache.store.durable import publish_directory, write_file
from hscache.store.layout import canonical_json, damaged, json_digest
from hscache.store.records import check_target_record

if TYPE_CHECKING:
    import torch

_HEAD_FILE = "head.safetensors"
_FACTS_FILE = "target.json"
_damaged = partial(damaged, hint="remove target/, then hscache build writes it again")


@dataclass(frozen=True)
class TargetHead:
    """Embedding, head and final norm of the target, on the CPU.

    Attributes:
        embed: [V, H] input embedding.
        lm_head: [V, H] output embedding; the same tensor when tied.
        norm: [H] weight of the final norm.
        facts: ``target.json``: ``head`` (scale, softcap), ``embed_scale``, ``norm_kind``, ``norm_eps``, ``tied``,
            ``shape``.
    """

    embed: torch.Tensor
    lm_head: torch.Tensor
    norm: torch.Tensor
    facts: dict[str, Any]

    @property
    def embed_scale(self) -> float:
        """The factor by which the target multiplies rows of ``embed`` before its first block.

        It is 1 where the target does not multiply them, does something other than multiply, or the store records none.
        """
        return float(self.facts.get("embed_scale") or 1.0)

    def logits(self, final_state: torch.Tensor) -> torch.Tensor:
        """Return the target's logits, float32 [..., V], for states after the final norm, [..., H]."""
        import torch

        scale, softcap = float(self.facts["head"]["scale"]), self.facts["head"]["softcap"]
        logits = torch.nn.functional.linear(final_state.float(), self.lm_head.float()) * scale
        # as a float: a whole number in JSON may be too large for a torch integer
        return logits if softcap is None else torch.tanh(logits / float(softcap)) * float(softcap)


def write_target(
    destination: Path,
    staging: Path,
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
    copies: list[Path],
) -> None:
    """Write ``STORE/target/`` durably; a folder that exists is left as it is.

    Args:
        destination: ``STORE/target``.
        staging: Private directory on the same file system.
        tensors: ``embed``, ``lm_head`` and ``norm`` as they ran.
        facts: JSON-plain facts for ``target.json``.
        copies: Config and tokenizer files of the checkpoint.
    """
    from safetensors.torch import save

    if destination.exists():
        return
    directory = staging / "target"
    directory.mkdir()
    tied = tensors["lm_head"] is tensors["embed"] or tensors["lm_head"].data_ptr() == tensors["embed"].data_ptr()
    scaled = (facts.get("embed_scale") or 1.0) != 1.0
    named = {"embed_tokens.weight": tensors["embed"] if scaled else _narrow(tensors["embed"])}
    named["norm.weight"] = _narrow(tensors["norm"])
    if not tied:
        named["lm_head.weight"] = _narrow(tensors["lm_head"])
    write_file(directory / _HEAD_FILE, save({name: _on_host(tensor) for name, tensor in named.items()}))
    for path in copies:
        write_file(directory / path.name, path.read_bytes())
    files = {path.name: _entry(path) for path in sorted(directory.iterdir())}
    body = {**facts, "tied": tied, "files": files}
    write_file(directory / _FACTS_FILE, canonical_json({**body, "digest": json_digest(body)}))
    publish_directory(directory, destination)


def check_target(directory: Path, *, full: bool) -> dict[str, Any]:
    """Check ``STORE/target/`` against its record and return the facts.

    Args:
        directory: ``STORE/target``.
        full: Compare contents, not only sizes.

    Raises:
        IntegrityError: ``store-damaged``, naming the file.
    """
    path = directory / _FACTS_FILE
    try:
        text = path.read_bytes()
        facts = {key: value for key, value in dict(json.loads(text)).items() if key != "digest"}
        whole = canonical_json({**facts, "digest": json_digest(facts)}) == text
        check_target_record(facts)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"not readable: {error}") from error
    if not whole:
        raise _damaged(path, "content differs from its digest")
    for name, entry in facts["files"].items():
        _check_file(directory / name, entry, full=full)
    return facts


def _check_file(path: Path, entry: dict[str, Any], *, full: bool) -> None:
    try:
        size = path.stat().st_size
        found = _entry(path) if full and size == entry["bytes"] else {**entry, "bytes": size}
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, "missing") from None
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error}") from error
    if found != entry:
        raise _damaged(path, f"differs from its record ({size} bytes, expected {entry['bytes']})")


def load_head(directory: Path) -> TargetHead:
    """Load embedding, head and norm, checked against their digest.

    Args:
        directory: ``STORE/target``.

    Raises:
        IntegrityError: ``store-damaged``.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    facts = check_target(directory, full=False)
    path = directory / _HEAD_FILE
    if _HEAD_FILE not in facts["files"]:
        raise _damaged(path, "not in the record")
    # a wrong weight would affect every loss and every reported number
    _check_file(path, facts["files"][_HEAD_FILE], full=True)
    try:
        tensors = load_file(path)
        embed = tensors["embed_tokens.weight"]
        return TargetHead(embed, embed if facts["tied"] else tensors["lm_head.weight"], tensors["norm.weight"], facts)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise _damaged(path, f"not readable: {error}") from error


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    tensor = _on_host(tensor)
    narrow = tensor.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(tensor.dtype), tensor) else tensor


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def _entry(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return {"bytes": path.stat().st_size, "xxh3_128": digest.hexdigest()}
