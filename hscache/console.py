"""What the user sees while a command works: log lines and progress on stderr; stdout is for data alone.

A terminal gets one tqdm line that is redrawn; anything else (a log file, CI) gets a plain line every few seconds, so
that a build's log can be read afterwards. Colour follows rich, which honours ``NO_COLOR``.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from hscache.errors import ConfigError, EnvironmentFault, HscacheError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typer import Typer

_EXIT_BUG = 70

Column: TypeAlias = str | tuple[str, str]
"""A column of a table: its name, or the name and format of numbers, such as ``("tau", ".3f")``."""


def say(text: str) -> None:
    """Write one log line to stderr."""
    print(text, file=sys.stderr, flush=True)


def emit_json(value: object) -> None:
    """Write ``value`` to stdout as :func:`plain` JSON; the only thing a ``--json`` command prints there."""
    print(_json_text(value))


def write_json(value: object, path: Path) -> None:
    """Write what :func:`emit_json` would print to a file; missing parent folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_json_text(value) + "\n", encoding="utf-8")


def _json_text(value: object) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses as objects, tuples as lists, infinities and NaN as strings."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def table(title: str, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout.

    Args:
        title: Heading above the table.
        columns: Columns with a format are aligned right.
        rows: Cells; a string is shown as it is, None as an empty cell.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(title)  # as a rich title it would be folded to the table's width
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    named = [(column, "") if isinstance(column, str) else column for column in columns]
    for name, form in named:
        grid.add_column(name, justify="right" if form else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(_cell(cell, form) for cell, (_, form) in zip(row, named, strict=True)))
    console = Console()
    # piped output has no terminal width to fit, so a table there is never folded
    console.print(grid) if console.is_terminal else Console(width=160).print(grid)


def _cell(value: object, form: str) -> str:
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def facts(title: str, pairs: Iterable[tuple[str, object]]) -> None:
    """Print ``name  value`` lines under a title to stdout; a value of None leaves its line out."""
    known = [(name, value) for name, value in pairs if value is not None]
    width = max(len(name) for name, _ in known)
    print(title)
    for name, value in known:
        print(f"  {name:<{width}}  {value}")


def counts(numbers: Mapping[str, int]) -> str:
    """Return how often each thing was found, the most frequent first: ``3 too-long, 1 empty``."""
    ordered = sorted(numbers.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {name}" for name, number in ordered)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 sample``, ``1,024 samples``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def figures(numbers: Mapping[str, object], form: str = "") -> str:
    """Return named values: ``code 2.31, math 2.87``.

    Args:
        numbers: Name -> value.
        form: Of the values, as for ``format``.
    """
    return ", ".join(f"{name} {value:{form}}" for name, value in numbers.items())


def size(n_bytes: float) -> str:
    """Return a byte count as people read it: 1023 B, 1.0 KiB, 61.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.2f} TiB"


def duration(seconds: float) -> str:
    """Return seconds as 42s, 3m07s or 5h12m."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    return f"{s // 60}m{s % 60:02d}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02d}m"


class Interrupted(Exception):
    """A signal stopped the work; the same command resumes it.

    Args:
        signum: Signal number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def check_stop(stop: Sequence[int]) -> None:
    """Raise :class:`Interrupted` if a signal has come (:func:`stop_on_signal`)."""
    if stop:
        raise Interrupted(stop[0])


@contextmanager
def stop_on_signal() -> Iterator[list[int]]:
    """Append the first SIGINT or SIGTERM to the returned list; a second one has its usual effect."""
    stop: list[int] = []

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if stop:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        stop.append(signum)
        say("stopping as soon as the current work is safe; send the signal again to stop at once")

    try:
        previous = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller handles signals
        yield stop
        return
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


class Progress:
    """Progress of ``total`` units of work, followed by free text.

    Args:
        label: What is being done.
        total: Amount of work in ``unit``.
        unit: Name of the unit, such as ``tok``.
        every_s: Seconds between plain lines when stderr is not a terminal.
    """

    def __init__(self, label: str, total: int, unit: str, *, every_s: float = 10.0) -> None:
        self._label, self._total, self._unit, self._every_s = label, total, unit, every_s
        self._done, self._start = 0, time.monotonic()
        self._next_line = self._start + every_s
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit=unit, unit_scale=True, dynamic_ncols=True)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def advance(self, amount: int, note: str = "") -> None:
        """Count ``amount`` more units as done and show ``note`` after the rate."""
        if not amount:
            return
        self._done += amount
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)
        elif time.monotonic() >= self._next_line or self._done >= self._total:
            self._next_line = time.monotonic() + self._every_s
            say(self._line(note))

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, note: str) -> str:
        rate = self._done / max(self.elapsed_s, 1e-9)
        left = duration((self._total - self._done) / rate) if rate > 0 else "?"
        done = f"{self._done:,}/{self._total:,} {self._unit} ({self._done / max(self._total, 1):.0%})"
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        return f"{self._label}: {done}, {speed} {self._unit}/s, ETA {left}{', ' + note if note else ''}"


@contextmanager
def resumable(kept: str, *, quiet: bool = False) -> Iterator[None]:
    """Turn an interruption of what runs inside into a line, the command that goes on, and the exit status 128 + signal.

    Args:
        kept: What is not lost, such as "the committed shards are whole".
        quiet: Leave out the line: another rank prints it.
    """
    try:
        yield
    except Interrupted as stop:
        if not quiet:
            words = [re.sub(r"^(https?://)\S*@", r"\1", word) for word in sys.argv[1:]]  # without a password
            command = shlex.join([Path(sys.argv[0]).name, *words])
            say(f"{stop}: {kept}. To resume:\n  {command}")
        raise SystemExit(128 + stop.signum) from None


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure.

    A command that will draw a figure also calls this first, so that hours of work do not end with a missing package.

    Args:
        width: Inches.
        height: Inches.

    Raises:
        EnvironmentFault: ``dependency-missing``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install 'hscache[report]'"
        raise EnvironmentFault("dependency-missing", "drawing a plot needs matplotlib", hint=hint) from error
    return Figure(figsize=(width, height), layout="constrained")


def command_line(name: str, purpose: str) -> Typer:
    """Return a typer application that has only ``--version``; :func:`run_command` runs it.

    Args:
        name: Of the command.
        purpose: First line of its help.
    """
    import typer

    from hscache import __version__

    app = typer.Typer(
        name=name,
        help=purpose,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    option: bool = typer.Option(False, "--version", help="Print the version.")

    @app.callback(invoke_without_command=True)
    def root(version: bool = option) -> None:
        if version:
            print(f"{name} {__version__}")
            raise typer.Exit

    return app


def _call(command: Typer) -> int:
    """Run a command line and return its status.

    Raises:
        ConfigError: ``usage``.
    """
    from typer import BadParameter

    usage_error: Any = BadParameter.__base__  # its module is private
    try:
        return command(standalone_mode=False) or 0
    except usage_error as error:
        if error.ctx is not None and error.message == error.ctx.get_help():
            say(error.message)  # no argument was given at all
            return int(error.exit_code)
        hint = f"{error.ctx.command_path if error.ctx else Path(sys.argv[0]).name} --help"
        raise ConfigError("usage", error.format_message(), hint=hint) from error


def run_command(command: Typer) -> None:
    """Run a command line; an error becomes one message, a hint and an exit status."""
    status: str | int | None = 0
    try:
        status = _call(command)
    except SystemExit as stop:
        # typer treats it as a failure when the reader of our output closes the pipe early
        status = 0 if isinstance(stop.__context__, BrokenPipeError) else stop.code
    except HscacheError as error:
        say(f"error[{error.code}]: {error.message}")
        if error.hint:
            say(f"hint: {error.hint}")
        status = error.exit_code
    except BrokenPipeError:
        pass
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            say(f"error[disk-error]: {error}")
            status = EnvironmentFault.exit_code
        else:  # an OSError without a number comes from another library, not from the file system
            traceback.print_exc()
            say("error[bug]: this is a bug in hscache; please report it with the lines above")
            status = _EXIT_BUG
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # else Python, which flushes once more at its end, would exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
