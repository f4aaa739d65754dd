"""torch-pruning, on the groups and counts that dcptool would cut."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import nn

from dcptool.network.base import Network
from dcptool.network.graph import build_graph
from dcptool.selection.settings import Selection


def torch_pruning(network: Network, settings: Selection, batches: list, row: str) -> nn.Module:
    """A copy of the network, cut by one of its criteria; Taylor's sees images with labels."""
    import torch_pruning as tp

    module = copy.deepcopy(network.module).eval()
    graph = build_graph(network.module, network.input.size)
    wanted = {
        module.get_submodule(producer): 1 - (settings.kept(group) or 0) / len(group.units)
        for group in settings.groups(graph)
        for producer in group.producers
    }
    importance = {
        "tp-l1": lambda: tp.importance.MagnitudeImportance(p=1),
        "tp-magnitude": lambda: tp.importance.GroupMagnitudeImportance(p=1),
        "tp-bn-scale": tp.importance.BNScaleImportance,
        "tp-group-norm": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "tp-taylor": tp.importance.GroupTaylorImportance,
    }[row]()
    if row == "tp-taylor":
        for x, y in batches:
            F.cross_entropy(module(x), y).backward()
    tp.pruner.BasePruner(
        module,
        batches[0][0][:1],
        importance=importance,
        pruning_ratio=0.0,
        pruning_ratio_dict=wanted,
    ).step()
    module.zero_grad(set_to_none=True)
    return module
