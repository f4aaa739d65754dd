"""The command group, loaded lazily, and the one boundary that turns errors into exit codes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import click

from dcptool import __version__, console
from dcptool.errors import DcptoolError, EnvironmentFault, Interrupted, UsageError

COMMANDS = (
    "analyze",
    "prune",
    "finetune",
    "evaluate",
    "export",
    "bench",
    "env",
)


class LazyGroup(click.Group):
    """Finds each command in the module of its name when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the work."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import `dcptool.cli.NAME` and take the command of that name."""
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"dcptool.cli.{name}_command")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest one that is spelled nearly so."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            raise UsageError(
                f"there is no command {args[0]!r}",
                why="the commands are " + ", ".join(COMMANDS),
                try_=f"dcptool {near[0]} --help" if near else "dcptool --help",
            )
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="dcptool %(version)s")
def group() -> None:
    """Give it a trained CNN and get back a smaller, faster, deployable one.

    \b
        dcptool prune resnet50 --rate 0.3
        dcptool export --onnx
        dcptool bench

    Results go to stdout, everything else to stderr; --json prints one JSON document.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    code = run(arguments)
    try:
        sys.stdout.flush()
    except OSError:
        # The reader went away; what was to be said is said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = code or 5
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and translate whatever ends it."""
    try:
        result = group.main(arguments, prog_name="dcptool", standalone_mode=False)
    except click.exceptions.Exit as err:
        return err.exit_code
    except click.UsageError as err:
        where = err.ctx.command_path if err.ctx else "dcptool"
        return _report(UsageError(err.format_message(), try_=f"{where} --help"), arguments)
    except click.ClickException as err:
        return _report(UsageError(err.format_message(), try_="dcptool --help"), arguments)
    except (KeyboardInterrupt, click.Abort):
        return _report(Interrupted(signal.SIGINT), arguments)
    except DcptoolError as err:
        return _report(err, arguments)
    except BrokenPipeError:
        return _report(EnvironmentFault("the reader of the output went away"), arguments)
    except MemoryError:
        return _report(_out_of_memory(), arguments)
    except Exception as err:
        if "not enough memory" in str(err) or "out of memory" in str(err):
            return _report(_out_of_memory(), arguments)
        return _report(_our_bug(err), arguments)
    return result if isinstance(result, int) else 0


def _report(err: DcptoolError, arguments: list[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    if "--json" in arguments:
        document = {"dcptool": __version__, "error": err.document()}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.stderr.write(err.lines() + "\n")
    return err.code


def _out_of_memory() -> EnvironmentFault:
    return EnvironmentFault(
        "out of memory",
        why="the machine or a limit set for this process has no more",
        try_="the same command with a smaller --batch-size or fewer --samples",
    )


def _our_bug(err: Exception) -> DcptoolError:
    last = traceback.extract_tb(err.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    return DcptoolError(
        f"internal error: {type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}",
        why=f"raised at {place}; this is a fault of dcptool, please report it",
        try_="the same command with --debug, which shows the whole traceback",
    )


def emit(command: str, document: dict[str, object], text: str, *, as_json: bool) -> None:
    """Print the result of a command: one JSON document, or text for people."""
    if as_json:
        whole = {"dcptool": __version__, "command": command, **document}
        text = json.dumps(whole, indent=2, allow_nan=False)
    sys.stdout.write(text + "\n")
    console.detail(f"{command} done")
