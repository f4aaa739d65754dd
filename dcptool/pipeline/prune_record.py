"""What a prune leaves behind while it runs: a record of each group, and a state to resume."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dcptool import console, files
from dcptool.errors import InputError, UsageError
from dcptool.network.base import Cut
from dcptool.selection.choice import Choice
from dcptool.selection.heads import Head
from dcptool.selection.settings import Recorded
from dcptool.selection.stages import Progress

STEPS_FILE = "steps.jsonl"
WIDTHS_FILE = "widths.json"
SEARCH_FILE = "search.json"
TRIALS = "trials"
CHECKPOINTS = "checkpoints"
OPTIONS_FILE = "prune.json"


def begin(folder: Path, choices: Sequence[Choice]) -> None:
    """Start the record with what is decided already."""
    files.remove(folder / STEPS_FILE)
    for choice in choices:
        record(folder, choice)


def clear(folder: Path) -> None:
    """Remove what an older run decided here, so that a new one does not take it for its own."""
    for name in (STEPS_FILE, WIDTHS_FILE, SEARCH_FILE):
        files.remove(folder / name)
    clear_checkpoints(folder)
    if (folder / TRIALS).is_dir():
        shutil.rmtree(folder / TRIALS)


def record(folder: Path, choice: Choice) -> None:
    """Append what was decided for one group."""
    line = {
        "group": choice.group,
        "units": choice.units,
        "kept": list(choice.kept),
        "order": list(choice.order),
        "smallest": choice.smallest,
        "losses": [float(f"{loss:.6g}") for loss in choice.losses],
        "norms": [float(f"{norm:.6g}") for norm in choice.norms],
        "dead": choice.dead,
        "stopped": choice.why_stopped,
    }
    files.append(folder / STEPS_FILE, json.dumps(line) + "\n")


def read_orders(run: Path, method: str) -> dict[str, Recorded]:
    """The orders that an earlier run of the same method recorded, by group."""
    path = run / STEPS_FILE
    if not path.is_file():
        raise InputError(
            f"cannot reuse {run}",
            why=f"there is no {STEPS_FILE} in it",
            try_="--reuse names the folder of an earlier prune",
        )
    options = run / OPTIONS_FILE
    known = files.read_json(options, what="the options of a run") if options.is_file() else {}
    if known.get("method", method) != method:
        raise UsageError(
            f"--reuse cannot serve --method {method}",
            why=f"the orders in {run} are those of {known['method']}",
            try_=f"--method {known['method']}, or leave --reuse out",
        )
    found: dict[str, Recorded] = {}
    text = files.read_bytes(path, what="the record of a run").decode("utf-8", "replace")
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entry = json.loads(line)
            recorded = Recorded(
                int(entry["units"]),
                tuple(int(unit) for unit in entry["order"]),
                tuple(float(loss) for loss in entry["losses"]),
                int(entry["smallest"]),
            )
            name = str(entry["group"])
        except (ValueError, KeyError, TypeError) as err:
            raise InputError(
                f"cannot reuse {run}", why=f"line {number} of {STEPS_FILE} is damaged"
            ) from err
        if sorted(set(recorded.order)) != sorted(recorded.order) or not all(
            0 <= unit < recorded.units for unit in recorded.order
        ):
            raise InputError(f"cannot reuse {run}", why=f"the order of {name} is no order")
        found[name] = recorded
    return found


def tree(progress: Progress, head: Head | None) -> dict[str, Any]:
    """Progress in the form that checkpoints keep."""
    return {
        "stage": progress.stage,
        "place": progress.place,
        "layer": progress.layer,
        "cuts": {k: [c.inputs, c.outputs, c.dim] for k, c in progress.cuts.items()},
        "removed": list(progress.removed),
        "choices": [asdict(choice) for choice in progress.choices],
        "weights": {k: v.cpu() for k, v in progress.weights.items()},
        "slopes": dict(progress.slopes),
        "head": dict(head.state_dict()) if head is not None else None,
    }


def progress_of(saved: Mapping[str, Any]) -> Progress:
    """Progress from what a checkpoint kept."""

    def indices(value: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if value is None else tuple(value)

    def choice(entry: Mapping[str, Any]) -> Choice:
        lists = ("kept", "losses", "order", "norms")
        fields: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in entry.items()}
        return Choice(**fields)

    return Progress(
        saved["stage"],
        saved["place"],
        saved["layer"],
        {k: Cut(indices(i), indices(o), dim) for k, (i, o, dim) in saved["cuts"].items()},
        tuple(saved["removed"]),
        tuple(choice(entry) for entry in saved["choices"]),
        saved["weights"],
        saved["slopes"],
    )


def has_state(folder: Path) -> bool:
    """Whether a stopped run has something to go on from."""
    place = folder / CHECKPOINTS
    found = [*place.glob("state-*"), *place.glob("stage-*/state-*")]
    return bool(found) or any((folder / name).exists() for name in (SEARCH_FILE, TRIALS))


def clear_checkpoints(folder: Path) -> None:
    """Remove the states of a run that is through."""
    place = folder / CHECKPOINTS
    for path in [*place.glob("state-*.safetensors"), *place.glob("stage-*/state-*.safetensors")]:
        files.remove(path)
    for old in [*place.glob("stage-*"), place]:
        with suppress(OSError):
            old.rmdir()


def next_commands(folder: Path, *, is_latest: bool) -> str:
    """What to type after a prune; the newest run need not be named."""
    console.detail(f"record of each group: {folder / STEPS_FILE}")
    named = "" if is_latest else f" {shlex.quote(str(folder))}"
    return f"next: dcptool finetune{named}, dcptool export{named} --onnx, dcptool bench{named}"
