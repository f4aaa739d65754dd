"""Params and MACs, of a network as it is and of any plan for it.

A MAC is one multiply-accumulate of a conv or linear layer; norms, activations, pooling, adds,
attention products and biases are not counted. Plans are counted in closed form from the sites;
reported figures of a real network come from fvcore, and both agree to the last MAC (but for blur
filters, less than a thousandth of a network, which fvcore takes for convolutions).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dcptool.network.graph import ChannelGraph, Site
from dcptool.network.module_cuts import is_standardised

COUNTED = ("conv", "linear")


@dataclass(frozen=True)
class Cost:
    """Totals, and params and MACs of each site."""

    params: int
    macs: int
    by_site: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Counted:
    """What fvcore counted on a real network, and which operations it left out."""

    params: int
    macs: int
    macs_with_bias: int
    uncounted: tuple[str, ...]


def plan_cost(graph: ChannelGraph, module: nn.Module, dead: set[int] | None = None) -> Cost:
    """Cost of the network without the `dead` units, without building anything."""
    dead = dead or set()
    # The last place stands for all units beyond the table, and for negative ones, which are none.
    gone = np.zeros(max(dead, default=-1) + 2, dtype=bool)
    gone[list(dead)] = True
    by_site: dict[str, tuple[int, int]] = {}
    owned = 0
    for site in graph.sites.values():
        before, params, macs = _site_cost(site, module, gone)
        owned += before
        by_site[site.name] = params, macs
    total = sum(p.numel() for p in module.parameters())
    params = total - owned + sum(p for p, _ in by_site.values())
    return Cost(params, sum(m for _, m in by_site.values()), by_site)


def _site_cost(site: Site, module: nn.Module, gone: np.ndarray) -> tuple[int, int, int]:
    """Params as they are, and params and MACs without what is gone."""
    outputs, inputs = len(site.outputs), len(site.inputs)
    kept_out = int((~gone[np.clip(site.outputs, -1, len(gone) - 1)]).sum())
    kept_in = int((~gone[np.clip(site.inputs, -1, len(gone) - 1)]).sum())
    owner, _, leaf = site.name.rpartition(".")
    if site.kind == "parameter":
        tensor = getattr(module.get_submodule(owner), leaf)
        count = tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        return count, count * kept_out // max(outputs, 1), 0
    layer = module.get_submodule(site.name)
    own = dict(layer.named_parameters(recurse=False))
    before = sum(p.numel() for p in own.values())
    if site.kind not in COUNTED:
        return before, before * kept_out // outputs, 0
    weight = own["weight"].numel()
    per_pair = weight // (outputs * (inputs // site.groups))
    # A grouped layer loses whole groups, so that each output keeps all its inputs.
    width = kept_in if site.groups == 1 else inputs // site.groups
    slim = kept_out * width * per_pair
    rest = (before - weight) * kept_out // outputs
    if kept_in < inputs and "gain" in own and is_standardised(layer):
        rest -= kept_out  # its gain is baked into the weights
    return before, slim + rest, slim * site.positions


def count(module: nn.Module, input_size: tuple[int, ...]) -> Counted:
    """Count one image on the CPU with fvcore."""
    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    parameter = next(module.parameters())
    image = torch.zeros((1, *input_size), dtype=parameter.dtype, device=parameter.device)
    biases = _BiasCounter(module)
    with torch.no_grad(), warnings.catch_warnings(), biases:
        warnings.simplefilter("ignore")
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(module, image)
        analysis.set_op_handle("aten::_convolution_mode", _padded_by_name)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        analysis.tracer_warnings("none")
        operators = analysis.by_operator()
        left_out = [name for name in operators if name not in COUNTED]
        left_out += [name.removeprefix("aten::") for name in analysis.unsupported_ops()]
    macs = sum(int(operators[name]) for name in COUNTED)
    params = sum(p.numel() for p in module.parameters())
    return Counted(params, macs, macs + int(biases.total), tuple(sorted(set(left_out))))


def _padded_by_name(inputs: Sequence[Any], outputs: Sequence[Any]) -> Counter[str]:
    """A convolution with padding="same" or "valid", which fvcore does not know."""
    from fvcore.nn.jit_handles import conv_flop_count, get_shape

    x, weight = (get_shape(value) for value in inputs[:2])
    return Counter(conv=conv_flop_count(x, weight, get_shape(outputs[0]), transposed=False))


class _BiasCounter:
    """Adds one operation for each output of a layer with a bias, as some papers count."""

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            layer
            for layer in module.modules()
            if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear))
            and layer.bias is not None
        ]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.total = 0

    def __enter__(self) -> None:
        def add(layer: nn.Module, inputs: object, output: torch.Tensor) -> None:
            self.total += int(output.numel())

        self._hooks = [layer.register_forward_hook(add) for layer in self._layers]

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()
