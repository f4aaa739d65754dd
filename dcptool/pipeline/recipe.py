"""A recipe: one TOML file whose sections are commands and whose keys are their options.

Reads, checks and explains; runs nothing. What keys there are and what they may hold is told by
the command line through a `Schema`, so that every option has one home. All faults are listed at
once, with their lines. A recipe is complete: it inherits nothing and inserts nothing.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from dcptool import files
from dcptool.errors import InputError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SIZE_LIMIT = 64 << 10
DEPTH_LIMIT = 16
SUFFIX = ".toml"


@dataclass(frozen=True)
class Key:
    """One key of a section: how its value becomes words of a command line.

    `arguments` raises ValueError that says what is wanted; `is_path` marks what is read.
    """

    arguments: Callable[[Any], list[str]]
    is_path: bool = False


@dataclass(frozen=True)
class Section:
    """The keys of one section, and why some names are not among them.

    `whole` tells what the keys need of each other, as faults.
    """

    keys: Mapping[str, Key]
    refused: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    whole: Callable[[dict[str, Any]], list[str]] | None = None


Schema = Mapping[str, Section]


@dataclass(frozen=True)
class Recipe:
    """What the user wants, checked: values as written and as words of each command."""

    name: str
    text: str
    sections: Mapping[str, Mapping[str, Any]]
    words: Mapping[str, Mapping[str, tuple[str, ...]]]
    schema: Schema

    @property
    def purpose(self) -> str:
        """The first sentence of the comment on top."""
        return purpose(self.text)

    def has(self, section: str) -> bool:
        """Whether the recipe asks for this step."""
        return section in self.sections

    def get(self, section: str, key: str) -> Any:
        """One value as it was written, or None."""
        return self.sections.get(section, {}).get(key)

    def words_for(self, step: str, *, of: str, only: Sequence[str] | None = None) -> list[str]:
        """The words that section `of` adds to the command line of `step`."""
        known = self.schema[step].keys
        return [
            word
            for key, words in self.words.get(of, {}).items()
            if key in known and (only is None or key in only)
            for word in words
        ]

    def paths_for(self, step: str) -> Iterator[Path]:
        """Files and folders that a step reads because the recipe names them."""
        known = self.schema[step].keys
        for section in ("model", "data", step):
            for key, value in self.sections.get(section, {}).items():
                if key in known and known[key].is_path:
                    yield Path(str(value))


def folder() -> Path:
    """Where the recipes that came with this program lie: in the wheel, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def shipped() -> dict[str, Path]:
    """The recipes that came with this program, by name."""
    return {path.stem: path for path in sorted(folder().glob(f"*{SUFFIX}"))}


def find(name: str) -> Path:
    """The file behind a name or a path; a name that is misspelt suggests the nearest."""
    if name.endswith(SUFFIX) or "/" in name:
        path = Path(name)
        if not path.is_file() and path.stem in shipped():
            raise InputError(
                f"there is no recipe file {path}",
                why=f"but one called {path.stem} came with dcptool",
                try_=f"dcptool run {path.stem}, or dcptool recipe copy {path.stem}",
            )
        return path
    known = shipped()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    file = Path(name + SUFFIX)
    raise UsageError(
        f"there is no recipe {name!r}",
        why="the recipes that came with dcptool are " + ", ".join(known),
        try_=f"dcptool run {file}"
        if file.is_file()
        else f"dcptool run {near[0]}"
        if near
        else "dcptool recipe list",
        instead=(name, near[0]) if near and not file.is_file() else None,
    )


def read(
    name: str, schema: Schema, changes: Sequence[str] = (), without: Sequence[str] = ()
) -> Recipe:
    """Read a recipe by name or path, take things `without` which it shall be (a section, or
    `section.key`) out of it, lay `changes` (`prune.rate=0.5`) over it, and check it.
    """
    path = find(name)
    return changed(path.stem, read_text(path), schema, changes, without, where=name)


def changed(
    name: str,
    text: str,
    schema: Schema,
    changes: Sequence[str],
    without: Sequence[str] = (),
    *,
    where: str = "",
) -> Recipe:
    """The recipe of a text with `changes` laid over it and without some of it, checked."""
    tables = parse(text, where or name)
    for place in without:
        _take_out(tables, place, name)
    for change in changes:
        _lay_over(tables, _change(change))
    return check(name, text, tables, schema, where=where or name)


def value_of(change: str, *, option: str) -> object:
    """The value that `section.key=value` after `option` sets, as a recipe reads it."""
    (table,) = _change(change, option).values()
    (value,) = table.values()
    return value


def read_text(path: Path) -> str:
    """The text of a recipe file, whole and in UTF-8."""
    data = files.read_bytes(path, what="recipe", limit=SIZE_LIMIT)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise UsageError(
            f"cannot read recipe {path}",
            why=f"its encoding is not UTF-8: {err.reason} at byte {err.start}",
            try_=f"iconv -t UTF-8 {path}",
        ) from err


def parse(text: str, where: str) -> dict[str, Any]:
    """TOML to tables; numbers keep the digits that were written."""
    if _depth(text) > DEPTH_LIMIT:
        raise UsageError(
            f"{where} is too complex",
            why=f"brackets or dotted keys go deeper than {DEPTH_LIMIT}",
            try_="dcptool recipe show quickstart",
        )
    try:
        tables: dict[str, Any] = tomllib.loads(text, parse_float=Decimal)
    except (ValueError, InvalidOperation, RecursionError) as err:
        raise UsageError(
            f"{where} is not valid TOML",
            why=str(err)[:200] or "a number is out of range",
            try_="dcptool recipe show quickstart",
        ) from err
    return tables


def _depth(text: str) -> int:
    """The deepest nesting outside of strings and comments, before anything recursive sees it."""
    depth = deepest = dots = 0
    place = 0
    while place < len(text):
        letter = text[place]
        if letter in "\"'":
            mark = letter * 3 if text.startswith(letter * 3, place) else letter
            end = text.find(mark, place + len(mark))
            # An escaped quote only ends the string early here; tomllib has the last word.
            place = len(text) if end < 0 else end + len(mark)
            continue
        if letter == "#":
            end = text.find("\n", place)
            place = len(text) if end < 0 else end
            continue
        depth += (letter in "[{") - (letter in "]}")
        dots = dots + 1 if letter == "." else 0 if letter in "=,[]{}\n" else dots
        deepest = max(deepest, depth, dots)
        place += 1
    return deepest


def _change(text: str, option: str = "--set") -> dict[str, Any]:
    """`prune.rate=0.5` as tables; a value that is no TOML is a text."""
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise UsageError(f"{option} {text} names no key", try_=f"{option} prune.rate=0.5")
    if _depth(text) > DEPTH_LIMIT or len(text) > SIZE_LIMIT:
        raise UsageError(f"{option} {text[:40]} is too complex", try_=f"{option} prune.rate=0.5")
    for spelling in (value, json.dumps(value)):
        try:
            tables: dict[str, Any] = tomllib.loads(f"{name} = {spelling}", parse_float=Decimal)
        except (ValueError, InvalidOperation, RecursionError):
            continue
        return tables
    raise UsageError(f"{option} {text} is no key and value", try_=f"{option} prune.rate=0.5")


def _take_out(tables: dict[str, Any], place: str, name: str) -> None:
    section, _, key = place.partition(".")
    table = tables.get(section)
    if not isinstance(table, dict) or (key and key not in table):
        raise UsageError(
            f"--without {place}: the recipe {name} has no such thing",
            why=f"its sections are {', '.join(tables)}",
            try_=f"dcptool recipe show {name}",
        )
    if key:
        del table[key]
    else:
        del tables[section]


def _lay_over(tables: dict[str, Any], change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        below = tables.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            _lay_over(below, value)
        else:
            tables[key] = value


def check(name: str, text: str, tables: Mapping[str, Any], schema: Schema, *, where: str) -> Recipe:
    """Turn tables into a recipe, or tell everything that is wrong with them."""
    lines = _lines(text)
    faults: list[str] = []
    words: dict[str, dict[str, tuple[str, ...]]] = {}
    factor = _factor(tables)
    for section, table in tables.items():
        place = _place(lines, section)
        if section not in schema:
            faults.append(f"{place}there is no section [{section}]{_near(section, schema)}")
            continue
        if not isinstance(table, dict):
            faults.append(f"{place}[{section}] must be a section, not a value")
            continue
        known = schema[section]
        words[section] = {}
        for key, value in table.items():
            place = _place(lines, f"{section}.{key}")
            if key in known.refused:
                faults.append(f"{place}{section}.{key}: {known.refused[key]}")
            elif key not in known.keys:
                faults.append(f"{place}there is no key {section}.{key}{_near(key, known.keys)}")
            else:
                try:
                    scaled = value if factor == 1 else _shorter(key, value, factor)
                    words[section][key] = tuple(known.keys[key].arguments(scaled))
                except ValueError as err:
                    faults.append(f"{place}{section}.{key}: {err}")
        faults += known.whole(table) if known.whole is not None else []
    for section, known in schema.items():
        if section in tables or section == "model":
            table = tables.get(section)
            given = table if isinstance(table, dict) else {}
            faults += [f"{section}.{key} is missing" for key in known.required if key not in given]
    if faults:
        raise UsageError(
            f"the recipe {where} has {len(faults)} fault{'s' * (len(faults) > 1)}",
            why="\n".join(faults),
            try_="dcptool recipe show quickstart, which is a recipe that works",
        )
    return Recipe(name, text, tables, words, schema)


# What [scale] multiplies: lengths of training, and images that channels are chosen on.
LENGTHS = ("epochs", "warmup_epochs", "stage_epochs", "decay_milestones")
COUNTS = ("steps", "stage_steps", "samples")


def _factor(tables: Mapping[str, Any]) -> Decimal:
    table = tables.get("scale")
    factor = table.get("factor", 1) if isinstance(table, dict) else 1
    usable = _is_positive(factor) and factor <= 1
    return Decimal(str(factor)) if usable else Decimal(1)


def _shorter(key: str, value: Any, factor: Decimal) -> Any:
    """A value at a smaller scale; what was asked for never becomes nothing."""
    if key == "decay_milestones" and isinstance(value, list):
        return [_shorter(key, one, factor) for one in value]
    if not _is_positive(value) or value == Decimal("Infinity"):
        return value
    if key in COUNTS and isinstance(value, int):
        return max(1, round(value * factor))
    return Decimal(str(value)) * factor if key in LENGTHS else value


def _is_positive(value: Any) -> bool:
    """Whether a value is a number above 0; what is no number cannot even be compared."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    return value == value and value > 0


def _near(word: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _place(lines: Mapping[str, int], name: str) -> str:
    return f"line {lines[name]}: " if name in lines else ""


_HEADER = re.compile(r"\s*\[+\s*([\w.\"'-]+)\s*\]+")
_KEY = re.compile(r"\s*([\w.\"'-]{1,200})\s*=")


def _lines(text: str) -> dict[str, int]:
    """Where sections and keys stand, for messages: by the look of lines, which is enough."""
    found: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = header[1].replace('"', "").replace("'", "")
            found.setdefault(section, number)
            found.setdefault(section.partition(".")[0], number)
        elif key := _KEY.match(line):
            name = key[1].replace('"', "").replace("'", "")
            found.setdefault(f"{section}.{name}" if section else name, number)
    return found


def purpose(text: str) -> str:
    """The first sentence of the comment on top of a recipe."""
    comment = []
    for line in text.splitlines():
        if not line.startswith("#") or not line.strip("# "):
            break
        comment.append(line.lstrip("# ").rstrip())
    return " ".join(comment).partition(". ")[0].rstrip(".")


def plain(value: Any) -> Any:
    """A value as JSON: numbers as numbers, the rest of TOML as text."""
    if isinstance(value, dict):
        return {key: plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain(below) for below in value]
    if isinstance(value, Decimal):
        return float(value) if value.is_finite() else str(value)
    return value if isinstance(value, bool | int | float | str) else str(value)
