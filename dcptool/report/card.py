"""A model card: Markdown with the metadata that Hugging Face reads, from the report's numbers.

Named README.md, as it must be called in a repository of models; one that was not written here is
left alone. Values of others go into the metadata as JSON strings, which YAML reads as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dcptool import __version__, files
from dcptool.errors import UsageError
from dcptool.report import sections
from dcptool.report.record import Record

CARD = "README.md"
MARK = "<!-- written by dcptool report --card -->"


def write_card(record: Record) -> Path:
    """Write the card beside the newest artifact of a run."""
    path = record.parts[0].folder / CARD
    if path.exists() and MARK.encode() not in files.read_bytes(path, what="model card"):
        raise UsageError(
            f"{path} exists already",
            why="it was not written by dcptool report --card",
            try_=f"mv {path} {path}.old",
        )
    files.publish(path, text_of(record).encode())
    return path


def text_of(record: Record) -> str:
    """The whole card."""
    manifest = record.manifest
    told = sections.answer(record, None)
    rows = [
        f"| {_cell(r['name'])} | {_cell(r['dense'])} | {_cell(r['slim'])} | {_cell(r['ratio'])} |"
        for r in told["rows"]
    ]
    size = " x ".join(map(str, manifest.input.size))
    is_cut = bool(manifest.cuts)
    done = "with channels removed" if is_cut else "trained"
    names = "dense | slim" if is_cut else "before | after"
    lines = [
        *_metadata(record),
        MARK,
        "",
        f"# {_plain(record.name)}",
        "",
        f"{_plain(str(manifest.base))} {done} by dcptool {__version__}.",
        "",
        f"| | {names} | |",
        "|---|--:|--:|--:|",
        *rows,
        "",
        "MACs are multiply-accumulates of conv and linear layers, for one image.",
        "",
        *(f"- {_plain(line)}" for line in told["conditions"]),
        "",
        "## Use",
        "",
        "```python",
        "import dcptool",
        "",
        'model = dcptool.load("PATH")  # this folder; a torch.nn.Module in eval mode',
        "```",
        "",
        f"Input: {size}, mean {list(manifest.input.mean)}, std {list(manifest.input.std)}, "
        f"{_plain(manifest.input.interpolation)}, crop {manifest.input.crop_pct:g}.",
        "",
        "## Made by",
        "",
        "```sh",
        *(" ".join(line.split()).replace("```", "") for line in told["commands"]),
        "```",
        "",
        "## Limits",
        "",
        "What the dense network cannot do, this one cannot do either. Its accuracy holds for "
        "images of the kind it was measured on.",
    ]
    return "\n".join(lines) + "\n"


def _metadata(record: Record) -> list[str]:
    manifest = record.manifest
    done = ["channel-pruning"] if manifest.cuts else []
    tags = ["image-classification", *done, "dcptool", manifest.base.source]
    lines = [
        "---",
        "library_name: dcptool",
        "pipeline_tag: image-classification",
        "tags:",
        *(f"- {_yaml(tag)}" for tag in dict.fromkeys(tags)),
    ]
    _, top1 = sections.accuracies(record)
    source = manifest.metrics.get("source")
    if top1 is not None and source:
        lines += [
            "metrics:",
            "- accuracy",
            "model-index:",
            f"- name: {_yaml(record.name)}",
            "  results:",
            "  - task:",
            "      type: image-classification",
            "    dataset:",
            f"      name: {_yaml(source)}",
            f"      type: {_yaml(source)}",
            "    metrics:",
            "    - type: accuracy",
            f"      value: {round(top1 / 100, 6)}",
        ]
    return [*lines, "---"]


def _yaml(value: Any) -> str:
    return json.dumps(str(value), ensure_ascii=True)


def _plain(text: str) -> str:
    """Text on one line in which nothing is markup."""
    flat = " ".join(text.split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace("`", "'")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")
