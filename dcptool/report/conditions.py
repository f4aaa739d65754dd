"""Under which conditions a result holds: the network, its images, what was asked of the prune.

Settings that a method does not look at are left out, though every run records them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcptool import console
from dcptool.report import latency
from dcptool.report.record import Record, as_object, number
from dcptool.selection.methods import METHODS

FACTS = ("method", "solver", "target", "score", "lambda", "samples", "positions", "scope", "seed")
OF_LOSSES = frozenset(("score", "lambda"))
OF_REFITS = frozenset(("solver", "target", "positions"))
OF_DATA = frozenset(("samples",))
KINDS = {"macs": "MACs", "params": "params", "latency": "latency"}


def lines(record: Record) -> list[str]:
    """One line for each condition that is known."""
    manifest, pruned = record.manifest, record.lineage("prune")
    size = "x".join(map(str, manifest.input.size))
    found = [f"{manifest.base} at {size}, {manifest.base.num_classes} classes"]
    origin = record.lineage("dense").get("weights")
    if origin:
        found.append(f"dense weights: {origin}")
    metrics = manifest.metrics
    if metrics.get("source"):
        split = f", split {metrics['images']}" if metrics.get("images") else ""
        found.append(f"images: {metrics['source']}{split}")
    used = facts(pruned)
    how = [*asked(record), *(f"{k} {used[k]}" for k in ("method", "solver") if k in used)]
    if how:
        # Runs that do not tell how many updates there were have made some.
        trained = "with" if pruned.get("training") and pruned.get("stage_steps", 1) else "without"
        found.append(f"pruned by {', '.join(how)}, {trained} training in stages")
    tuned = record.lineage("finetune")
    if tuned:
        found.append(f"fine-tuned for {tuned.get('epochs')} epochs on {tuned.get('data')}")
    agreement = _agreement(record)
    if agreement:
        found.append(f"after pruning it agreed with the dense network on {agreement}")
    machine = latency.machine(record.bench)
    return [*found, *([f"timed on {machine}"] if machine else [])]


def facts(pruned: Mapping[str, Any]) -> dict[str, Any]:
    """Recorded settings of a prune that play a part in its method."""
    name = pruned.get("method")
    method = METHODS.get(name) if isinstance(name, str) else None
    idle: set[str] = set()
    if method is not None:
        idle |= set() if name == "dcp" else OF_LOSSES
        idle |= set() if method.refits else OF_REFITS
        idle |= set() if method.needs_data else OF_DATA
    return {
        key: pruned[key]
        for key in FACTS
        if key not in idle and pruned.get(key) is not None and pruned[key] != ""
    }


def asked(record: Record) -> list[str]:
    """What decided how many channels stay, in words."""
    document = record.documents.get("prune", {})
    pruned = {**document, **record.lineage("prune")}
    found = []
    drop = number(pruned.get("max_accuracy_drop"))
    if drop is not None:
        found.append(f"accuracy drop of at most {drop:g}")
    found += [f"{key} {pruned[key]}" for key in ("rate", "epsilon") if key in pruned]
    rates = as_object(pruned.get("rates"))
    found += [f"rate {rate} of {name}" for name, rate in rates.items()]
    found += ["plan"] if "plan" in pruned else []
    # The target of a search is that of its last trial, which nobody asked for.
    aims = [kind for kind in KINDS if f"target_{kind}" in pruned and drop is None]
    outcome = as_object(document.get("target"))
    found += [_target(kind, pruned[f"target_{kind}"], outcome) for kind in aims]
    if pruned.get("widths"):
        found.append(f"widths {pruned['widths']}")
    multiple = number(pruned.get("round_to"))
    if multiple is not None and multiple > 1:
        found.append(f"round to {multiple:g}")
    return found


def _target(kind: str, value: Any, outcome: Mapping[str, Any]) -> str:
    """A share of the dense network or an amount, and what the widths came to."""
    wanted, reached = number(outcome.get("wanted")), number(outcome.get("reached"))
    amount = number(value)
    if amount is None:
        return f"at most {value} {KINDS[kind]}"
    # What was given as an amount is what was wanted, even where it is below one.
    is_share = amount <= 1 and amount != wanted
    share = f"{100 * amount:.4g} % of the {KINDS[kind]}"
    text = f"at most {share if is_share else _amount(kind, amount)}"
    return text if reached is None else f"{text} (reached {_amount(kind, reached)})"


def _amount(kind: str, amount: float) -> str:
    if kind == "latency":
        return f"{amount:.3g} ms"
    return f"{console.quantity(amount)} {KINDS[kind]}"


def _agreement(record: Record) -> str:
    told = as_object(record.documents.get("prune", {}).get("agreement"))
    sources = [(told.get("top1"), told.get("images"))]
    for part in record.parts:
        metrics = part.manifest.metrics
        sources.append((metrics.get("agreement"), metrics.get("agreement_images")))
    for share, count in sources:
        top1, images = number(share), number(count)
        if top1 is not None:
            of = "images" if images is None else f"{images:.0f} image{'s' if images != 1 else ''}"
            return f"{top1:.1f} % of {of}"
    return ""
