"""`run`: the steps of a recipe one after the other, each done once.

A step whose result is there and whose inputs have not changed is not done again: the digest of
its words and of what it reads decides, and a result of an earlier run is copied, so that every
run folder is whole. Commands are called through `invoke`, which is passed in; gates decide last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcptool import console, files
from dcptool.errors import GateFailed, Interrupted
from dcptool.network import artifact
from dcptool.pipeline import rundir, runstate
from dcptool.pipeline.recipe import Recipe, plain
from dcptool.pipeline.runstate import State
from dcptool.report.record import CHANGING, evaluated

Invoke = Callable[[str, list[str]], dict[str, Any]]

MANIFEST = "manifest.json"
EXPORTED = "model.onnx"
OF_ANY_TARGET = ("seed", "offline")


@dataclass(frozen=True)
class Step:
    """One command of a run: what it is pointed at, and what it leaves behind.

    `takes`: the model's `name`, the newest `network` (the name until there is an artifact), or
    the exported `file`. `makes`: an `artifact`, a `file`, or nothing but its document.
    """

    name: str
    command: str
    takes: str
    makes: str = ""


STEPS = (
    Step("analyze", "analyze", "name"),
    Step("baseline", "finetune", "name", "artifact"),
    Step("prune", "prune", "network", "artifact"),
    Step("finetune", "finetune", "network", "artifact"),
    Step("export", "export", "network", "file"),
    Step("evaluate", "evaluate", "file"),
    Step("bench", "bench", "network"),
)
# The record that a command keeps of its options; with it, it can go on where it was stopped.
RESUMABLE = {"prune": "prune.json", "finetune": "finetune.json"}


def steps_of(recipe: Recipe) -> list[Step]:
    """The steps that a recipe asks for, in order."""
    return [step for step in STEPS if recipe.has(step.name)]


@dataclass
class _Place:
    """Where the work stands: the newest network and the newest exported file."""

    folder: Path
    network: str
    is_artifact: bool = False
    file: str = ""
    reads: str = ""

    def target(self, step: Step, name: str) -> tuple[str, bool]:
        if step.takes == "name":
            return name, False
        if step.takes == "file" and self.file:
            return self.file, True
        return self.network, self.is_artifact

    def made(self, step: Step, record: Mapping[str, Any]) -> None:
        """Move on to what a step has left behind."""
        if step.makes == "artifact":
            self.network, self.is_artifact = str(self.folder / step.name), True
            self.reads = record["files"][f"{step.name}/{MANIFEST}"]
        elif step.makes == "file":
            name = next(name for name in record["files"] if name.endswith(".onnx"))
            self.file = str(self.folder / name)
            self.reads += record["files"][name]


def words_of(recipe: Recipe, step: Step, target: str, on_artifact: bool) -> list[str]:
    """The command line of a step, without where its result goes."""
    only = OF_ANY_TARGET if on_artifact else None
    words = [
        *recipe.words_for(step.name, of="model", only=only),
        *recipe.words_for(step.name, of="data"),
        *recipe.words_for(step.name, of=step.name),
    ]
    rate = recipe.get("prune", "rate")
    if step.name == "analyze" and rate is not None and recipe.get("analyze", "rate") is None:
        words.append(f"--rate={rate}")
    return [target, *words]


def run(
    recipe: Recipe,
    *,
    invoke: Invoke,
    runs: Path,
    resume: bool = False,
    again: str = "",
    common: tuple[str, ...] = (),
    in_study: bool = False,
) -> tuple[dict[str, Any], GateFailed | None]:
    """Do what `recipe` says in a folder below `runs`; returns the document and a gate that failed.

    `common` words (how much is said) go to every command; `again` is what to type after a stop.
    """
    began = time.monotonic()
    folder = runstate.choose(recipe, runs, resume=resume, half_done=_half_done, in_study=in_study)
    with files.lock_folder(folder):
        files.sweep(folder)
        state = State.open(folder, recipe)
        place = _Place(folder, str(recipe.get("model", "name")))
        for step in steps_of(recipe):
            record = _done(recipe, step, place, state) or _do(
                recipe, step, place, state, invoke=invoke, again=again, common=common
            )
            place.made(step, record)
        state.finish()
    if place.is_artifact:
        files.point_link(runs / rundir.LATEST, f"{folder.name}/{Path(place.network).name}")
    documents = {name: record["document"] for name, record in state.steps.items()}
    gates = verdicts(recipe, documents)
    document = {
        "recipe": recipe.name,
        "run": str(folder),
        "artifact": place.network if place.is_artifact else None,
        "file": place.file or None,
        "settings": plain(recipe.sections),
        "summary": summary(documents),
        "steps": [
            {
                "name": step.name,
                "skipped": state.steps[step.name]["skipped"],
                "seconds": state.steps[step.name]["seconds"],
                "document": documents[step.name],
            }
            for step in steps_of(recipe)
        ],
        "gates": gates,
        "seconds": round(time.monotonic() - began, 2),
    }
    return document, _failure(gates, folder, recipe)


def _digest(recipe: Recipe, step: Step, place: _Place) -> str:
    target, on_artifact = place.target(step, str(recipe.get("model", "name")))
    words = words_of(recipe, step, "" if on_artifact else target, on_artifact)
    reads = [runstate.stamp(path) for path in recipe.paths_for(step.name)]
    named = (recipe.get("model", "name"), recipe.get(step.name, "teacher"))
    reads += [
        runstate.stamp(Path(name) / artifact.MANIFEST)
        for name in named
        if isinstance(name, str) and artifact.is_artifact(name)
    ]
    return runstate.digest_of(step.name, words, reads, place.reads if on_artifact else "")


def _done(recipe: Recipe, step: Step, place: _Place, state: State) -> dict[str, Any] | None:
    """The record of a step that need not be done, from this run or copied from another."""
    digest = _digest(recipe, step, place)
    record = state.find(step.name, digest)
    if record is not None:
        console.note(f"{step.name}: done before, nothing has changed")
        return record
    origin = runstate.elsewhere(state.folder, step.name, digest)
    if origin is None:
        return None
    console.note(f"{step.name}: taken from {origin[0].name}, nothing has changed")
    return state.take_over(step.name, *origin)


def _do(
    recipe: Recipe,
    step: Step,
    place: _Place,
    state: State,
    *,
    invoke: Invoke,
    again: str,
    common: tuple[str, ...],
) -> dict[str, Any]:
    target, on_artifact = place.target(step, str(recipe.get("model", "name")))
    words = words_of(recipe, step, target, on_artifact)
    output = place.folder / step.name
    if step.makes == "artifact":
        if _half_done(place.folder, step.name):
            words = [f"--resume={output}"]
        else:
            # What lies there belongs to this run, and to a state of it that is no more.
            words += [f"--output={output}", *(["--force"] if output.exists() else [])]
    elif step.makes == "file":
        file = (Path(target) if on_artifact else place.folder) / EXPORTED
        words += [f"--onnx={file}", "--force"]
    console.note(f"{step.name}: dcptool {step.command} {target}")
    state.start(step.name, _digest(recipe, step, place))
    began = time.monotonic()
    try:
        document = invoke(step.command, [*words, *common])
    except Interrupted as err:
        err.try_ = again
        raise
    seconds = round(time.monotonic() - began, 2)
    made = _files(step, output, document)
    return state.record(step.name, document, seconds, made)


def _half_done(folder: Path, step: str) -> bool:
    command = next(one.command for one in STEPS if one.name == step)
    name = RESUMABLE.get(command)
    if name is None or (folder / step / MANIFEST).exists():
        return False
    return (folder / step / name).is_file()


def _files(step: Step, output: Path, document: Mapping[str, Any]) -> list[Path]:
    if step.makes == "artifact":
        return [path for path in sorted(output.iterdir()) if _belongs(path)]
    if step.makes == "file":
        return [Path(str(document[key])) for key in ("file", "labels") if document.get(key)]
    return []


def _belongs(path: Path) -> bool:
    return path.is_file() and not path.name.startswith(".") and path.name not in CHANGING


def top1_of(documents: Mapping[str, Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Top-1 of the dense network and of what came out in the end, in percent."""
    pruned, tuned = documents.get("prune", {}), documents.get("finetune", {})
    # Without a prune, what a fine-tune began with is the dense network.
    first = (pruned.get("dense"), pruned.get("before")) if pruned else (tuned.get("before"),)
    dense = next((s["top1"] for s in first if s and s.get("top1") is not None), None)
    last = evaluated(documents).get("top1")
    for side in (tuned.get("after"), pruned.get("slim")):
        if last is None:
            last = (side or {}).get("top1")
    return dense, last


def summary(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Dense against slim in a few numbers, out of the documents of the steps."""
    dense, slim = top1_of(documents)
    pruned = documents.get("prune", {})
    ratios = [entry["ratio"] for entry in documents.get("bench", {}).get("speedup", [])]
    return {
        "dense": {**_cost(pruned.get("dense")), "top1": dense},
        "slim": {
            **_cost(pruned.get("slim")),
            "top1": slim,
            "bytes": documents.get("export", {}).get("bytes"),
        },
        "speedup": {"least": min(ratios), "most": max(ratios)} if ratios else None,
    }


def _cost(side: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: (side or {}).get(key) for key in ("params", "macs")}


def verdicts(recipe: Recipe, documents: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """Every gate of the recipe with its limit and its value; what was not measured fails."""
    found: list[dict[str, object]] = []
    limit = recipe.get("gates", "max_accuracy_drop")
    if limit is not None:
        dense, last = top1_of(documents)
        drop = None if dense is None or last is None else round(dense - last, 4)
        found.append(_verdict("max_accuracy_drop", limit, drop, lambda v, most: v <= most))
    limit = recipe.get("gates", "min_speedup")
    if limit is not None:
        least = (summary(documents)["speedup"] or {}).get("least")
        found.append(_verdict("min_speedup", limit, least, lambda v, floor: v >= floor))
    return found


def _verdict(
    name: str, limit: Any, value: float | None, holds: Callable[[float, float], bool]
) -> dict[str, object]:
    ok = value is not None and holds(value, float(limit))
    return {"name": name, "limit": float(limit), "value": value, "ok": ok}


def _failure(gates: list[dict[str, object]], folder: Path, recipe: Recipe) -> GateFailed | None:
    failed = [gate for gate in gates if not gate["ok"]]
    if not failed:
        return None
    whys = [
        f"{gate['name']}: the limit is {gate['limit']:g}, "
        + ("nothing was measured" if gate["value"] is None else f"measured {gate['value']:.4g}")
        for gate in failed
    ]
    return GateFailed(
        f"{len(failed)} of {len(gates)} gates did not hold; the files are in {folder}",
        why="\n".join(whys),
        try_=f"{_advice({str(gate['name']) for gate in failed}, recipe)}: "
        "dcptool run RECIPE --set KEY=VALUE",
    )


def _advice(failed: set[str], recipe: Recipe) -> str:
    """What may help: to be fast more must go, to be right less."""
    keys = ("rate", "epsilon", "target_macs", "target_params", "target_latency")
    key = next((key for key in keys if recipe.get("prune", key) is not None), "rate")
    # A rate and an epsilon grow with what is removed, a target with what stays.
    more, less = ("larger", "smaller") if key in ("rate", "epsilon") else ("smaller", "larger")
    if failed == {"min_speedup"}:
        return f"a {more} prune.{key}"
    if failed == {"max_accuracy_drop"}:
        return f"a {less} prune.{key}, or more finetune.epochs"
    return f"a {more} prune.{key} with more finetune.epochs, or other gates"
