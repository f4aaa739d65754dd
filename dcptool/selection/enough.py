"""How many images a network needs: until what was solved from those seen fits the next ones too.

`useful` is a bound that needs no image: as many as give every reader its rows. `enough` takes a
few layers of the dense network, spread over its depth, the one with most columns among them. After
each doubling their solution from the images so far is tried on the new ones; when the error there
is hardly larger, more images would change little. Needs no label.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dcptool import console
from dcptool.network.base import Network
from dcptool.network.graph import Group, build_graph
from dcptool.network.surgery import bake_all
from dcptool.selection.gram import Moments, backward_order, error, refit
from dcptool.selection.limits import columns_of
from dcptool.selection.probe import ENOUGH_ROWS
from dcptool.selection.samples import share
from dcptool.selection.settings import Selection
from dcptool.selection.stage import Stage
from dcptool.selection.store import Room

# Images below which none are left out, whatever the rows: those of one image are alike. KL from the
# dense network on images not used, ResNet-56 at rate 0.7: 0.496 with 512, 0.427 with 2,048, 0.421
# with 4,096, 0.392 with 16,384.
PLENTY = 4096
LAYERS = 4
# Error on unseen images over error on seen ones.
CLOSE = 1.1


def useful(network: Network, settings: Selection) -> int:
    """Images beyond which the closed form would gather no further row of any reader."""
    graph = build_graph(network.module, network.input.size)
    needed = [
        ENOUGH_ROWS
        * (columns_of(network.module.get_submodule(name)) + 1)
        / min(settings.positions, graph.sites[name].positions)
        for group in settings.groups(graph)
        for name in group.consumers
    ]
    return max(PLENTY, math.ceil(max(needed, default=0)))


def enough(
    network: Network,
    blocks: Iterable[Sequence[Tensor]],
    settings: Selection,
    device: str = "cpu",
) -> int:
    """The number of images after which solutions hold; each block doubles what was seen."""
    groups = _chosen(network, settings)
    seen: dict[str, Moments] = {}
    images = 0
    for block in blocks:
        fresh = _look(network, block, settings, groups, device)
        images += sum(len(batch) for batch in block)
        if seen:
            worst = max(_ratio(seen[n], fresh[n], settings, groups[n]) for n in fresh)
            console.detail(f"{images} images: error on unseen over seen ones {worst:.2f}")
            if worst <= CLOSE:
                break
        seen = {name: _sum(seen.get(name), moments) for name, moments in fresh.items()}
    return images


def _chosen(network: Network, settings: Selection) -> dict[str, Group]:
    """Some readers and the groups they read, by name: spread over the depth, and the widest."""
    graph = build_graph(network.module, network.input.size)
    order = {name: i for i, name in enumerate(graph.sites)}
    found = {max(group.consumers, key=order.__getitem__): group for group in settings.groups(graph)}
    names = sorted(found, key=order.__getitem__)
    step = max(1, len(names) // LAYERS)

    def columns(name: str) -> int:
        return columns_of(network.module.get_submodule(name))

    some = dict.fromkeys([*names[::-step], max(names, key=columns)])
    return {name: found[name] for name in some}


def _look(
    network: Network,
    block: Sequence[Tensor],
    settings: Selection,
    groups: Mapping[str, Group],
    device: str,
) -> dict[str, Moments]:
    """Sums of moments of the chosen readers over one block of images."""
    dense = copy.deepcopy(network.module).eval().to(device)
    bake_all(dense)
    settings = replace(settings, solver="gram")  # the moments are those of the closed form
    room = Room(int(settings.cache_gb * 2**30), device=device)
    stage = Stage(network, dense, dense, {}, settings, room, share(block, device=device), None, ())
    found: dict[str, Moments] = {}
    last = max(stage.chain.place_of(name) for name in groups)
    try:
        with torch.no_grad():
            stage.probe.begin(0)
            for place in range(last + 1):
                for name in stage.probe.segment.layers:
                    if name in groups and stage.probe.readable(name):
                        mean = stage.probe.moments(name, groups[name])
                        found[name] = _times(mean, mean.rows)
                if place < last:
                    stage.probe.advance()
    finally:
        room.close()
    return found


def _times(moments: Moments, factor: float) -> Moments:
    return Moments(
        moments.s * factor,
        moments.c * factor,
        moments.energy * factor,
        moments.unit,
        moments.rows,
    )


def _sum(one: Moments | None, other: Moments) -> Moments:
    if one is None:
        return other
    return Moments(
        one.s + other.s,
        one.c + other.c,
        one.energy + other.energy,
        one.unit,
        one.rows + other.rows,
    )


def _ratio(seen: Moments, fresh: Moments, settings: Selection, group: Group) -> float:
    """Error on fresh images over error on those that order and weights come from."""
    seen, fresh = seen.mean(), fresh.mean()
    units = len(group.units)
    kept = settings.kept(group) or max(1, units // 2)
    stay = torch.tensor(backward_order([seen], units, count=kept).order[:kept])
    columns = torch.isin(seen.unit, stay) | (seen.unit < 0)
    weights = refit(seen, columns, ridge=settings.ridge)
    return error(fresh, weights) / max(error(seen, weights), 1e-12 * seen.variance)
