"""What each width of each group costs in error, before anything is cut.

The curve of a group is the error of the network's scores when this group alone is cut to a width
and its readers are solved for. Which units stay is what the readers lose least by, relative to the
tensor that carries the whole signal: inside a residual block that is the sum. (KL from the dense
network on images not used, at the MACs of one rate for all, whose own KL comes first; by the error
of the readers alone, and by that of the scores: MobileNetV2 at 0.3 0.476, 0.383, 0.239; ResNet-56
at 0.7 0.372, 0.138, 0.097; SqueezeNet at 0.2 0.725, 0.216, 0.226.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dcptool import console
from dcptool.network.base import Network
from dcptool.network.graph import Group
from dcptool.network.surgery import bake_all
from dcptool.selection.gram import backward_order, relative
from dcptool.selection.samples import share
from dcptool.selection.sensitivity import Seen, Sensitivity
from dcptool.selection.settings import Selection
from dcptool.selection.stage import Stage
from dcptool.selection.store import Room
from dcptool.selection.widths import Curve
from dcptool.training.dist import SINGLE, Dist


def measure(
    network: Network,
    images: Sequence[Tensor],
    settings: Selection,
    dist: Dist = SINGLE,
    device: str = "cpu",
) -> dict[str, Curve]:
    """The curve of every group that is to be cut."""
    dense = copy.deepcopy(network.module).eval().to(device)
    bake_all(dense)
    settings = replace(settings, solver="gram")  # whatever solves afterwards, curves are solved for
    room = Room(int(settings.cache_gb * 2**30), device=device)
    samples = share(images, dist, device)
    stage = Stage(network, dense, dense, {}, settings, room, samples, None, ())
    groups = settings.groups(stage.graph)
    order = {name: i for i, name in enumerate(stage.graph.sites)}
    ends: dict[str, list[Group]] = {}
    for group in groups:
        ends.setdefault(max(group.consumers, key=order.__getitem__), []).append(group)
    waiting = {name for group in groups for name in group.consumers}
    seen: dict[str, Seen] = {}
    found: dict[str, Curve] = {}
    try:
        with torch.no_grad(), console.progress("curves", len(groups)) as task:
            stage.probe.begin(0)
            sensitivity = Sensitivity(stage)
            for place in range(len(stage.chain.segments)):
                for name in stage.probe.segment.layers:
                    if name in waiting and stage.probe.readable(name):
                        moments = stage.probe.moments(name, None)
                        problem, _ = stage.problems.before(name, moments)
                        problem = relative(problem, stage.probe.carried(name))
                        seen[name] = Seen(problem, moments, stage.probe.output_weights(name))
                    for group in ends.get(name, []):
                        found[group.name] = dist.broadcast(_curve(stage, sensitivity, group, seen))
                        task.advance(1, group.name)
                        groups = [g for g in groups if g is not group]
                    still = {reader for group in groups for reader in group.consumers}
                    seen = {reader: known for reader, known in seen.items() if reader in still}
                if place + 1 < len(stage.chain.segments):
                    stage.probe.advance()
    finally:
        room.close()
    return found


def _curve(stage: Stage, sensitivity: Sensitivity, group: Group, seen: Mapping[str, Seen]) -> Curve:
    readers = [name for name in group.consumers if name in seen]
    if not readers:
        return tuple(0.0 for _ in range(len(group.units) + 1))
    problems = [stage.about(seen[name].problem, name, group) for name in readers]
    return sensitivity.curve(group, backward_order(problems, len(group.units)), seen)
