"""torch-pruning, on the groups and counts that dcptool would cut."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import nn

from dcptool.network.base import Network
from dcptool.network.cost import count
from dcptool.network.graph import build_graph
from dcptool.selection.settings import Selection

# Halvings until the MACs are those that are wanted.
STEPS = 12


def torch_pruning(
    network: Network, settings: Selection, batches: list, row: str, macs: int = 0
) -> nn.Module:
    """A copy of the network, cut by one of its criteria; Taylor's sees images with labels.

    A row that ends in "-global" ranks the channels of all groups together, as many of them as
    leave at most these MACs; the others take the counts of the settings.
    """
    rule = row.removesuffix("-global")
    graph = build_graph(network.module, network.input.size)
    groups = settings.groups(graph)
    if rule == row:
        counts = {
            producer: 1 - (settings.kept(group) or 0) / len(group.units)
            for group in groups
            for producer in group.producers
        }
        return _pruned(network, batches, rule, counts)
    open_ones = {producer for group in groups for producer in group.producers}
    low, high = 0.0, 1.0
    slim = network.module
    for _ in range(STEPS):
        ratio = (low + high) / 2
        tried = _pruned(network, batches, rule, dict.fromkeys(open_ones, ratio), together=True)
        if count(tried, network.input.size).macs > macs:
            low = ratio
        else:
            slim, high = tried, ratio
    return slim


def _pruned(
    network: Network, batches: list, rule: str, ratios: dict[str, float], *, together: bool = False
) -> nn.Module:
    import torch_pruning as tp

    module = copy.deepcopy(network.module).eval()
    importance = {
        "tp-l1": lambda: tp.importance.MagnitudeImportance(p=1),
        "tp-magnitude": lambda: tp.importance.GroupMagnitudeImportance(p=1),
        "tp-bn-scale": tp.importance.BNScaleImportance,
        "tp-group-norm": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "tp-taylor": tp.importance.GroupTaylorImportance,
    }[rule]()
    if rule == "tp-taylor":
        for x, y in batches:
            F.cross_entropy(module(x), y).backward()
    layers = (nn.Conv2d, nn.Linear)
    wanted = {module.get_submodule(name): ratio for name, ratio in ratios.items()}
    how: dict = {"pruning_ratio": 0.0, "pruning_ratio_dict": wanted}
    if together:
        others = [m for m in module.modules() if isinstance(m, layers) and m not in wanted]
        how = {"pruning_ratio": max(ratios.values()), "global_pruning": True}
        how["ignored_layers"] = others
    tp.pruner.BasePruner(module, batches[0][0][:1], importance=importance, **how).step()
    module.zero_grad(set_to_none=True)
    return module
