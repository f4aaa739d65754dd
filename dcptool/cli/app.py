"""The command group, loaded lazily, and the one boundary that turns errors into exit codes."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from dcptool import __version__, console
from dcptool.cli import faults, streams
from dcptool.errors import DcptoolError, EnvironmentFault, Interrupted, UsageError

COMMANDS = (
    "analyze",
    "prune",
    "finetune",
    "evaluate",
    "export",
    "bench",
    "report",
    "run",
    "sweep",
    "recipe",
    "env",
    "completion",
)
# Their product is a file; what they print about it may get lost.
MAKE_FILES = frozenset(("prune", "finetune", "export", "report", "run", "sweep"))
COMPLETE = "_DCPTOOL_COMPLETE"
# Where a process that was started for one document leaves it, instead of printing it.
DOCUMENT_FILE = "DCPTOOL_DOCUMENT"
# Where the processes of one command leave word how each of them ended.
STATUS_FOLDER = "DCPTOOL_STATUS_DIR"

_printed = {"document": False}


@dataclass(frozen=True)
class _Call:
    """A command that another part of this program called, and the documents it made."""

    arguments: tuple[str, ...]
    documents: list[dict[str, Any]] = field(default_factory=list)


_call: ContextVar[_Call | None] = ContextVar("call", default=None)


class LazyGroup(click.Group):
    """Finds each command in the module of its name when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import `dcptool.cli.NAME_command` and take its command."""
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"dcptool.cli.{name}_command")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest one that is spelled nearly so."""
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            raise UsageError(
                f"there is no command {args[0]!r}",
                why="the commands are " + ", ".join(COMMANDS),
                try_=shlex.join(["dcptool", near[0], *args[1:]]) if near else "dcptool --help",
            )
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="dcptool %(version)s")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but results and warnings.")
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def group(as_json: bool, quiet: bool, verbose: bool, debug: bool) -> None:
    """Give it a trained CNN and get back a smaller, faster, deployable one.

    \b
        dcptool prune resnet50 --rate 0.3
        dcptool export --onnx
        dcptool bench

    Results go to stdout, everything else to stderr. The options below may also stand after
    the command.
    """


class _Stopped(KeyboardInterrupt):
    """A signal that asks to stop, made to pass wherever Ctrl-C passes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


# Signals that have come: a library that is being imported may turn one into an error of its own.
_asked: list[int] = []


def _stop(number: int, _frame: FrameType | None) -> None:
    _asked.append(number)
    raise _Stopped(number)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    # Threads that spin while they wait make a busy machine many times slower (nine times, measured
    # on two shared cores). Read when torch's thread library is loaded, which is later.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    streams.mend()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A signal that is ignored, as under nohup, stays so.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)
    code = run(sys.argv[1:] if arguments is None else arguments)
    streams.close()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and translate whatever ends it."""
    _printed["document"] = False
    instruction = os.environ.get(COMPLETE)
    try:
        if instruction:
            from click.shell_completion import shell_complete

            return shell_complete(group, {}, "dcptool", COMPLETE, instruction)
        with group.make_context("dcptool", list(arguments)) as context:
            result = group.invoke(context)
    except click.exceptions.Exit as err:
        return err.exit_code
    except click.exceptions.NoArgsIsHelpError as err:
        sys.stderr.write(err.format_message() + "\n")
        return UsageError.code
    except click.ClickException as err:
        return _report(faults.of_usage(err, arguments), arguments)
    except KeyboardInterrupt as err:
        number = err.number if isinstance(err, _Stopped) else signal.SIGINT
        return _report(Interrupted(number), arguments)
    except DcptoolError as err:
        if isinstance(err, UsageError) and err.instead and err.instead[0] in arguments:
            wrong, right = err.instead
            meant = [right if word == wrong else word for word in arguments]
            err.try_ = shlex.join(["dcptool", *meant])
        return _report(err, arguments)
    except Exception as err:
        fault = Interrupted(_asked[-1]) if _asked else faults.of_anything(err)
        return _report(fault, arguments)
    return result if isinstance(result, int) else 0


def _report(err: DcptoolError, arguments: list[str]) -> int:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--debug" in options:
        import traceback

        with suppress(OSError):
            traceback.print_exc()
    if STATUS_FOLDER in os.environ:
        from dcptool.cli import launch

        with suppress(OSError, DcptoolError):
            launch.leave_word(err, printed=_printed["document"])
            return err.code
    if "--json" in options and not _printed["document"]:
        document = {"dcptool": __version__, "error": err.document()}
        with suppress(OSError):
            streams.print_result(json.dumps(document, indent=2))
    with suppress(OSError):
        sys.stderr.write(console.printable(err.lines()) + "\n")
        sys.stderr.flush()
    return err.code


def mark_printed(is_printed: bool) -> None:
    """Remember that another process has printed the document of this command."""
    _printed["document"] |= is_printed


def invoke(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one command for a caller in this process: nothing is printed, its document comes back.

    This is how recipes and the Python API run commands; errors are those of `dcptool.errors`.
    """
    call = _Call((name, *arguments))
    token = _call.set(call)
    try:
        with click.Context(group, info_name="dcptool") as parent:
            command = group.get_command(parent, name)
            assert command is not None
            with command.make_context(name, list(arguments), parent=parent) as context:
                code = command.invoke(context)
    except click.exceptions.Exit as err:
        code = err.exit_code
    except click.ClickException as err:
        raise faults.of_usage(err, [name, *arguments]) from err
    finally:
        _call.reset(token)
    if code or not call.documents:
        failed = DcptoolError(f"{name} ended without a result", why=f"its exit code is {code or 0}")
        failed.code = code or DcptoolError.code
        raise failed
    return call.documents[-1]


def called() -> list[str] | None:
    """The words of the command that is running, where it was called by `invoke`."""
    call = _call.get()
    return list(call.arguments) if call is not None else None


def is_typed() -> bool:
    """Whether a person typed this command, and no recipe or program called it."""
    return called() is None and DOCUMENT_FILE not in os.environ


def hand_over(document: dict[str, Any]) -> bool:
    """Give a document to whoever called the command; False when a person typed it."""
    call = _call.get()
    if call is not None:
        call.documents.append(document)
        return True
    if DOCUMENT_FILE in os.environ:
        from dcptool import files

        files.publish_json(Path(os.environ[DOCUMENT_FILE]), document)
        return True
    return False


def emit(
    command: str,
    document: dict[str, object],
    text: str,
    *,
    as_json: bool,
    failure: DcptoolError | None = None,
) -> None:
    """Print the result of a command: one JSON document, or text for people.

    A result outside its limits comes with its `failure`, which is raised after it is printed.
    """
    whole = {"dcptool": __version__, "command": command, **document}
    if failure is not None:
        whole["error"] = failure.document()
    is_other_rank = os.environ.get("RANK", "0") != "0"
    if is_other_rank or hand_over(whole):
        if failure is not None:
            raise failure
        return
    if as_json:
        text = json.dumps(whole, indent=2, allow_nan=False)
        _printed["document"] = True
    try:
        streams.print_result(console.printable(text))
    except OSError as err:
        lost = EnvironmentFault(
            "cannot write the result to stdout",
            why=os.strerror(err.errno) if err.errno else str(err),
            try_="the same command with stdout open",
        )
        if as_json or command not in MAKE_FILES:
            raise failure or lost from err
        console.warn(f"{lost.message}: {lost.why}; the files are written")
    if failure is not None:
        raise failure
    console.detail(f"{command} done")
