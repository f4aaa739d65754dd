"""Cutting in place, composing cuts, masks, and the proof."""

from __future__ import annotations

import copy

import pytest
import timm
import timm.layers as tl
import torch
from torch import Tensor, nn

from dcptool.errors import GateFailed, InputError
from dcptool.network.base import Cut
from dcptool.network.graph import build_graph
from dcptool.network.module_cuts import bake, is_standardised
from dcptool.network.surgery import (
    bake_all,
    compose,
    cut,
    mask,
    plan_cuts,
    prove,
    randomise,
    removed_units,
)

SIZE = (3, 8, 8)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).eval()


def test_cut_takes_the_kept_rows_and_columns() -> None:
    net = chain()
    weight, bias, mean = net[3].weight, net[0].bias, net[1].running_mean
    graph = build_graph(net, SIZE)
    cuts = plan_cuts(graph, removed_units(graph, {"0": [0, 2, 5], "3": [1, 7]}))
    cut(net, cuts)
    assert cuts["3"] == Cut((0, 2, 5), (1, 7))
    assert torch.equal(net[3].weight, weight[[1, 7]][:, [0, 2, 5]])
    assert torch.equal(net[0].bias, bias[[0, 2, 5]])
    assert torch.equal(net[1].running_mean, mean[[0, 2, 5]])
    assert (net[0].out_channels, net[1].num_features, net[3].in_channels) == (3, 3, 3)
    assert (net[7].in_features, net[7].out_features) == (2, 4)
    assert isinstance(net[3].weight, nn.Parameter)


def test_cutting_keeps_names_and_what_is_trained() -> None:
    net = chain()
    net[0].weight.requires_grad_(False)
    names = list(net.state_dict())
    graph = build_graph(net, SIZE)
    cut(net, plan_cuts(graph, removed_units(graph, {"0": [0]})))
    assert list(net.state_dict()) == names
    assert not net[0].weight.requires_grad
    assert net[3].weight.requires_grad


def test_keeping_everything_cuts_nothing() -> None:
    graph = build_graph(chain(), SIZE)
    assert plan_cuts(graph, removed_units(graph, {"0": range(6), "3": range(8)})) == {}


def test_removing_everything_is_refused() -> None:
    graph = build_graph(chain(), SIZE)
    with pytest.raises(InputError, match="every channel of 3"):
        removed_units(graph, {"3": []})


def test_two_cuts_compose_to_one() -> None:
    dense = chain()
    first = copy.deepcopy(dense)
    graph = build_graph(first, SIZE)
    one = plan_cuts(graph, removed_units(graph, {"0": [0, 2, 3, 5], "3": [1, 4, 6]}))
    cut(first, one)
    graph = build_graph(first, SIZE)
    two = plan_cuts(graph, removed_units(graph, {"0": [1, 3]}))
    cut(first, two)
    at_once = copy.deepcopy(dense)
    both = compose(one, two)
    assert both["0"].outputs == (2, 5)
    assert both["3"] == Cut((2, 5), (1, 4, 6))
    cut(at_once, both)
    image = torch.randn(2, *SIZE)
    assert torch.equal(first(image), at_once(image))


def test_depthwise_and_grouped_convolutions_lose_groups() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 12, 1, groups=4)
    )
    net.append(nn.Conv2d(12, 2, 1))
    graph = build_graph(net, SIZE)
    assert len(graph.group("0").units) == 4
    cut(net, plan_cuts(graph, removed_units(graph, {"0": [0, 3]})))
    assert [layer.groups for layer in net] == [1, 4, 2, 1]
    assert [layer.out_channels for layer in net] == [4, 4, 6, 2]
    assert net(torch.zeros(1, *SIZE)).shape == (1, 2, 6, 6)


@pytest.mark.parametrize("name", ["nothing.here", "0.weight.x", "training", "forward", "2"])
def test_a_cut_of_something_else_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot cut"):
        cut(chain(), {name: Cut((0,), (0,))})


def test_the_mask_zeroes_what_reads_dead_channels() -> None:
    net = chain()
    graph = build_graph(net, SIZE)
    dead = removed_units(graph, {"0": [1, 2]})
    mask(net, graph, dead)
    zero = (net[3].weight == 0).all(dim=3).all(dim=2).all(dim=0)
    assert zero.tolist() == [True, False, False, True, True, True]
    assert not (net[0].weight == 0).any()


def test_the_proof_leaves_the_network_alone() -> None:
    net = chain()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    graph = build_graph(net, SIZE)
    proof = prove(net, graph, removed_units(graph, {"0": [0, 1]}), SIZE)
    assert proof.difference <= 1e-5
    assert proof.power > 0.01
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_nothing_removed_needs_no_power() -> None:
    net = chain()
    assert prove(net, build_graph(net, SIZE), set(), SIZE).power == 0


class Deaf(nn.Module):
    """Its output does not depend on what is cut: nothing could ever be proved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * 0 + x.mean()


def test_a_proof_without_power_is_red() -> None:
    net = Deaf()
    graph = build_graph(net, SIZE)
    with pytest.raises(GateFailed, match="no power"):
        prove(net, graph, removed_units(graph, {"a": [0]}), SIZE)


def test_wrong_indices_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting the neighbours of what the mask zeroes must not pass."""
    net = chain()
    graph = build_graph(net, SIZE)
    dead = removed_units(graph, {"0": [0, 1, 2]})
    monkeypatch.setattr(
        "dcptool.network.surgery.plan_cuts",
        lambda graph, dead: plan_cuts(graph, {unit - 1 for unit in dead}),
    )
    with pytest.raises(GateFailed, match="does not compute"):
        prove(net, graph, dead, SIZE)


def test_random_weights_are_no_ones_and_zeros() -> None:
    net = timm.create_model("test_convnext").eval()
    randomise(net)
    for name, tensor in net.named_parameters():
        assert len(torch.unique(tensor)) == tensor.numel() or tensor.numel() > 1000, name
    again = timm.create_model("test_convnext").eval()
    randomise(again)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "kind", ["StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"]
)
@pytest.mark.parametrize("stride", [1, 2])
def test_baking_a_standardised_convolution_changes_nothing(kind: str, stride: int) -> None:
    torch.manual_seed(0)
    options = {"padding": "same"} if kind.endswith("Same") else {}
    conv = getattr(tl, kind)(4, 6, 3, stride=stride, bias=True, **options)
    randomise(conv)
    image = torch.randn(2, 4, 9, 9)
    wanted = conv(image)
    bake(conv)
    assert not is_standardised(conv)
    torch.testing.assert_close(conv(image), wanted)


def test_only_cut_inputs_make_a_standardised_convolution_plain() -> None:
    conv = tl.ScaledStdConv2d(4, 6, 3)
    net = nn.Sequential(conv)
    cut(net, {"0": Cut(None, (0, 2))})
    assert is_standardised(conv)
    assert conv.gain.shape[0] == 2
    cut(net, {"0": Cut((1, 3), None)})
    assert type(conv) is nn.Conv2d
    assert set(conv.state_dict()) == {"weight", "bias"}
    assert net(torch.zeros(1, 2, 5, 5)).shape == (1, 2, 5, 5)


def test_layers_can_be_baked_before_their_weights_are_changed() -> None:
    net = timm.create_model("test_nfnet").eval()
    cuts = bake_all(net)
    assert cuts
    assert not any(is_standardised(layer) for layer in net.modules())
    again = timm.create_model("test_nfnet").eval()
    cut(again, cuts)
    again.load_state_dict(net.state_dict())
    image = torch.randn(1, 3, 160, 160)
    assert torch.equal(again(image), net(image))


def test_a_response_norm_is_cut_with_its_channels() -> None:
    """Its mean is taken over the living: as if the dead were silent and the mean rescaled."""
    net = timm.create_model("convnextv2_atto").eval()
    graph = build_graph(net, (3, 64, 64))
    norms = [s.name for s in graph.sites.values() if s.kind == "response_norm"]
    assert norms
    group = next(g for g in graph.open_groups() if norms[0] in g.carriers)
    dead = removed_units(graph, {group.name: range(0, len(group.units), 3)})
    assert prove(net, graph, dead, (3, 64, 64)).difference <= 1e-5
