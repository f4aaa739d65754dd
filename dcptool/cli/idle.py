"""Options that were typed and play no part: refused by name, as they would be missed in silence.

A recipe may set them for all its variants, and so may a caller in Python.
"""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource

from dcptool.cli import app
from dcptool.errors import UsageError


def typed(keys: Collection[str]) -> list[str]:
    """Which of these parameters of the running command somebody typed, as they are spelled."""
    context = click.get_current_context(silent=True)
    if context is None or not app.is_typed():
        return []
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in keys
        and context.get_parameter_source(str(parameter.name)) == ParameterSource.COMMANDLINE
    ]


def refuse(keys: Collection[str], where: str, try_: str = "") -> None:
    """Raise when one of these was typed; `where` is where they do nothing."""
    found = typed(keys)
    if found:
        named = " and ".join(found)
        raise UsageError(
            f"{named} {'do' if len(found) > 1 else 'does'} nothing {where}",
            try_=try_ or f"the same command without {named}",
        )
