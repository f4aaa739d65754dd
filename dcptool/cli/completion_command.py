"""`dcptool completion`: what a shell needs to complete commands, options and choices."""

from __future__ import annotations

import click

from dcptool.cli.app import COMPLETE, emit, group
from dcptool.cli.options import reporting_options


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@reporting_options
def command(shell: str, as_json: bool) -> None:
    """Print the completion script of a shell.

    Put the line of your shell into its start file:

    \b
        eval "$(dcptool completion bash)"        ~/.bashrc
        eval "$(dcptool completion zsh)"         ~/.zshrc, after compinit
        dcptool completion fish | source         ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    script = found(group, {}, "dcptool", COMPLETE)
    # Not source(): for bash it starts a shell to ask for its version, which may not be here.
    text = (script.source_template % script.source_vars()).strip()
    emit("completion", {"shell": shell, "script": text}, text, as_json=as_json)
