"""Numbers that no command can work with are refused before any work."""

from __future__ import annotations

import click
import pytest

from dcptool.cli import app
from dcptool.cli.numbers import FiniteRange

COMMANDS = ("prune", "finetune", "evaluate", "export", "bench")
# Read by rules of their own: infinity is a value of --lambda, the others are checked together.
OTHERWISE = {"--lambda", "--epsilon", "--max-accuracy-drop", "--cache-gb"}


def numbers() -> list[tuple[str, click.Option]]:
    found = []
    for command in COMMANDS:
        params = app.group.get_command(click.Context(app.group), command).params
        found += [
            (command, param)
            for param in params
            if isinstance(param.type, click.types.FloatParamType)
            and param.opts[-1] not in OTHERWISE
        ]
    return found


@pytest.mark.parametrize(("command", "option"), numbers())
def test_numbers_of_every_command_are_finite(
    command: str, option: click.Option, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(option.type, FiniteRange)
    for bad in ("nan", "inf", "-inf", "1e30"):
        given = [option.opts[-1], *([bad] * option.nargs)]
        assert app.run([command, "nothing", *given]) == 2
        err = capsys.readouterr().err
        assert option.opts[-1] in err
        assert "range" in err


def test_numbers_in_their_range_pass() -> None:
    kind = FiniteRange(0, 1, min_open=True)
    assert kind.convert("0.25", None, None) == 0.25
    with pytest.raises(click.BadParameter, match="0<x<=1"):
        kind.convert("0", None, None)
    with pytest.raises(click.BadParameter, match="nan is out of range"):
        kind.convert("nan", None, None)
