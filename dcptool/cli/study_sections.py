"""The sections of a recipe that are no commands: [sweep], [scale] and [paper].

[sweep] makes a study of a recipe, [scale] shortens it by one number, [paper] says which table it
follows and what stands there. Only forms are checked here; every point of a sweep is checked as
the recipe that it comes to.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

from dcptool.pipeline.recipe import Key, Section
from dcptool.report.paper_table import LAYOUTS, MEASURES


def sections() -> dict[str, Section]:
    """The three sections and the forms of their keys."""
    return {
        "sweep": Section(
            {
                "over": _key(_dotted),
                "values": _key(_list_of(_scalar)),
                "names": _key(_table_of(_text)),
                "only": _key(_list_of(_text)),
                "rows": _key(_list_of(_row)),
            },
            whole=_fits,
        ),
        "scale": Section({"factor": _key(_factor)}, required=("factor",)),
        "paper": Section(
            {
                "table": _key(_text),
                "layout": _key(_layout),
                "column": _key(_text),
                "measures": _key(_list_of(_measure)),
                "baseline": _key(_quoted),
                "quoted": _key(_table_of(_quoted)),
                "structure": _key(_table_of_counts),
                "leaves_out": _key(_list_of(_text)),
                "with_bias": _key(_flag),
                "note": _key(_text),
            },
            required=("table", "measures"),
        ),
    }


def _key(check: Callable[[Any], None]) -> Key:
    def arguments(value: Any) -> list[str]:
        check(value)
        return []

    return Key(arguments)


def _text(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text is wanted")


def _flag(value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError("true or false is wanted")  # noqa: TRY004


def _scalar(value: Any) -> None:
    texts = isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)
    if not texts and not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"numbers or texts are wanted, not {value}")


def _dotted(value: Any) -> None:
    if not isinstance(value, str) or not all(value.partition(".")):
        raise ValueError("a key is wanted, such as prune.lambda")


def _factor(value: Any) -> None:
    number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if not number or not 0 < float(value) <= 1:
        raise ValueError("a number is wanted, 0 < factor <= 1, where 1 is the paper's own length")


def _layout(value: Any) -> None:
    if value not in LAYOUTS:
        raise ValueError(f"one of {', '.join(LAYOUTS)} is wanted")


def _measure(value: Any) -> None:
    if value not in MEASURES:
        raise ValueError(f"there is no measure {value!r}; there are {', '.join(MEASURES)}")


def _quoted(value: Any) -> None:
    if not isinstance(value, dict) or not value:
        raise ValueError("figures by their measure are wanted, such as { error_gap = 0.31 }")
    for name, one in value.items():
        _measure(name)
        if isinstance(one, bool) or not isinstance(one, str | int | float | Decimal):
            raise ValueError(f"the quoted {name} must be a number or a text")  # noqa: TRY004


def _list_of(check: Callable[[Any], None]) -> Callable[[Any], None]:
    def whole(value: Any) -> None:
        if not isinstance(value, list) or not value:
            raise ValueError("a list is wanted")
        for one in value:
            check(one)

    return whole


def _table_of(check: Callable[[Any], None]) -> Callable[[Any], None]:
    def whole(value: Any) -> None:
        if not isinstance(value, dict) or not value:
            raise ValueError("a table is wanted")
        for one in value.values():
            check(one)

    return whole


def _table_of_counts(value: Any) -> None:
    if not isinstance(value, dict) or not value:
        raise ValueError("layers and their input channels are wanted")
    if not all(isinstance(one, int) and one > 0 for one in value.values()):
        raise ValueError("input channels are counts of at least 1")


def _row(value: Any) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a row needs a name")  # noqa: TRY004
    extra = set(value) - {"name", "set", "without"}
    if extra:
        raise ValueError(f"a row has name, set and without, no {sorted(extra)[0]}")
    for key in (*value.get("set", {}), *(k for k in value.get("without", ()) if "." in k)):
        _dotted(key)


def _fits(table: dict[str, Any]) -> list[str]:
    """What the keys of [sweep] need of each other."""
    faults = []
    if ("over" in table) != ("values" in table):
        faults.append("sweep.over and sweep.values belong together")
    if "over" not in table and "rows" not in table:
        faults.append("sweep needs over and values, or rows")
    return faults
