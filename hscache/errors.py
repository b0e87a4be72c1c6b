"""All errors that hscache reports, grouped by what the user can do about them.

An error carries a stable kebab-case ``code`` from :data:`CODES`, a message that says where the problem is, what was
found and what was expected, and a ``hint`` with the next step. The class decides the exit status of the command line.
Codes are never renamed or removed, because scripts match on them.
"""

from __future__ import annotations

from typing import ClassVar

CODES: dict[str, str] = {
    # config
    "usage": "a command, option or argument that does not exist, is missing, or has a value of the wrong kind",
    "manifest-missing": "the manifest file does not exist",
    "manifest-syntax": "the manifest is not valid TOML",
    "manifest-unknown-key": "the manifest has an unknown key",
    "manifest-value": "a value of the wrong type or out of range",
    "set-syntax": "a --set that is not key=value",
    "taps-invalid": "taps outside the target's layers, unordered or repeated",
    "target-facts-mismatch": "the manifest's declared shape differs from the target's config",
    "codec-unknown": "a codec that this version does not have",
    "convert-nothing": "the conversion would change nothing: the store is already as asked",
    "convert-lossy": "a conversion from one lossy codec to another",
    "export-unsupported": "the export's layout cannot hold what was trained",
    "start-other-shape": "the drafter to start from has another shape than the manifest and the store require",
    "kernel-choice": "a kernel choice or op that does not exist, or that no package implements for this model",
    "server-url": "the address of the serving engine is not a valid URL",
    "server-key": "the API key for the serving engine has characters that an HTTP header cannot carry",
    "server-model": "the serving engine does not have the model, or has several or none and the command names none",
    "reference-sampled": "reference texts are greedy, but sampling was asked for",
    # input
    "corpus-missing": "the corpus does not exist",
    "corpus-format": "the corpus has no known columns, or is not of a known file type",
    "corpus-empty": "no row of the corpus can be used",
    "corpus-exists": "the output corpus exists already",
    "corpus-truncated": "a corpus file ends in the middle of a record",
    "template-missing": "the tokenizer has no chat template",
    "template-invalid": "the chat template cannot be read, or is not valid Jinja",
    "not-a-store": "the path holds no hscache store",
    "store-unfinished": "the store's build has not finished",
    "shard-unknown": "the store's plan has no such shard",
    "sample-unknown": "the store has no such sample",
    "sample-range": "a token range is outside the sample",
    "array-absent": "this store was built without that array",
    "stores-incomparable": "the two stores have no tap or no sample in common",
    "drafter-missing": "the folder holds no drafter checkpoint",
    "drafter-config": "a drafter's config.json lacks a value, has a wrong one, or contradicts itself",
    "drafter-unsupported": "the drafter is of an architecture that hstrain does not implement",
    "drafter-weights": "the names of a drafter's weights do not match its config",
    "drafter-shape": "a weight of a drafter has another shape or type than its config says",
    "drafter-other-target": "the drafter was trained for another target",
    # environment
    "target-missing": "the target directory or hub repository cannot be read",
    "target-config": "the target's config.json lacks what a build needs",
    "target-keys": "the checkpoint lacks weights that the model needs",
    "target-structure": "backbone, decoder layers or head cannot be found in the loaded model",
    "target-head": "the head does not reproduce the model's own logits from the final state",
    "not-finite": "target or drafter computed NaN or infinite values that would have to choose tokens",
    "target-rollback": "a layer of the target cannot be rolled back after a rejected draft",
    "disk-error": "the file system refused an operation",
    "disk-full": "the store does not fit on the disk",
    "device-missing": "this machine has no such device",
    "run-not-shared": "the ranks do not see the same checkpoint, store or drafter to start from",
    "dependency-missing": "an optional package is not installed",
    "kernel-fallback": "an optional kernel would not run on this GPU",
    "kernel-path-broken": "the kernels that ran do not form one complete path",
    "kernel-missing": "a forced kernel cannot be imported",
    "kernel-device": "a forced kernel cannot run on the model's device",
    "kernel-fixed": "another kernel is forced on a part of the model that has only one implementation",
    "kernel-wrong-states": "the installed versions compute wrong states for this model",
    "server-unreachable": "nothing answers at the address of a serving engine, or the connection broke",
    "server-timeout": "the serving engine took too long to answer",
    "server-refused": "the serving engine answered with an HTTP status other than 200",
    "server-other-target": "the serving engine's answers do not fit the target's tokenizer",
    "server-answer": "the serving engine's answer does not follow OpenAI's API, or it completed no prompt",
    # integrity
    "store-converted": "a store made by convert has damage that only its source store can repair",
    "store-damaged": "a store's file is missing, truncated or altered",
    "sample-digest": "a sample's bytes differ from its digest",
    "drafter-damaged": "a drafter's file is unreadable, or its weights are not numbers",
    "export-differs": "the export reads back as another drafter",
    # conflict
    "store-other-manifest": "the store was begun with another manifest, target or corpus",
    "store-other-kernels": "the store's shards were computed by another kernel path",
    "corpus-other-target": "the corpus was made with another target than the one to run over it",
    "target-other": "the target is not the one that the drafter was trained for",
    "record-other": "the file is not the record of this store's verification",
    "store-exists": "the output path holds something that is not this store",
    "export-exists": "the export's path exists already",
    "run-other-manifest": "the training run was begun with another manifest, store or starting drafter",
    "run-in-use": "another process trains in this run's directory",
    "manifest-exists": "the manifest to write exists already",
    "corpus-begun": "the unfinished corpus was begun with other prompts, settings or target, or is being written",
    # training
    "not-a-checkpoint": "the path holds no checkpoint of a training run",
    "checkpoint-damaged": "a checkpoint's file is missing or altered",
    "no-anchors": "no sample has a position where a block can begin",
    "too-many-bad-samples": "more samples than allowed could not be read while training",
    "training-diverged": "loss or gradient became NaN or infinite, or exploded",
    # format
    "format-version": "the store's format is newer than this version reads",
}
"""Code -> meaning. A test checks that every code raised in the sources is listed, and every listed code is raised."""


class HscacheError(Exception):
    """Base of all errors that a user can cause or fix.

    Args:
        code: A key of :data:`CODES`.
        message: Where the problem is, what was found, and what was expected.
        hint: The next command or action, without the word "hint".
    """

    exit_code: ClassVar[int] = 70

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        assert code in CODES, code
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class ConfigError(HscacheError):
    """A manifest, option or argument is wrong: edit it and run again."""

    exit_code = 2


class InputError(HscacheError):
    """The command cannot use this corpus, store or prompt file: give another one."""

    exit_code = 2


class EnvironmentFault(HscacheError):
    """The machine lacks something (disk, weights, a package): change the machine, keep the command."""

    exit_code = 3


class IntegrityError(HscacheError):
    """Stored bytes are not what was committed: run ``hscache verify``."""

    exit_code = 1


class TrainingFault(HscacheError):
    """Training cannot succeed: change the manifest, or look at the samples named."""

    exit_code = 1


class ConflictError(HscacheError):
    """The output belongs to other settings or another process: choose another output, or the settings it has."""

    exit_code = 4


class FormatError(HscacheError):
    """The store has a newer version of the format: upgrade hscache."""

    exit_code = 2
