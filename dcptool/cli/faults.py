"""Errors that are not ours, put into the three lines: click's, the system's, and bugs."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import click

from dcptool.errors import DcptoolError, EnvironmentFault, UsageError

# What the system says when the machine, not the program, is at fault.
_OF_THE_MACHINE = frozenset(
    (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EPIPE,
        errno.EBADF,
    )
)
# As torch, the C++ library, oneDNN and the loader of libraries put it.
_NO_MEMORY = (
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "could not create a primitive",
    "can't allocate memory",
    "Cannot allocate memory",
    "failed to map segment from shared object",
)


def of_usage(err: click.ClickException, arguments: list[str]) -> UsageError:
    """What is wrong with the command line; wrong values are listed all at once."""
    context = err.ctx if isinstance(err, click.UsageError) else None
    path = context.command_path if context else "dcptool"
    name = context.info_name if context and context.parent else "dcptool"
    help_ = f"{path} --help"
    if isinstance(err, click.NoSuchOption):
        if err.possibilities:
            near = err.possibilities[0]
            fixed = [_spelled(argument, err.option_name, near) for argument in arguments]
            why = f"did you mean {' or '.join(err.possibilities)}?"
            return UsageError(
                f"{name} has no option {err.option_name}",
                why=why,
                try_=shlex.join(["dcptool", *fixed]),
            )
        why = "it is not in the list of its options"
        if context and context.parent is None:
            why = "the options of a command stand after its name"
        return UsageError(f"{name} has no option {err.option_name}", why=why, try_=help_)
    if isinstance(err, click.MissingParameter) and err.param is not None:
        wanted = _wanted(err.param, context) if context else str(err.param.name)
        example = _completed(err.param, context, arguments) if context else ""
        return UsageError(f"{name} needs {wanted}", why="it was not given", try_=example or help_)
    if isinstance(err, click.BadParameter):
        found = _bad_values(err, arguments) or [_line(err)]
        count = "a value" if len(found) == 1 else f"{len(found)} values"
        return UsageError(f"{name} cannot use {count}", why="\n".join(found), try_=help_)
    return UsageError(f"{name} cannot be called so", why=_plain(err.format_message()), try_=help_)


def _wanted(param: click.Parameter, context: click.Context) -> str:
    metavar = param.make_metavar(context)
    return f"{param.opts[0]} {metavar}" if isinstance(param, click.Option) else metavar


def _completed(param: click.Parameter, context: click.Context, arguments: list[str]) -> str:
    """What was typed with the option that is missing, as the first example of its help has it."""
    for line in (context.command.help or "").splitlines():
        words = line.split()
        if words[:1] == ["dcptool"] and param.opts[0] in words:
            place = words.index(param.opts[0])
            return shlex.join(["dcptool", *arguments, *words[place : place + 2]])
    return ""


def _spelled(argument: str, wrong: str, right: str) -> str:
    if argument == wrong or argument.startswith(f"{wrong}="):
        return right + argument[len(wrong) :]
    return argument


def _bad_values(err: click.BadParameter, arguments: list[str]) -> list[str]:
    """Every option and argument whose value does not fit, not only the first."""
    context = err.ctx
    if context is None or context.info_name not in arguments:
        return []
    again = click.Context(context.command, parent=context.parent, info_name=context.info_name)
    rest = arguments[arguments.index(context.info_name) + 1 :]
    try:
        values, left, _ = context.command.make_parser(again).parse_args(list(rest))
    except click.UsageError:
        return []
    found = []
    with again:
        for param in context.command.params:
            if param.is_eager:
                continue
            try:
                param.handle_parse_result(again, values, left)
            except click.MissingParameter:
                found.append(f"{_wanted(param, again)} is missing")
            except click.BadParameter as another:
                found.append(_line(another))
    return found


def _line(err: click.BadParameter) -> str:
    hint = err.param_hint or (err.param.get_error_hint(err.ctx) if err.param else "")
    text = hint if isinstance(hint, str) else " / ".join(hint or ())
    return f"{text.replace(chr(39), '')}: {_plain(err.message)}"


def _plain(message: str) -> str:
    return message.strip().rstrip(".")


def of_anything(err: Exception) -> DcptoolError:
    """An error that nobody expected: memory, the system, or a bug."""
    text = str(err)
    if isinstance(err, MemoryError) or any(words in text for words in _NO_MEMORY):
        return EnvironmentFault(
            "out of memory",
            why="the machine or a limit set for this process has no more",
            try_="the same command with a smaller --batch-size",
        )
    if isinstance(err, OSError) and err.errno in _OF_THE_MACHINE:
        return _of_the_system(err)
    return _our_bug(err)


def _of_the_system(err: OSError) -> EnvironmentFault:
    why = os.strerror(err.errno or 0)
    if err.filename is None:
        return EnvironmentFault(
            "cannot write the output",
            why=why,
            try_="the same command with stdout open, and room where it leads",
        )
    name = os.fsdecode(err.filename) if isinstance(err.filename, bytes) else str(err.filename)
    return EnvironmentFault(
        f"cannot use {name}",
        why=why,
        try_=f"check it: ls -ld {shlex.quote(name)}; df -h",
    )


def _our_bug(err: Exception) -> DcptoolError:
    import traceback

    frames = traceback.extract_tb(err.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "start"
    first = str(err).splitlines()[0] if str(err) else ""
    log = _log("".join(traceback.format_exception(err)))
    return DcptoolError(
        f"internal error: {type(err).__name__}: {first}",
        why=f"raised at {place}; this is a fault of dcptool, please report it"
        + (f" with {log}" if log else ""),
        try_="the same command with --debug, which shows the whole traceback",
    )


def _log(text: str) -> str:
    """Keep the traceback where a report can take it from; a long run need not be repeated."""
    import tempfile

    try:
        handle, path = tempfile.mkstemp(prefix="dcptool-", suffix=".log")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError:
        return ""
    return path
