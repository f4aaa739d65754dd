"""The closed form, fvcore and torch's own counter agree to the last MAC, dense and cut."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dcptool.network import models
from dcptool.network.cost import count, plan_cost
from dcptool.network.graph import build_graph
from dcptool.network.surgery import cut, plan_cuts, removed_units

NETWORKS = [
    "zoo:resnet20",
    "zoo:vggnet",
    "timm:test_resnet",
    "timm:test_efficientnet",
    "timm:test_byobnet",
    "timm:test_convnext",
    "timm:test_vit",
    "timm:test_nfnet",
    "timm:test_efficientnet_evos",
    "timm:mobilenetv3_small_050",
    "timm:mobilevit_xxs",
    "timm:maxvit_rmlp_pico_rw_256",
    "timm:swin_tiny_patch4_window7_224",
    "torchvision:shufflenet_v2_x0_5",
]


def by_torch(module: nn.Module, size: tuple[int, ...]) -> int:
    """Multiply-accumulates of conv and linear; attention products are other operators."""
    aten = torch.ops.aten
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(torch.zeros(1, *size))
    found = counter.get_flop_counts()["Global"]
    return sum(found.get(op, 0) for op in (aten.convolution, aten.addmm, aten.mm)) // 2


@pytest.mark.parametrize("name", NETWORKS)
def test_three_counters_agree_dense_and_cut(name: str) -> None:
    network = models.load(name, pretrained=False)
    module, size = network.module, network.input.size
    graph = build_graph(module, size)
    dense = plan_cost(graph, module)
    counted = count(module, size)
    assert dense.params == counted.params == sum(p.numel() for p in module.parameters())
    assert dense.macs == counted.macs == by_torch(module, size)
    kept = {g.name: range(len(g.units) // 3 + 1) for g in graph.open_groups("all", True)}
    dead = removed_units(graph, kept)
    assert dead
    slim = copy.deepcopy(module)
    cut(slim, plan_cuts(graph, dead))
    planned, recounted = plan_cost(graph, module, dead), count(slim, size)
    assert planned.params == recounted.params < dense.params
    assert planned.macs == recounted.macs == by_torch(slim, size)
    assert planned.macs < dense.macs


def test_sites_add_up_to_the_total() -> None:
    network = models.load("timm:test_resnet", pretrained=False)
    cost = plan_cost(build_graph(network.module, network.input.size), network.module)
    assert sum(macs for _, macs in cost.by_site.values()) == cost.macs
    assert sum(params for params, _ in cost.by_site.values()) == cost.params


def test_what_is_left_out_is_listed() -> None:
    network = models.load("timm:test_vit", pretrained=False)
    uncounted = count(network.module, network.input.size).uncounted
    assert "layer_norm" in uncounted
    assert "conv" not in uncounted
    assert any("attention" in name or "matmul" in name for name in uncounted)


def test_biases_can_be_counted_too() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 25, 7))
    counted = count(net, (3, 5, 5))
    assert counted.macs == 4 * 3 * 9 * 25 + 700
    assert counted.macs_with_bias == counted.macs + 4 * 25 + 7
    assert not any(layer._forward_hooks for layer in net.modules())


def test_transposed_convolutions_count_their_inputs() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ConvTranspose2d(4, 6, 2, stride=2))
    graph = build_graph(net, (3, 5, 5))
    assert plan_cost(graph, net).by_site["1"] == (4 * 6 * 4 + 6, 25 * 4 * 6 * 4)
    assert plan_cost(graph, net).macs == by_torch(net, (3, 5, 5))


def test_a_layer_called_twice_costs_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(self.a(x))

    net = Twice()
    assert plan_cost(build_graph(net, (3, 5, 5)), net).macs == 2 * 81 * 25


def test_padding_by_its_name_counts_too() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 5, padding="same"), nn.Conv2d(8, 4, 3, padding="valid"))
    counted = count(module, (3, 12, 12))
    assert counted.macs == 8 * 3 * 25 * 144 + 4 * 8 * 9 * 100
    assert counted.macs == plan_cost(build_graph(module, (3, 12, 12)), module).macs
    assert "_convolution_mode" not in counted.uncounted
