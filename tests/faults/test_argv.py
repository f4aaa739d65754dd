"""Whatever is typed, the answer is a result or three lines, never a traceback."""

from __future__ import annotations

import contextlib
import io

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcptool.cli import app


def words() -> list[str]:
    """Every command and option there is, and what people type instead."""
    context = click.Context(app.group, info_name="dcptool")
    found = [
        "--",
        "-",
        "",
        "--json",
        "-qv",
        "-h",
        "--help",
        "--version",
        "--rat",
        "analyse",
        "=",
        "--=",
    ]
    for name in app.COMMANDS:
        command = app.group.get_command(context, name)
        assert command is not None
        found.append(name)
        for param in command.params:
            found += [*param.opts, *param.secondary_opts]
            found += [f"{option}=7" for option in param.opts if option.startswith("--")]
    return sorted(set(found))


VALUES = [
    "0",
    "-1",
    "0.5",
    "nan",
    "inf",
    "1e999",
    "9" * 5000,
    "x",
    "all",
    "\x1b[2J",
    "\udcff",
    "ä\n",
]
ARGUMENTS = st.lists(
    st.one_of(st.sampled_from(words()), st.sampled_from(VALUES), st.text(max_size=8)), max_size=8
)


@pytest.fixture
def idle_commands(monkeypatch):
    """Commands that are parsed in full and then do nothing."""
    context = click.Context(app.group, info_name="dcptool")
    for name in app.COMMANDS:
        command = app.group.get_command(context, name)
        assert command is not None
        monkeypatch.setattr(command, "callback", lambda *args, **kwargs: None)


def answer(arguments: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(arguments)
    assert code in (0, 2), (arguments, err.getvalue())
    assert "Traceback" not in err.getvalue() or "--debug" in arguments
    assert "internal error" not in err.getvalue()
    if code == 2 and not err.getvalue().startswith(("Usage:", "Traceback")):
        assert "\n  why: " in err.getvalue()
        assert "\n  try: " in err.getvalue()


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ARGUMENTS)
def test_any_arguments(idle_commands, arguments):
    answer(arguments)


@pytest.mark.fuzz
@settings(
    max_examples=20_000,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(ARGUMENTS)
def test_any_arguments_for_a_minute(idle_commands, arguments):
    answer(arguments)
