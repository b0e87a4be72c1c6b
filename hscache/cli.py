"""The command line of hscache: parse, call, print. Heavy imports stay inside the commands."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hscache.console import command_line, emit_json, new_figure, resumable, run_command, say
from hscache.corpus.formats import Format

if TYPE_CHECKING:
    from hscache.manifest import BuildManifest


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text}: expected a JSON object")
    return value


def _shards(text: str) -> slice:
    try:
        numbers = [int(part) if part else None for part in text.split(":")]
    except ValueError:
        numbers = []
    match numbers:
        case [int(number)]:
            return slice(number, number + 1 or None)
        case [start, stop]:
            return slice(start, stop)
    raise typer.BadParameter(f"{text}: expected a number or A:B")


app = command_line(
    "hscache", "Run a large target model once, keep its hidden states, train speculative-decoding drafters from disk."
)

Manifest = Annotated[Path, typer.Argument(help="Build manifest (TOML).")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override one key: limits.max_tokens=2048.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
StoreArgument = Annotated[Path, typer.Argument(help="Store directory.")]
TargetOption = Annotated[Path, typer.Option("--target", help="Checkpoint directory of the target.")]
Output = Annotated[Path, typer.Option("--out", "-o", help="Corpus to write (parquet).")]

TemplateKwargs = Annotated[
    dict[str, Any] | None,
    typer.Option(
        parser=_json_object,
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'; those of a row win.",
    ),
]
DtypeOption = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option("--dtype", help="Precision of the target; auto: bfloat16 where the device has it in hardware."),
]

Strict = Annotated[bool, typer.Option("--strict", help="Exit with status 1 if any row was rejected.")]

EXIT_FINDINGS = 1


@app.command()
def config(manifest: Manifest, set_: Set = None) -> None:
    """Print the resolved manifest, every default written out.

    Example: hscache config manifests/build/demo.toml --set limits.max_tokens=512
    """
    from hscache.manifest import to_toml

    print(to_toml(_manifest(manifest, set_)), end="")


@app.command()
def tokenize(
    inputs: Annotated[list[Path], typer.Argument(help="Files of training rows; the format is recognised.")],
    target: TargetOption,
    out: Output,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja template to use instead of the tokenizer's.")
    ] = None,
    chat_template_kwargs: TemplateKwargs = None,
    turns: Annotated[
        Literal["auto", "each", "last"],
        typer.Option(help="Answers of a conversation: in one sample where that is exact, a sample each, or the last."),
    ] = "auto",
    drop_cut: Annotated[bool, typer.Option("--drop-cut", help="Reject answers with finish_reason length.")] = False,
    format_: Annotated[Format | None, typer.Option("--format", help="Read every row as this format.")] = None,
    assistant_markers: Annotated[
        tuple[str, str] | None, typer.Option(help="For rows of text: what precedes an answer, and what ends it.")
    ] = None,
    json: Json = False,
) -> None:
    """Turn training rows (chats, prompt+completion, ShareGPT, Alpaca, ...) into a tokenized corpus with loss masks.

    Example: hscache tokenize chats.jsonl --target ~/models/SmolLM2-135M-Instruct -o corpus.parquet
    """
    from hscache.corpus.tokenize import TokenizeOptions, tokenize_files

    options = TokenizeOptions(chat_template, chat_template_kwargs, turns, drop_cut, format_, assistant_markers)
    report = tokenize_files(inputs, target, out, options)
    if json:
        emit_json(report.to_json())
    report.say()
    _exit_if(bool(report.rejected))


@app.command()
def generate(
    context: typer.Context,
    prompts: Annotated[list[Path], typer.Argument(help="JSONL(.gz) or parquet files with prompts.")],
    target: TargetOption,
    out: Output,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt's text as it is: no chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens of a completion.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling threshold.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 32,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first N prompts of each file.")] = None,
    chat_template_kwargs: TemplateKwargs = None,
    dtype: DtypeOption = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cuda:0; default: CUDA if there is one.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Server that runs the target: vLLM, SGLang or llama.cpp.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The server's name of the target; default: its only model.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that the server gets at once.")] = 8,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds to wait for an answer of the server.")] = 600,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Let the target write the completions that a drafter will be trained on; run again to resume after a stop.

    With --endpoint http://localhost:8000 a server runs it; HSCACHE_API_KEY or OPENAI_API_KEY is sent as its key.

    Exit status 1 if the server did not answer a prompt as it must; rows without a usable prompt are only reported.

    Example: hscache generate prompts.jsonl --target ~/models/SmolLM2-135M-Instruct -o corpus.parquet --limit 24
    """
    from hscache.corpus.endpoint import REASONS, Server
    from hscache.corpus.generate import Sampling, generate_corpus

    for name in ("model", "concurrency", "timeout") if endpoint is None else ("batch_size", "dtype", "device"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} needs --endpoint" if endpoint is None else f"{option} and --endpoint: "
                                     "the server decides how the target runs")  # fmt: skip
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    server = None if endpoint is None else Server(endpoint, model, timeout_s=timeout)
    if server is not None:
        say(server.describe())
    with resumable("the completed prompts are kept"):
        report = generate_corpus(
            prompts,
            target,
            out,
            sampling,
            raw=raw,
            batch_size=batch_size,
            limit=limit,
            template_kwargs=chat_template_kwargs,
            dtype=dtype,
            device=device,
            server=server,
            concurrency=concurrency,
        )
    if json:
        emit_json(report.to_json())
    report.say()
    _exit_if(bool(report.rejected if strict else report.rejected.keys() & REASONS.keys()))


@app.command()
def plan(
    manifest: Manifest,
    out: Annotated[Path | None, typer.Option("--out", help="Store whose disk is checked; default: here.")] = None,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Show samples, tokens, exact bytes, files and free disk of a build, without the target's weights.

    Example: hscache plan manifests/build/qwen3.6-27b.toml --set corpus.path=corpus.parquet
    """
    from hscache.build.plan import plan_rows
    from hscache.build.space import plan_json, require_space
    from hscache.corpus.origin import check_origin
    from hscache.corpus.readers import read_corpus
    from hscache.model.facts import resolve_manifest
    from hscache.report import print_plan

    parsed, where = _manifest(manifest, set_), out or Path()
    resolved, directory = resolve_manifest(parsed, download=False)
    corpus = Path(resolved.corpus.path).expanduser()
    if directory is not None:
        check_origin(corpus, directory, accept=True)
    made = plan_rows(read_corpus(corpus), resolved)
    numbers = plan_json(made, resolved, where)
    emit_json(numbers) if json else print_plan(numbers, resolved, where)
    require_space(numbers["least_bytes"], where)


@app.command()
def build(
    manifest: Manifest,
    out: Annotated[Path, typer.Option("--out", help="Store directory; new, or begun with this manifest.")],
    set_: Set = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda:0; default: CUDA if there is one.")] = None,
    fast_digest: Annotated[
        bool, typer.Option("--fast-digest", help="Identify weight files by size and time, not by sha256.")
    ] = False,
    kernels: Annotated[
        Literal["auto", "torch", "fla"],
        typer.Option(help="auto: transformers' choice; torch: the references; fla: no fallback."),
    ] = "auto",
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Let auto run torch references on a GPU.")
    ] = False,
    accept_path: Annotated[
        str | None, typer.Option(help="Id of another kernel path whose shards may stay in this store.")
    ] = None,
    accept_corpus: Annotated[
        bool, typer.Option("--accept-corpus", help="Use a corpus that was made with another target.")
    ] = False,
    strict: Strict = False,
    json: Json = False,
) -> None:
    """Run the target over the corpus and write a store; run again to resume after a stop.

    Start as many builders of one store as there are GPUs, by hand or under torchrun or srun: they share its shards.

    Exit status 1 if the states of a planned sample are unusable; rows that the plan rejected are only reported.

    Example: hscache build manifests/build/demo.toml --out runs/demo/store
    """
    from hscache.build.run import KernelPolicy
    from hscache.build.run import build as run_build
    from hscache.report import print_build

    with resumable("the committed shards are whole"):
        report = run_build(
            _manifest(manifest, set_),
            out,
            device=device,
            fast_digest=fast_digest,
            accept_corpus=accept_corpus,
            kernels=KernelPolicy(kernels, allow_fallback, accept_path),
        )
    if json:
        emit_json(report)
    print_build(report)
    _exit_if(bool(report.rejected if strict else report.capture_rejected))


@app.command()
def verify(
    store: StoreArgument,
    level: Annotated[
        Literal["quick", "full"], typer.Option(help="quick: records and sizes; full: every byte.")
    ] = "full",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Shards to read at a time; default: one for each core, at most 8.")
    ] = None,
    shards: Annotated[
        Any, typer.Option(parser=_shards, metavar="A:B", help="Check only these shards: A to B - 1, or a number.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="File that keeps which shards passed, so that a run that was stopped continues. Their bytes are not "
            "read again while size, times and inode of their files stay: bits lost by the disk since are not found."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Read everything again and start --record anew.")] = False,
    recompute: Annotated[int, typer.Option(min=0, help="Recompute the states of K random samples and compare.")] = 0,
    kernels: Annotated[
        str | None, typer.Option(help="Compare two kernel paths on samples of the store: torch,fla or torch,bound.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="Another store of the same corpus to compare with.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples for --kernels and --against.")] = 8,
    target: Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the manifest's.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda:0; default: CUDA if there is one.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of 1 - cosine per layer, for --kernels.")] = None,
    json: Json = False,
) -> None:
    """Check that a store is complete and correct; if not, list the findings and exit with status 1.

    Example: hscache verify runs/demo/store --recompute 4
    """
    from functools import partial

    from hscache.audit.states import parse_kernels, verify_with_states
    from hscache.audit.verify import verify as run_verify
    from hscache.errors import HscacheError
    from hscache.report import print_verify, show_comparison

    if record is not None and level != "full":
        raise typer.BadParameter("--record keeps full checks: quick ones are repeated in any case")
    if kernels:
        parse_kernels(kernels)  # before the whole store is read
    if plot is not None:
        new_figure(1, 1)
    report = run_verify(store, level, jobs=jobs, shards=shards, record=record, again=again)
    try:
        states = verify_with_states(
            report, recompute=recompute, kernels=kernels, against=against, samples=samples, target=target,
            device=device, show=partial(show_comparison, tables=not json, plot=plot),
        )  # fmt: skip
    except HscacheError as error:
        if report.ok:
            raise
        # the findings say what is damaged
        states = {"not_compared": {"sentence": f"states were not compared: {error.message}"}}
    if json:
        emit_json({**report.to_json(), **states})
    print_verify(report)
    for part in states.values():
        say(part["sentence"])
    _exit_if(not report.ok)


@app.command()
def repair(
    store: StoreArgument,
    target: Annotated[Path | None, typer.Option(help="Checkpoint directory; default: the manifest's.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Corpus; default: the manifest's.")] = None,
    device: Annotated[str | None, typer.Option(help="Such as cuda:0; default: CUDA if there is one.")] = None,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Let auto run torch references on a GPU.")
    ] = False,
    accept_path: Annotated[
        str | None, typer.Option(help="Id of another kernel path whose shards may stay in this store.")
    ] = None,
    shard: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Read and repair only this shard; may be repeated. Missing shards are built."),
    ] = None,
    json: Json = False,
) -> None:
    """Verify a store and rebuild only what is damaged.

    Example: hscache repair runs/demo/store
    """
    from hscache.build.repair import repair as run_repair
    from hscache.build.run import KernelPolicy
    from hscache.report import print_repair

    kernels = KernelPolicy("auto", allow_fallback, accept_path)
    with resumable("shards not rebuilt yet are unchanged"):
        report = run_repair(store, target=target, corpus=corpus, device=device, kernels=kernels, shards=shard or ())
    if json:
        emit_json(report)
    print_repair(report)
    _exit_if(not report.ok)


@app.command()
def convert(
    store: StoreArgument,
    out: Annotated[Path, typer.Option("--out", help="Store directory; new, or begun by this conversion.")],
    codec: Annotated[
        Literal["raw", "lz4", "zstd", "int8", "int4"] | None, typer.Option(help="Codec of the new store.")
    ] = None,
    taps: Annotated[str | None, typer.Option(help="Decoder blocks to keep: 1,8,14.")] = None,
    no_final_state: Annotated[bool, typer.Option("--no-final-state", help="Drop the final state.")] = False,
    topk: Annotated[int | None, typer.Option(min=0, help="Log-probabilities to keep; 0 drops the logits.")] = None,
    json: Json = False,
) -> None:
    """Rewrite a store without its target: another codec, fewer taps or logits; run again to resume after a stop.

    Example: hscache convert runs/demo/store --out runs/demo/int8 --codec int8
    """
    from hscache.build.convert import Change
    from hscache.build.convert import convert as run_convert
    from hscache.report import print_convert

    with resumable("the committed shards are whole"):
        report = run_convert(store, out, Change(codec, _numbers(taps), not no_final_state, topk))
    if json:
        emit_json(report)
    print_convert(report)


@app.command()
def info(store: StoreArgument, json: Json = False) -> None:
    """Show what a store is: target, taps, corpus, counts, sizes, provenance.

    Example: hscache info runs/demo/store
    """
    from hscache.report import print_info
    from hscache.store.info import store_info

    facts = store_info(store)
    emit_json(facts) if json else print_info(facts)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Corpus (file, folder or pattern) or store.")],
    target: Annotated[
        Path | None, typer.Option("--target", help="Checkpoint directory whose tokenizer writes the text.")
    ] = None,
    sample: Annotated[
        str | None, typer.Option(help="Print the text of this sample, supervised tokens between [[ and ]].")
    ] = None,
    json: Json = False,
) -> None:
    """Show what a corpus or a store teaches: lengths, boundaries, ends, repeats, duplicates; exit status 1 on findings.

    Example: hscache inspect runs/demo/corpus.parquet --target tools/targets/tiny_hybrid
    """
    from hscache.audit.inspect import inspect_path, sample_text

    if sample is not None:
        print(sample_text(path, sample, target))
        return
    found = inspect_path(path, target)
    if json:
        emit_json(found)
    else:
        from hscache.report import print_inspection

        print_inspection(found, str(path))
    _exit_if(bool(found["findings"]))


@app.command()
def doctor(
    target: Annotated[
        str | None, typer.Option("--target", help="Checkpoint directory (config.json suffices) or cached hub id.")
    ] = None,
    json: Json = False,
) -> None:
    """Show which kernel would run for each op of the target on this machine, and how to install what is missing.

    Exit status 1 when a build here would fall back. Example: hscache doctor --target ~/models/Qwen3.6-27B
    """
    from hscache.audit.doctor import diagnose, render
    from hscache.manifest import TargetSpec
    from hscache.model.facts import resolve_path

    directory = None
    if target is not None:
        directory = resolve_path(TargetSpec(path=target), download=False) or Path(target).expanduser()
    diagnosis = diagnose(directory)
    emit_json(diagnosis.to_json()) if json else print(render(diagnosis), end="")
    _exit_if(not diagnosis.ok)


def _manifest(path: Path, overrides: list[str] | None) -> BuildManifest:
    from hscache.manifest import load_manifest

    return load_manifest(path, overrides or ())


def _numbers(text: str | None) -> tuple[int, ...] | None:
    from hscache.errors import ConfigError

    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError("taps-invalid", f"--taps {text!r}: not a list of numbers", hint="--taps 1,8,14") from None


def _exit_if(found: bool) -> None:
    if found:
        raise typer.Exit(EXIT_FINDINGS)


def main() -> None:
    """Run the command line; an error prints one message and a hint, and sets the exit status."""
    run_command(app)
