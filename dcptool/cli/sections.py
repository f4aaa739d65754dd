"""The options of the commands as keys of recipes and arguments of the Python API.

A key is an option's long name with underscores; `--no-training` is the key `training`. Types,
ranges and choices are those of click, so that each of them is written down once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from os import PathLike
from typing import Any

import click

from dcptool.cli import app, options, study_sections
from dcptool.pipeline.recipe import Key, Schema, Section

# Where results go and how they are printed is for `run` to say, the same for every recipe.
DECIDED = {
    "help": "this is no setting",
    "json": "give --json to `dcptool run`",
    "quiet": "give -q to `dcptool run`",
    "verbose": "give -v to `dcptool run`",
    "debug": "give --debug to `dcptool run`",
    "resume": "give --resume to `dcptool run`",
    "runs_dir": "give --runs-dir to `dcptool run`",
    "output": "`dcptool run` chooses the folder",
    "force": "`dcptool run` replaces nothing",
    "onnx": "`dcptool run` writes model.onnx beside the manifest",
    "safetensors": "the weights lie beside the manifest already, as model.safetensors",
    "emit_plan": "plans are for `dcptool analyze`",
    "plot": "pictures are for `dcptool analyze`",
    "csv": "tables are for `dcptool bench`",
    "markdown": "tables are for `dcptool bench`",
}
PER_GROUP = "rate_of"
RATE = "R"  # the metavar of options that take a rate as text, for the sake of its digits
ENDLESS = ("--lambda",)  # options for which infinity is a value
LARGEST = 2**63 - 1


def schema() -> Schema:
    """All sections of a recipe."""
    found = {
        "model": Section(
            {"name": Key(_name), **_keys(declared(options.model_options))}, required=("name",)
        ),
        "data": Section(_keys(declared(options.data_options))),
    }
    for section in ("analyze", "baseline", "prune", "finetune", "export", "evaluate", "bench"):
        keys = keys_of("finetune" if section == "baseline" else section)
        if PER_GROUP in keys:
            keys["rates"] = Key(partial(_rates, keys.pop(PER_GROUP)))
        refused = {key: why for key, why in DECIDED.items() if key in keys}
        found[section] = Section({k: v for k, v in keys.items() if k not in refused}, refused)
    limits = [
        click.Option(["--max-accuracy-drop"], type=click.FloatRange(0)),
        click.Option(["--min-speedup"], type=click.FloatRange(0)),
    ]
    return {**found, "gates": Section(_keys(limits)), **study_sections.sections()}


def keys_of(command: str) -> dict[str, Key]:
    """The options of one command as keys."""
    with click.Context(app.group, info_name="dcptool") as context:
        found = app.group.get_command(context, command)
        assert found is not None
        return _keys(p for p in found.get_params(context) if isinstance(p, click.Option))


def words(command: str, given: Mapping[str, Any]) -> list[str]:
    """Arguments of a Python call as words of the command line; all faults at once."""
    from dcptool.errors import UsageError

    known = keys_of(command)
    faults, result = [], []
    for name, value in given.items():
        if value is None:
            continue
        if name not in known:
            faults.append(f"there is no argument {name}")
            continue
        try:
            result += known[name].arguments(value)
        except ValueError as err:
            faults.append(f"{name}: {err}")
    if faults:
        raise UsageError(
            f"dcptool.{command} cannot be called so",
            why="\n".join(faults),
            try_=f"dcptool {command} --help, whose options are the arguments",
        )
    return result


def declared(decorator: Callable[[Any], Any]) -> list[click.Option]:
    """The options that a decorator adds to a command."""

    def nothing() -> None: ...

    decorated = decorator(nothing)
    return list(reversed(decorated.__click_params__))


def _keys(params: Any) -> dict[str, Key]:
    found: dict[str, Key] = {}
    for param in params:
        option = next(text for text in param.opts if text.startswith("--"))
        negative = param.is_flag and option.startswith("--no-")
        name = option.removeprefix("--no-" if negative else "--").replace("-", "_")
        found[name] = Key(
            partial(_flag, param, option, negative) if param.is_flag else partial(_values, param),
            isinstance(param.type, click.Path),
        )
    return found


def _name(value: Any) -> list[str]:
    if not isinstance(value, str) or not value or value.startswith("-"):
        raise ValueError("the name of a model is wanted, such as resnet50")
    return []


def _flag(param: click.Option, option: str, negative: bool, value: Any) -> list[str]:
    if not isinstance(value, bool):
        raise ValueError(f"true or false is wanted, not {_shown(value)}")  # noqa: TRY004
    if param.secondary_opts:
        return [option if value else param.secondary_opts[0]]
    return [option] if value != negative else []


def _values(param: click.Option, value: Any) -> list[str]:
    option = next(text for text in param.opts if text.startswith("--"))
    if value is True and param.flag_value == "":
        return [option]
    if param.multiple:
        many = value if isinstance(value, list | tuple) else [value]
        return [f"{option}={_text(param, one)}" for one in many]
    if param.nargs > 1:
        if not isinstance(value, list | tuple) or len(value) != param.nargs:
            raise ValueError(f"a list of {param.nargs} is wanted, not {_shown(value)}")
        return [option, *(_text(param, one) for one in value)]
    if isinstance(value, list | tuple) and isinstance(param.type, click.types.StringParamType):
        return [f"{option}={','.join(_text(param, one) for one in value)}"]
    return [f"{option}={_text(param, value)}"]


def _text(param: click.Option, value: Any) -> str:
    """One value as it would be typed, after it has passed the option's own type."""
    kind = param.type
    is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if isinstance(kind, click.types.IntParamType):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"a whole number is wanted, not {_shown(value)}")  # noqa: TRY004
    elif isinstance(kind, click.types.FloatParamType):
        if not is_number:
            raise ValueError(f"a number is wanted, not {_shown(value)}")
    elif not isinstance(value, str | PathLike) and not (
        is_number and isinstance(kind, click.types.StringParamType)
    ):
        raise ValueError(f"a text is wanted, not {_shown(value)}")
    endless = param.opts[0] in ENDLESS and is_number and float(value) == float("inf")
    if is_number and not abs(float(value)) <= LARGEST and not endless:
        raise ValueError(f"{_shown(value)} is out of range")
    text = str(value)
    if param.metavar == RATE:
        _check_share(text)
    try:
        kind.convert(text, param, None)
    except click.BadParameter as err:
        raise ValueError(err.message.strip().rstrip(".")) from err
    return text


def _check_share(text: str) -> None:
    try:
        inside = 0 <= Decimal(text) < 1
    except ArithmeticError:
        inside = False
    if not inside:
        raise ValueError(f"a share of the channels is wanted, 0 <= rate < 1, not {text[:40]}")


def _rates(key: Key, table: Any) -> list[str]:
    """`"layer1.*" = 0.2` lines as the repeatable option for single groups."""
    if not isinstance(table, dict) or not table:
        raise ValueError('names and rates are wanted, such as "layer1.*" = 0.2')
    for name, rate in table.items():
        if isinstance(rate, bool) or not isinstance(rate, int | float | Decimal):
            raise ValueError(f"the rate of {name} must be a number, not {_shown(rate)}")  # noqa: TRY004
    return key.arguments([f"{name}={rate}" for name, rate in table.items()])


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
