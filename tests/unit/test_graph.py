"""Groups of real networks: names, members, options, and what the trace refuses."""

from __future__ import annotations

import warnings

import pytest
import timm
import torch
from torch import Tensor, nn

from dcptool.errors import InputError
from dcptool.network import models
from dcptool.network.graph import ChannelGraph, Group, build_graph
from dcptool.network.surgery import cut, plan_cuts
from dcptool.network.trace import meta_copy


@pytest.fixture(scope="module")
def resnet20() -> ChannelGraph:
    return build_graph(models.load("zoo:resnet20", pretrained=False).module, (3, 32, 32))


def test_groups_are_named_after_their_first_producer(resnet20: ChannelGraph) -> None:
    names = [group.name for group in resnet20.groups]
    assert len(names) == len(set(names))
    assert all(group.name == group.producers[0] for group in resnet20.groups)


def test_a_residual_network_has_the_papers_scope(resnet20: ChannelGraph) -> None:
    prunable = resnet20.open_groups()
    assert len(prunable) == 9
    assert all(len(group.producers) == len(group.consumers) == 1 for group in prunable)


def test_options_open_more(resnet20: ChannelGraph) -> None:
    coupled = resnet20.open_groups(prune_residual=True)
    assert len(coupled) == 12
    assert {g.status for g in coupled} == {"prunable", "coupled"}
    assert set(resnet20.open_groups("all")) >= set(resnet20.open_groups())


def test_image_channels_and_class_scores_are_never_open(resnet20: ChannelGraph) -> None:
    units = {unit for group in resnet20.open_groups("all", True) for unit in group.units}
    sites = list(resnet20.sites.values())
    assert (sites[0].inputs < 0).all()
    assert not units & set(sites[-1].outputs.tolist())


def test_labels_of_a_unit_are_in_one_group_only(resnet20: ChannelGraph) -> None:
    units = [unit for group in resnet20.groups for unit in group.units]
    assert len(units) == len(set(units))


def test_the_module_is_not_changed() -> None:
    net = timm.create_model("test_resnet").train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    build_graph(net, (3, 160, 160))
    assert net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert not any(p.is_meta for p in net.parameters())


def test_the_copy_without_data_shares_what_the_module_shares() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    copied = meta_copy(nn.Sequential(a, b))
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.is_meta


def test_two_runs_give_the_same_graph() -> None:
    net = timm.create_model("test_efficientnet")
    one, two = (build_graph(net, (3, 160, 160)) for _ in range(2))
    assert one.groups == two.groups


def test_plain_arguments_with_defaults_are_no_images() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor, twice: bool = False, mask: Tensor | None = None) -> Tensor:
            y = self.a(x)
            if twice:
                y = self.a(y)
            return self.b(y if mask is None else y * mask)

    graph = build_graph(Optional(), (4,))
    assert [(g.name, len(g.units)) for g in graph.groups] == [("a", 6), ("b", 0)]


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.max().item()


def test_a_number_out_of_a_tensor_is_refused_with_its_module() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.ReLU(), Item()))
    with pytest.raises(InputError) as caught:
        build_graph(net, (3, 4, 4))
    assert "module 1.1" in caught.value.message
    assert caught.value.code == 3


def test_an_input_size_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="cannot follow"):
        build_graph(nn.Sequential(nn.Conv2d(3, 4, 5), nn.Conv2d(4, 2, 5)), (3, 6, 6))


class Pair(nn.Module):
    """Two convolutions, what lies between them, and something that is added there."""

    def __init__(self, between: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.between = nn.Conv2d(3, 16, 3, padding=1), between
        self.second = second or nn.Conv2d(16, 8, 3, padding=1)
        self.shift = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x)) + self.shift.view(1, -1, 1, 1)
        return self.second(torch.relu(x)).mean((2, 3))


def first_of(net: nn.Module) -> Group:
    return build_graph(net, (3, 16, 16)).group("first")


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(16), nn.BatchNorm2d(16, affine=False, track_running_stats=False)]
)
def test_a_norm_without_tensors_is_cut_with_its_channels(norm: nn.Module) -> None:
    net = Pair(norm)
    group = first_of(net)
    assert group.status == "outside"
    cut(net, plan_cuts(build_graph(net, (3, 16, 16)), set(group.units[::2])))
    assert norm.num_features == 8
    assert net(torch.zeros(2, 3, 16, 16)).shape == (2, 8)


def test_a_parameter_that_is_added_is_no_residual() -> None:
    assert first_of(Pair(nn.Identity())).status == "outside"


def test_weights_that_are_computed_are_locked() -> None:
    second = nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 8, 3, padding=1))
    assert first_of(Pair(nn.Identity(), second)).status == "locked"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Conv2d(16, 8, 3, padding=1))
    old(torch.zeros(1, 16, 4, 4))
    with pytest.raises(InputError, match="cannot copy Pair"):
        first_of(Pair(nn.Identity(), old))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_networks_of_other_numbers_have_the_same_graph(kind: torch.dtype) -> None:
    assert first_of(Pair(nn.BatchNorm2d(16)).to(kind)).status == "outside"
