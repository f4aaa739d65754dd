"""`report.html`: one file that opens from the disk, and `comparison.html` for several runs.

All text goes through jinja2 with autoescape, and the page forbids itself any connection. Writing
it after a command is a courtesy: `after` turns every failure into a warning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dcptool import __version__, console, files
from dcptool.report import architecture, charts, conditions, latency, sections
from dcptool.report.record import Record, collect, keep_result

PAGE, COMPARISON = "report.html", "comparison.html"
PLACE = Path(__file__).parent
# Section, and what to do where it has nothing to show.
FILLED_BY = {
    "architecture": "the network is a module of your own: dcptool.analyze shows it in Python",
    "selection": "dcptool prune records the curves of each layer",
    "features": "dcptool report --features LAYER --images 4",
    "training": "dcptool finetune records the curves",
    "classes": "dcptool prune or finetune with labelled images records the accuracy of each class",
    "latency": "dcptool bench --profile",
}


def after(
    folder: Path, command: str = "", document: Mapping[str, Any] | None = None, typed: str = ""
) -> None:
    """Write the report of a run at the end of a command; what goes wrong is only told.

    The `document` of the command is left in the run before, where one is given.
    """
    try:
        if document is not None:
            keep_result(folder, command, document, typed)
        console.note(f"report: {write(folder)['file']}")
    except Exception as err:
        said = str(err).splitlines()[0] if str(err) else type(err).__name__
        console.warn(f"no report written: {said}; dcptool report {folder} tries again")


def write(folder: Path, *, pictures: Path | None = None) -> dict[str, Any]:
    """Write `report.html` of one run; returns its place and its sections."""
    record = collect(folder)
    built = architecture.read(record)
    found = contexts(record, built)
    missing = {name: text for name, text in FILLED_BY.items() if found.get(name) is None}
    text = render("template.html", record=record, found=found, missing=missing)
    path = folder / PAGE
    data = text.encode()
    files.sweep(folder)
    files.publish(path, data)
    document: dict[str, Any] = {
        "file": str(path),
        "bytes": len(data),
        "sections": [name for name, context in found.items() if context is not None],
        "missing": missing,
    }
    if pictures is not None:
        document["pictures"] = _draw(found, pictures)
    return document


def contexts(record: Record, built: architecture.Architecture | None) -> dict[str, Any]:
    """All sections of a page in their order; None where there is nothing to show."""
    return {
        "answer": sections.answer(record, built),
        "architecture": sections.layers(built) if built is not None else None,
        "selection": sections.selection(record),
        "features": _features(record.features),
        "training": sections.training(record),
        "classes": sections.classes(record),
        "latency": latency.section(record.bench),
    }


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Write the report of every run, and a page beside the first that compares them."""
    rows: list[dict[str, Any]] = []
    for folder in folders:
        write(folder)
        record = collect(folder)
        dense, slim = sections.accuracies(record)
        cost = sections.costs(record, None)
        pairs = latency.pairs(record.bench)
        rows.append(
            {
                "name": record.name,
                "link": quote(_relative(folder / PAGE, folders[0].resolve().parent)),
                "model": str(record.manifest.base),
                "dense_macs": cost["dense"].get("macs"),
                "method": str(record.lineage("prune").get("method", "")),
                "budget": ", ".join(conditions.asked(record)),
                "dense_top1": dense,
                "top1": slim,
                "macs": cost["slim"].get("macs"),
                "params": cost["slim"].get("params"),
                "macs_ratio": _ratio(cost, "macs"),
                "bytes": record.manifest.weights_bytes,
                "ms": pairs[0]["after"] if pairs else None,
                "timed_at": pairs[0]["condition"] if pairs else "",
                "speedup": pairs[0]["ratio"] if pairs else None,
            }
        )
    dots = [
        (float(r["macs"]), r["top1"], r["name"])
        for r in rows
        if r["macs"] and r["top1"] is not None
    ]
    front = pareto([(x, y) for x, y, _ in dots])
    uncut = {
        (float(r["dense_macs"]), r["dense_top1"], f"dense {r['model']}")
        for r in rows
        if r["dense_macs"] and r["dense_top1"] is not None
    }
    chart = ""
    if dots:
        title = "Accuracy against MACs of all runs"
        chart = charts.points(
            dots, front, title=title, x_name="MACs", y_name="top-1 %", dense=sorted(uncut)
        )
    text = render("comparison.html", rows=rows, chart=chart)
    path = folders[0].resolve().parent / COMPARISON
    files.publish(path, text.encode())
    best = [name for x, y, name in dots if (x, y) in front]
    return {"file": str(path), "sections": ["comparison"], "runs": rows, "pareto": best}


def pareto(dots: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both ways: less cost, more accuracy."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(dots), key=lambda dot: (dot[0], -dot[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def render(template: str, **values: Any) -> str:
    """A template of ours with these values, style and script inside."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PLACE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quantity"] = console.quantity

    def own(name: str) -> Markup:
        return Markup((PLACE / name).read_text(encoding="utf-8"))

    return environment.get_template(template).render(
        version=__version__,
        style=own("page.css") + own("charts.css"),
        script=own("page.js"),
        **values,
    )


def _features(found: Mapping[str, Any]) -> dict[str, Any] | None:
    images = found.get("images")
    named = all(key in found for key in ("layer", "kept", "removed", "shown_kept", "shown_removed"))
    if not isinstance(images, list) or not images or not named:
        return None
    # Pictures are embedded; anything else in the file must not become an address.
    sound = all(
        isinstance(image, dict)
        and "name" in image
        and all(
            str(image.get(k)).startswith("data:image/png;base64,")
            for k in ("input", "kept", "removed")
        )
        for image in images
    )
    return dict(found) if sound else None


def _draw(found: Mapping[str, Any], folder: Path) -> list[str]:
    """The charts of a page as files of their own."""
    files.make_folder(folder)
    made = {}
    if found["architecture"] is not None:
        made["architecture"] = found["architecture"]["chart"]
    for group in (found["selection"] or {}).get("groups", []):
        made[f"loss-{group['name']}"] = group["chart"]
        made[f"norms-{group['name']}"] = group["norms"]
    for number, chart in enumerate((found["training"] or {}).get("charts", [])):
        made[f"training-{number + 1}"] = chart
    for number, one in enumerate((found["latency"] or {}).get("charts", [])):
        made[f"latency-{number + 1}"] = one["chart"]
    paths = []
    for name, chart in made.items():
        if not chart:
            continue
        path = folder / f"{''.join(c if c.isalnum() or c in '.-_' else '-' for c in name)}.svg"
        files.publish(path, charts.standalone(chart))
        paths.append(str(path))
    return paths


def _ratio(cost: Mapping[str, Mapping[str, int]], key: str) -> float | None:
    dense, slim = cost["dense"].get(key), cost["slim"].get(key)
    return dense / slim if dense and slim else None


def _relative(path: Path, start: Path) -> str:
    import os

    return os.path.relpath(path.resolve(), start)
