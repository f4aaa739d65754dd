"""Rules one by one on toy networks: which channels go together, what is locked and why.

Every toy is also cut and proved: half of every group that can go is removed at random.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm.layers as tl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcptool.errors import GateFailed, InputError
from dcptool.network import rules
from dcptool.network.graph import ChannelGraph, Group, build_graph
from dcptool.network.rules import LAYERS, Flow
from dcptool.network.surgery import Proof, prove, removed_units

SIZE = (3, 12, 12)


class Toy(nn.Module):
    """A stem of 8 channels, something in between, global pooling and a classifier."""

    def __init__(
        self, middle: Callable[[nn.Module, Tensor], Tensor], width: int, **parts: nn.Module
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        for name, part in parts.items():
            setattr(self, name, part)
        self.middle = middle
        self.reader = nn.Conv2d(width, 6, 1)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.reader(self.middle(self, F.relu(self.stem(x))))
        return self.fc(F.relu(x).mean((2, 3)))


def conv(inputs: int, outputs: int, **options: object) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)  # type: ignore[arg-type]


def half_of(groups: list[Group]) -> dict[str, list[int]]:
    draw = torch.Generator().manual_seed(3)
    return {
        g.name: torch.randperm(len(g.units), generator=draw)[: max(1, len(g.units) // 2)].tolist()
        for g in groups
    }


def proved(net: nn.Module, graph: ChannelGraph, size: tuple[int, ...] = SIZE) -> Proof:
    groups = graph.open_groups("all", True)
    assert groups
    return prove(net.eval(), graph, removed_units(graph, half_of(groups)), size)


def read(net: nn.Module, size: tuple[int, ...] = SIZE) -> ChannelGraph:
    graph = build_graph(net.eval(), size)
    if graph.open_groups("all", True):
        proved(net, graph, size)
    return graph


def widths(graph: ChannelGraph) -> dict[str, tuple[str, int]]:
    return {g.name: (g.status, len(g.units)) for g in graph.groups}


def reason(graph: ChannelGraph, name: str) -> str:
    group = graph.group(name)
    assert group.status == "locked"
    return group.reason


def test_a_chain_of_convolutions() -> None:
    graph = read(Toy(lambda m, x: m.a(x), 10, a=conv(8, 10)))
    assert widths(graph) == {
        "stem": ("prunable", 8),
        "a": ("prunable", 10),
        "reader": ("outside", 6),
        "fc": ("locked", 0),
    }
    assert graph.group("stem").consumers == ("a",)
    assert graph.group("reader").reason == "it feeds the classifier"
    assert reason(graph, "fc") == "the network's output"


def test_an_addition_couples_its_operands() -> None:
    graph = read(Toy(lambda m, x: x + m.b(m.a(x)), 8, a=conv(8, 4), b=conv(4, 8)))
    assert widths(graph)["stem"] == ("coupled", 8)
    assert graph.group("stem").producers == ("stem", "b")
    assert "tied with b by add" in graph.group("stem").reason
    assert widths(graph)["a"] == ("prunable", 4)


def test_groups_that_no_addition_encloses_are_outside() -> None:
    graph = read(Toy(lambda m, x: m.a(x) + m.b(x), 8, a=conv(8, 8), b=conv(8, 8)))
    assert widths(graph)["stem"] == ("outside", 8)
    assert widths(graph)["a"] == ("coupled", 8)


def test_concatenation_keeps_groups_apart() -> None:
    graph = read(Toy(lambda m, x: torch.cat([x, m.a(x)], 1), 13, a=conv(8, 5)))
    assert widths(graph)["stem"] == ("prunable", 8)
    assert graph.group("stem").consumers == ("a", "reader")
    assert graph.group("a").consumers == ("reader",)


def test_the_channels_of_a_squeeze_excite_gate_follow() -> None:
    def gate(m: nn.Module, x: Tensor) -> Tensor:
        return x * m.up(F.relu(m.down(x.mean((2, 3), keepdim=True)))).sigmoid()

    graph = read(Toy(gate, 8, down=nn.Conv2d(8, 4, 1), up=nn.Conv2d(4, 8, 1)))
    assert graph.group("stem").producers == ("stem", "up")
    assert graph.group("stem").status == "prunable"
    assert widths(graph)["down"] == ("prunable", 4)


def test_a_gate_of_one_channel_ties_nothing() -> None:
    graph = read(Toy(lambda m, x: x * m.a(x).sigmoid(), 8, a=conv(8, 1)))
    assert widths(graph)["stem"] == ("prunable", 8)
    assert widths(graph)["a"] == ("locked", 0)


def test_a_depthwise_convolution_carries() -> None:
    graph = read(Toy(lambda m, x: m.a(x), 8, a=conv(8, 8, groups=8)))
    assert widths(graph)["stem"] == ("prunable", 8)
    assert graph.group("stem").carriers == ("a",)


def test_a_depthwise_convolution_with_two_outputs_for_each_input() -> None:
    graph = read(Toy(lambda m, x: m.a(x), 16, a=conv(8, 16, groups=8)))
    assert widths(graph)["stem"] == ("prunable", 8)


def test_a_grouped_convolution_loses_whole_groups() -> None:
    graph = read(Toy(lambda m, x: m.a(x), 16, a=conv(8, 16, groups=4)))
    assert widths(graph)["stem"] == ("prunable", 4)


def test_channel_shuffle_ties_across_its_literal_groups() -> None:
    def shuffle(m: nn.Module, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)

    graph = read(Toy(shuffle, 8))
    assert widths(graph)["stem"] == ("prunable", 4)


def test_chunk_ties_its_parts() -> None:
    def both(m: nn.Module, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=1)
        return one * two

    assert widths(read(Toy(both, 4)))["stem"] == ("prunable", 4)


def test_chunk_into_unequal_parts_locks() -> None:
    graph = read(Toy(lambda m, x: x.chunk(3, dim=1)[0], 3))
    assert "unequal parts" in reason(graph, "stem")


@pytest.mark.parametrize(
    ("middle", "width", "words"),
    [
        (lambda m, x: torch.split(x, 4, 1)[1], 4, "fixed widths"),
        (lambda m, x: torch.split(x, [3, 5], 1)[1], 5, "fixed widths"),
        (lambda m, x: x[:, :5], 5, "fixed part of the channels"),
        (lambda m, x: x[:, torch.tensor([0, 3])], 2, "index tensor"),
        (lambda m, x: F.pad(x, (0, 0, 0, 0, 0, 4)), 12, "pads channels"),
        (lambda m, x: F.pixel_shuffle(x, 2), 2, "no rule"),
        (lambda m, x: torch.cumsum(x, 1), 8, "cumsum in the network's forward has no rule"),
        (lambda m, x: x.softmax(1), 8, "normalises over the channels"),
        (lambda m, x: x - x.mean(1, keepdim=True), 8, "runs over the channels"),
        (lambda m, x: x.roll(1, 1), 8, "shifts channels"),
    ],
)
def test_what_a_cut_cannot_keep_is_locked_with_the_reason(
    middle: Callable[[nn.Module, Tensor], Tensor], width: int, words: str
) -> None:
    graph = read(Toy(middle, width))
    assert words in reason(graph, "stem")
    assert widths(graph)["reader"] == ("outside", 6)


def test_split_by_a_computed_half_behaves_like_chunk() -> None:
    def halves(m: nn.Module, x: Tensor) -> Tensor:
        one, two = torch.split(x, x.shape[1] // 2, 1)
        return one * two

    assert widths(read(Toy(halves, 4)))["stem"] == ("prunable", 4)


def test_padding_and_slicing_positions_costs_nothing() -> None:
    graph = read(Toy(lambda m, x: F.pad(x, (1, 1, 2, 0))[:, :, 1:, ::2], 8))
    assert widths(graph)["stem"] == ("prunable", 8)


def test_a_reshape_that_needs_every_channel_locks_them() -> None:
    def fixed(m: nn.Module, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], 8, 12, 12)

    assert widths(read(Toy(fixed, 8)))["stem"] == ("locked", 0)


def test_a_module_called_twice_ties_both_calls() -> None:
    graph = read(Toy(lambda m, x: m.a(F.relu(m.a(x))), 8, a=conv(8, 8)))
    assert graph.group("stem").producers == ("stem", "a")
    assert len(graph.group("stem").units) == 8


def test_a_shared_parameter_locks_its_groups() -> None:
    a, b = conv(8, 8), conv(8, 8)
    b.weight = a.weight
    graph = read(Toy(lambda m, x: m.b(F.relu(m.a(x))), 8, a=a, b=b))
    for name in ("stem", "a", "b"):
        assert "a.weight is shared with b.weight" in reason(graph, name)


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def test_a_layer_scale_parameter_is_cut_with_its_channels() -> None:
    graph = read(Toy(lambda m, x: m.scale(x), 8, scale=Scale(8)))
    assert widths(graph)["stem"] == ("prunable", 8)
    assert "scale.gamma" in graph.group("stem").carriers


def test_batch_norm_prelu_and_instance_norm_carry() -> None:
    net = Toy(
        lambda m, x: m.prelu(m.inorm(m.norm(x))),
        8,
        norm=nn.BatchNorm2d(8),
        inorm=nn.InstanceNorm2d(8, affine=True),
        prelu=nn.PReLU(8),
    )
    assert graph_carriers(net) == ("norm", "inorm", "prelu")


def graph_carriers(net: nn.Module) -> tuple[str, ...]:
    return read(net).group("stem").carriers


def test_one_slope_for_all_channels_is_no_site() -> None:
    assert graph_carriers(Toy(lambda m, x: m.prelu(x), 8, prelu=nn.PReLU())) == ()


def test_group_norm_loses_whole_norm_groups() -> None:
    graph = read(Toy(lambda m, x: m.norm(x), 8, norm=nn.GroupNorm(4, 8)))
    assert widths(graph)["stem"] == ("prunable", 4)


def test_a_norm_over_all_channels_locks() -> None:
    graph = read(Toy(lambda m, x: m.norm(x), 8, norm=nn.GroupNorm(1, 8)))
    assert "norm normalises over all its channels" in reason(graph, "stem")


def test_layer_norm_over_channels_last_locks() -> None:
    def last(m: nn.Module, x: Tensor) -> Tensor:
        return m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    graph = read(Toy(last, 8, norm=nn.LayerNorm(8)))
    assert "norm normalises over the channels" in reason(graph, "stem")


def test_a_linear_layer_over_channels_last_reads_channels() -> None:
    def last(m: nn.Module, x: Tensor) -> Tensor:
        return m.mlp(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    graph = read(Toy(last, 7, mlp=nn.Linear(8, 7)))
    assert widths(graph)["stem"] == ("prunable", 8)
    assert widths(graph)["mlp"] == ("prunable", 7)


def test_flatten_repeats_a_channel_over_columns() -> None:
    net = nn.Sequential(conv(3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 5))
    graph = read(net, (3, 3, 3))
    site = graph.sites["3"]
    assert widths(graph)["0"] == ("outside", 4)
    assert [int((site.inputs == unit).sum()) for unit in graph.group("0").units] == [9] * 4


@pytest.mark.parametrize("groups", [1, 4])
def test_transposed_convolutions(groups: int) -> None:
    up = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=groups)
    graph = read(Toy(lambda m, x: m.up(x), 12, up=up))
    assert len(graph.group("stem").units) == (8 if groups == 1 else 4)
    if groups == 1:
        assert len(graph.group("up").units) == 12


class Strange(nn.Module):
    """Asks for a true tensor, so that its code cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = conv(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError("not a tensor")
        return self.inner(x)


def test_a_module_that_cannot_be_followed_is_opaque_and_locks() -> None:
    graph = read(Toy(lambda m, x: m.odd(x), 8, odd=Strange()))
    assert "odd (Strange) has no rule" in reason(graph, "stem")
    assert "odd.inner" not in graph.sites
    assert widths(graph)["reader"] == ("outside", 6)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_branch_on_values_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"module odd\b") as caught:
        build_graph(Toy(lambda m, x: m.odd(x), 8, odd=Branches()).eval(), SIZE)
    assert caught.value.code == 3


class OwnForward(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1)


def test_a_layer_with_a_forward_of_its_own_has_no_rule() -> None:
    graph = read(Toy(lambda m, x: m.odd(x), 8, odd=OwnForward(8, 8, 1)))
    assert "conv2d in odd has no rule" in reason(graph, "stem")


class Renamed(nn.Conv2d):
    """Inherits the forward it is known by."""


def test_a_layer_that_inherits_its_forward_has_the_rule() -> None:
    assert rules.layer_rule(Renamed(1, 1, 1)) is rules.layer_rule(nn.Conv2d(1, 1, 1))


@pytest.mark.parametrize(
    "kind", ["StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"]
)
def test_standardised_convolutions_are_cut_like_others(kind: str) -> None:
    options = {"padding": "same"} if kind.endswith("Same") else {}
    net = Toy(lambda m, x: m.a(x), 8, a=getattr(tl, kind)(8, 8, 3, stride=2, **options))
    assert widths(read(net))["stem"] == ("prunable", 8)


@pytest.mark.parametrize("kind", ["EvoNorm2dS0", "EvoNorm2dB0", "FilterResponseNormTlu2d"])
def test_rarer_norms_of_timm(kind: str) -> None:
    options = {"groups": 4} if "S0" in kind else {}
    graph = read(Toy(lambda m, x: m.norm(x), 8, norm=getattr(tl, kind)(8, **options)))
    assert widths(graph)["stem"] == ("prunable", 4 if options else 8)


def test_a_recurrent_layer_locks_and_costs_no_time() -> None:
    def rows(m: nn.Module, x: Tensor) -> Tensor:
        return m.lstm(x.mean(2).transpose(1, 2))[0].transpose(1, 2).unsqueeze(2)

    net = Toy(rows, 10, lstm=nn.LSTM(8, 5, batch_first=True, bidirectional=True))
    assert "lstm (LSTM) has no rule" in reason(read(net), "stem")


def test_sizes_taken_from_a_tensor_follow_a_cut() -> None:
    def tokens(m: nn.Module, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        x = m.norm(x.flatten(0, 1)).reshape_as(x)
        return x.transpose(1, 2).unsqueeze(2)

    assert widths(read(Toy(tokens, 8, norm=nn.BatchNorm1d(8))))["stem"] == ("prunable", 8)


class StrangeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd, self.after, self.reader = Strange(), conv(8, 6), conv(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(self.after(self.odd(x)))


def test_only_the_part_that_cannot_be_followed_is_opaque() -> None:
    graph = read(Toy(lambda m, x: m.block(x), 8, block=StrangeBlock()))
    assert "block.odd (Strange) has no rule" in reason(graph, "stem")
    assert widths(graph)["block.after"] == ("prunable", 6)


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(3), nn.AdaptiveAvgPool2d(2)])
def test_pooling_and_interpolation_carry(pool: nn.Module) -> None:
    net = Toy(lambda m, x: F.interpolate(m.pool(x), scale_factor=2.0), 8, pool=pool)
    assert widths(read(net))["stem"] == ("prunable", 8)


def test_the_proof_is_red_when_a_rule_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(flow: Flow, norm: nn.Module, labels: Tensor) -> Tensor:
        return labels  # as if a layer norm did not read all its channels

    net = Toy(
        lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
        8,
        norm=nn.LayerNorm(8, elementwise_affine=False),
    ).eval()
    monkeypatch.setitem(LAYERS, nn.LayerNorm, blind)
    monkeypatch.setattr("dcptool.network.graph._confirm", lambda graph, *_: graph)
    net.norm.normalized_shape = (4,)
    with pytest.raises(Exception, match="normalized_shape"):
        net(torch.zeros(1, *SIZE))
    net.norm.normalized_shape = (8,)
    graph = build_graph(net, SIZE)
    assert graph.group("stem").status == "prunable"
    with pytest.raises(GateFailed, match="does not run") as caught:
        proved(net, graph)
    assert caught.value.code == 4


def test_the_proof_is_red_when_values_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(flow: Flow, norm: nn.Module, labels: Tensor) -> Tensor:
        return labels

    net = Toy(lambda m, x: m.soft(x), 8, soft=nn.Softmax2d()).eval()
    assert "soft (Softmax2d) has no rule" in reason(build_graph(net, SIZE), "stem")
    monkeypatch.setitem(LAYERS, nn.Softmax2d, blind)
    graph = build_graph(net, SIZE)
    with pytest.raises(GateFailed, match="does not compute what the masked one does"):
        proved(net, graph)


def test_code_that_needs_a_width_locks_its_group_alone() -> None:
    def insists(m: nn.Module, x: Tensor) -> Tensor:
        y = m.a(x)
        if y.shape[1] != 8:
            raise RuntimeError("I need eight")
        return y

    graph = read(Toy(insists, 8, a=conv(8, 8)))
    assert reason(graph, "a") == "the network's code needs this width"
    assert widths(graph)["stem"] == ("prunable", 8)
