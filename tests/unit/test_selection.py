"""Budgets, methods, chains, tails, heads and stages on small networks."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import pytest
import timm
import torch
from three_blocks import SPEC, blocks, loss_at_pivot, noise
from torch import nn

from dcptool import console
from dcptool.errors import InputError, UsageError
from dcptool.network import models
from dcptool.network.base import Base, Input, Network
from dcptool.network.graph import build_graph
from dcptool.network.module_cuts import is_standardised
from dcptool.network.surgery import cut
from dcptool.selection.budget import kept_count, parse_rate
from dcptool.selection.chain import build_chain, run_segment
from dcptool.selection.heads import WithHead, head_loss, new_head
from dcptool.selection.limits import too_wide
from dcptool.selection.samples import share
from dcptool.selection.settings import Budget, Recorded, Selection, stop_by_epsilon
from dcptool.selection.stage import Stage
from dcptool.selection.stages import Progress, plan_stages, select
from dcptool.selection.store import Room
from dcptool.selection.tail import build_tail


@pytest.mark.parametrize(
    ("units", "rate", "kept"),
    [(64, "0.3", 45), (180, "0.7", 54), (10, "0.5", 5), (3, "0.99", 1), (7, "0", 7)],
)
def test_counts_are_exact(units: int, rate: str, kept: int) -> None:
    assert kept_count(units, parse_rate(rate)) == kept


def test_binary_floats_would_miscount() -> None:
    import math

    wrong = 180 - math.floor(0.7 * 180)
    assert wrong != kept_count(180, Fraction("0.7")) or 0.7 * 180 >= 126


@pytest.mark.parametrize("text", ["1", "-0.1", "1.5", "x", "nan", "1/0"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)


def test_epsilon_stops_at_the_first_small_drop() -> None:
    losses = (10.0, 6.0, 5.0, 4.99, 1.0)
    assert stop_by_epsilon(losses, 0.01) == 3
    assert stop_by_epsilon(losses, 0.2) == 2
    assert stop_by_epsilon(losses, 1e-9) == 4


def test_epsilon_where_there_is_nothing_to_explain() -> None:
    """Readers behind a norm that erases them leave no loss at all."""
    assert stop_by_epsilon((0.0, 0.0, 0.0), 0.01) == 1
    network = blocks()
    with torch.no_grad():
        network.module.one.norm2.weight.zero_()
        network.module.two.conv2.weight.zero_()
    gram = select(network, noise(), Selection(epsilon=0.01, positions=8))
    assert len(gram.choices[0].kept) == 1
    loop = Selection(epsilon=0.01, solver="sgd", target="conv")
    assert len(select(network, noise(), loop).choices[1].kept) == 1


def test_smaller_epsilon_never_keeps_fewer() -> None:
    losses = tuple(1.0 / (1 + k) for k in range(30))
    kept = [stop_by_epsilon(losses, e) for e in (0.5, 0.1, 0.01, 0.001)]
    assert kept == sorted(kept)


def test_chain_gives_the_networks_own_output() -> None:
    network = blocks()
    graph = build_graph(network.module, SPEC.size)
    dense = [s.name for s in graph.sites.values() if s.is_dense]
    chain = build_chain(network.module, SPEC.size, dense)
    assert [layer for s in chain.segments for layer in s.layers] == dense
    features = noise()[0]
    with torch.no_grad():
        wanted = network.module(features)
        for segment in chain.segments:
            features = run_segment(chain, segment, network.module, features)[segment.output]
    assert torch.equal(features, wanted)


@pytest.mark.parametrize(
    "name", ["resnet18", "zoo:vggnet", "test_efficientnet", "torchvision:squeezenet1_1"]
)
def test_chain_on_real_networks(name: str) -> None:
    network = models.load(name, pretrained=False)
    size = (3, 64, 64) if network.input.size[1] > 64 else network.input.size
    graph = build_graph(network.module, size)
    chain = build_chain(network.module, size, [s.name for s in graph.sites.values() if s.is_dense])
    features = torch.randn(2, *size)
    with torch.no_grad():
        wanted = network.module(features)
        for segment in chain.segments:
            features = run_segment(chain, segment, network.module, features)[segment.output]
    assert torch.allclose(features, wanted, atol=1e-6)


def test_tail_runs_the_rest_with_other_weights() -> None:
    network = blocks()
    graph = build_graph(network.module, SPEC.size)
    chain = build_chain(
        network.module, SPEC.size, [s.name for s in graph.sites.values() if s.is_dense]
    )
    images = noise()[0]
    place = next(i for i, s in enumerate(chain.segments) if "two.conv2" in s.layers)
    with torch.no_grad():
        start = images
        for segment in chain.segments[:place]:
            start = run_segment(chain, segment, network.module, start)[segment.output]
        tail = build_tail(chain, ["two.conv2"], place, len(chain.segments) - 1)
        features = tail.features(network.module, start)
        weight = torch.randn_like(network.module.two.conv2.weight)
        end = chain.segments[-1].output
        got = tail.finish(network.module, features, {"two.conv2": (weight, None)}, [end])[end]
        changed = copy.deepcopy(network.module)
        changed.two.conv2.weight.copy_(weight)
        assert torch.allclose(got, changed(images), atol=1e-5)
        assert not torch.allclose(got, network.module(images), atol=1e-3)


def test_same_seed_same_weights() -> None:
    settings = Selection(rate=Fraction("0.5"), positions=16, seed=3)
    first = select(blocks(), noise(), settings).network.module.state_dict()
    again = select(blocks(), noise(), settings).network.module.state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)


def test_refit_beats_plain_removal() -> None:
    network, images = blocks(), noise(64)
    dense = torch.cat([network.module(x) for x in images])

    def distance(method: str) -> float:
        settings = Selection(rate=Fraction("0.5"), method=method, positions=64)
        slim = select(network, images, settings).network.module
        with torch.no_grad():
            return float((torch.cat([slim(x) for x in images]) - dense).norm() / dense.norm())

    assert distance("dcp") < 0.5 * distance("l1")


def test_keep_leaves_a_group_whole() -> None:
    settings = Selection(rate=Fraction("0.5"), method="l1", keep=("two.*",))
    outcome = select(blocks(), noise(), settings)
    assert [c.group for c in outcome.choices] == ["one.conv1", "three.conv1"]
    assert outcome.network.module.two.conv1.out_channels == 10


def test_plan_decides_the_counts() -> None:
    settings = Selection(plan={"one.conv1": 3}, method="dcp", positions=16)
    outcome = select(blocks(), noise(), settings)
    assert outcome.network.module.one.conv1.out_channels == 3
    assert outcome.network.module.two.conv1.out_channels == 10


def test_pruning_twice_composes() -> None:
    network, images = blocks(), noise()
    settings = Selection(rate=Fraction("0.5"), positions=16)
    once = select(network, images, settings).network
    twice = select(once, images, settings).network
    assert twice.module.one.conv1.out_channels == 3
    kept = twice.cuts["one.conv1"].outputs
    assert kept is not None
    assert len(kept) == 3
    assert set(kept) <= set(once.cuts["one.conv1"].outputs or ())


def test_residual_groups_when_opened() -> None:
    settings = Selection(rate=Fraction("0.5"), method="l1", prune_residual=True)
    outcome = select(blocks(), noise(), settings)
    assert outcome.network.module.stem.out_channels == 4
    assert outcome.network.module.head.in_features == 4


def test_nothing_to_prune_names_the_option_that_opens() -> None:
    network = models.load("repvgg_a0", pretrained=False, img_size=64)
    network.input = Input((3, 64, 64), *[(0.0,) * 3, (1.0,) * 3])
    with pytest.raises(InputError) as caught:
        select(network, [torch.zeros(2, 3, 64, 64)], Selection(rate=Fraction("0.5")))
    assert "--prune-residual" in caught.value.try_


def test_stages_end_at_the_pivots() -> None:
    network = blocks()
    graph = build_graph(network.module, SPEC.size)
    stages = plan_stages(network, graph, Selection(losses=1))
    assert [pivot for pivot, _ in stages] == ["two", None]
    ends = [end for _, end in stages]
    assert ends == sorted(ends)


def test_stages_train_and_order_by_the_joint_loss() -> None:
    network, images = blocks(), noise()
    seen: list[str | None] = []

    def fit_stage(module: nn.Module, pivot: str | None, number: int, is_fitted: bool):
        seen.append(pivot)
        head = new_head(8, 5, number).eval() if pivot else None
        labels = torch.arange(8) % 5

        def loss(value: torch.Tensor) -> torch.Tensor:
            scores = head(value) if head is not None else value
            return nn.functional.cross_entropy(scores, labels, reduction="sum")

        return [loss] * len(images)

    settings = Selection(rate=Fraction("0.5"), positions=16, losses=1)
    outcome = select(network, images, settings, fit_stage=fit_stage)
    assert seen == ["two", None]
    assert [len(c.kept) for c in outcome.choices] == [6, 5, 3]
    assert outcome.network.module.three.conv2.in_channels == 3


class ChannelsLast(nn.Module):
    """Two linear layers on maps whose channels come last, as ConvNeXt has them."""

    def __init__(self, *, linear: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.up = nn.Linear(8, 12) if linear else nn.Conv2d(8, 12, 1)
        self.down = nn.Linear(12, 8) if linear else nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if isinstance(self.up, nn.Linear):
            x = x + self.down(torch.relu(self.up(x.permute(0, 2, 3, 1)))).permute(0, 3, 1, 2)
        else:
            x = x + self.down(torch.relu(self.up(x)))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("method", ["dcp", "apoz", "thinet"])
def test_linear_layers_on_maps_are_solved_as_convs_of_one_tap(method: str) -> None:
    def kept(linear: bool) -> tuple[int, ...]:
        torch.manual_seed(0)
        module = ChannelsLast(linear=False).eval()
        state = module.state_dict()
        if linear:
            module = ChannelsLast(linear=True).eval()
            module.load_state_dict(
                {
                    k: v.flatten(1) if k[:2] in ("up", "do") and v.dim() == 4 else v
                    for k, v in state.items()
                }
            )
        network = Network(module, Base("custom", "ChannelsLast", 5), SPEC)
        settings = Selection(rate=Fraction("0.5"), method=method, positions=256, target="conv")
        (choice,) = select(network, noise(), settings).choices
        assert choice.group == "up"
        return choice.kept

    assert kept(True) == kept(False)


def test_layers_too_wide_for_the_closed_form_are_named() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 5), nn.Linear(5, 5)
    )
    groups = [g for g in build_graph(module, SPEC.size).groups if g.units and "0" in g.name]
    half = Selection(rate=Fraction("0.5"))
    fault = too_wide(half, groups, module)
    assert fault is not None
    assert "3 reads 16384 columns" in fault.why
    assert too_wide(replace(half, method="l1"), groups, module) is None
    assert too_wide(replace(half, solver="sgd"), groups, module) is None
    network = Network(module.eval(), Base("custom", "Wide", 5), SPEC)
    outcome = select(network, noise(), replace(half, method="l1"))
    assert outcome.network.module[3].in_features == 32 * 256


def test_residual_groups_are_chosen_from_all_their_readers() -> None:
    """A channel that only the first block reads is kept, although the last one is blind to it."""
    network, images = blocks(), noise()
    with torch.no_grad():
        for block in (network.module.two, network.module.three):
            block.conv1.weight[:, 3] = 0.0
        network.module.head.weight[:, 3] = 0.0
        network.module.one.conv1.weight[:, 3] *= 30.0
    settings = Selection(rate=Fraction("0.5"), positions=64, prune_residual=True)
    choices = {c.group: c for c in select(network, images, settings).choices}
    assert 3 in choices["stem"].kept
    assert len(choices["stem"].kept) == 4


def test_rates_by_pattern() -> None:
    settings = Selection(rate=Fraction("0.5"), rates={"one.*": Fraction(0)}, positions=16)
    choices = {c.group: len(c.kept) for c in select(blocks(), noise(), settings).choices}
    assert choices == {"one.conv1": 12, "two.conv1": 5, "three.conv1": 3}


def test_orders_of_an_earlier_run_where_they_hold() -> None:
    network, images = blocks(), noise()
    half = Selection(rate=Fraction("0.5"), positions=16)
    first = select(network, images, half)
    orders = {c.group: Recorded(c.units, c.order, c.losses, c.smallest) for c in first.choices}
    # A smaller rate is a later point on the same way down, a larger one was never reached.
    third = select(network, images, replace(half, rate=Fraction("0.25"), reuse=orders))
    for choice in third.choices:
        assert choice.order == orders[choice.group].order
        assert set(choice.kept) == set(choice.order[: len(choice.kept)])
    group = build_graph(network.module, SPEC.size).open_groups()[0]
    assert replace(half, rate=Fraction("0.75"), reuse=orders).recorded(group) is None
    assert Selection(epsilon=0.1, reuse=orders).recorded(group) is None
    whole = select(network, images, Selection(epsilon=0.1, positions=16))
    orders = {c.group: Recorded(c.units, c.order, c.losses, c.smallest) for c in whole.choices}
    assert Selection(epsilon=0.01, reuse=orders).recorded(group) is not None
    assert replace(half, rate=Fraction("0.75"), reuse=orders).recorded(group) is not None


def test_the_heads_loss_alone_orders_by_it() -> None:
    network, images = blocks(), noise()
    losses = [loss_at_pivot] * len(images)

    def kept(strength: float) -> list[tuple[int, ...]]:
        settings = Selection(rate=Fraction("0.5"), positions=16, discrimination=strength, losses=1)
        found = select(network, images, settings, fit_stage=lambda *_: losses)
        return [choice.kept for choice in found.choices]

    assert len(kept(math.inf)) == 3
    assert kept(math.inf) != kept(0.0)


def test_one_walk_finds_the_slopes_of_every_layer() -> None:
    network, images = blocks(), noise()
    module = network.module
    settings = Selection(rate=Fraction("0.5"), positions=16 * 16)
    losses = [loss_at_pivot] * len(images)
    stage = Stage(network, module, module, {}, settings, Room(2**20), share(images), None, losses)
    with torch.no_grad():
        stage.survey(0, len(stage.chain.segments))
    assert set(stage.problems.slopes) == {"one.conv2", "two.conv2", "three.conv2"}
    for name, found in stage.problems.slopes.items():
        wanted = torch.zeros_like(found)
        for batch in images:
            outputs: list[torch.Tensor] = []
            hook = module.get_submodule(name).register_forward_hook(
                lambda _m, _i, output, outputs=outputs: outputs.append(output)
            )
            (slope,) = torch.autograd.grad(loss_at_pivot(module(batch)), outputs)
            hook.remove()
            rows = slope.transpose(0, 1).flatten(1)
            wanted += rows @ rows.T
        assert torch.allclose(found, wanted, rtol=1e-4)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_progress_ends_with_the_last_layer_and_not_with_the_last_group(monkeypatch) -> None:
    """The classifier is solved after the last group: until then work is left."""
    shown: list[tuple[float, str]] = []

    class Told(console.Task):
        def say(self, status: str) -> None:
            super().say(status)
            shown.append((self.done / (self.total or 1), status))

    monkeypatch.setattr(console, "progress", lambda *given: nullcontext(Told(*given)))
    settings = Selection(rate=Fraction("0.5"), positions=16)
    stopped: list[Progress] = []
    select(blocks(), noise(), settings, edge=stopped.append)
    shares = [share for share, _ in shown]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
    last = [share for share, status in shown if status.startswith("three.conv1")]
    assert last[0] < 1
    shown.clear()
    select(blocks(), noise(), settings, start=stopped[3])
    assert shown[-1][0] == pytest.approx(1)


def test_head_sees_the_pivot_and_is_gone_afterwards() -> None:
    network = blocks().module
    head = new_head(8, 5, 0)
    both = WithHead(network, "one", head)
    images = noise()[0]
    ran: list[str] = []
    network.two.register_forward_hook(lambda *_: ran.append("two"))
    with both.attached():
        outcome = head_loss(both, images, torch.zeros(8, dtype=torch.long))
        assert ran == []
        outcome.loss.backward()
    assert network.one.conv1.weight.grad is not None
    assert network.two.conv1.weight.grad is None
    assert head.linear.weight.grad is not None
    assert not network.one._forward_hooks


def test_a_transposed_convolution_reads_channels_in_its_own_way() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.up = nn.Conv2d(3, 16, 3), nn.ConvTranspose2d(16, 8, 2, 2)
            self.last = nn.Conv2d(8, 5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.up(torch.relu(self.one(x)))).mean((2, 3))

    network = Network(Up().eval(), Base("custom", "Up", 5), SPEC)
    settings = Selection(rate=Fraction("0.5"), method="l1", scope="all")
    slim = select(network, noise(), settings).network.module
    assert slim.up.weight.shape[:2] == (8, 4)


def test_standardised_weights_are_solved_for_as_they_are_used() -> None:
    torch.manual_seed(0)
    module = timm.create_model("test_nfnet", num_classes=5).eval()
    network = Network(module, Base("timm", "test_nfnet", 5), Input((3, 32, 32), (0,) * 3, (1,) * 3))
    images = [torch.randn(16, 3, 32, 32) for _ in range(4)]
    settings = Selection(rate=Fraction("0.3"), discrimination=0.0, positions=64)
    slim = select(network, images, settings).network
    assert not any(is_standardised(layer) for layer in slim.module.modules())
    with torch.no_grad():
        wanted, given = module(images[0]), slim.module(images[0])
    # Written into weights that are standardised again, the same solution leaves 0.5.
    assert (given - wanted).norm() < 0.35 * wanted.norm()
    again = timm.create_model("test_nfnet", num_classes=5).eval()
    cut(again, slim.cuts)
    again.load_state_dict(slim.module.state_dict())
    assert torch.equal(again(images[0]), slim.module(images[0]))


def test_curves_are_in_closed_form_whatever_chooses_the_channels() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 64, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 5), nn.Linear(5, 5)
    )
    groups = [g for g in build_graph(module, SPEC.size).groups if g.units and "0" in g.name]
    target = Selection(budget=Budget("macs", 0.5, is_share=True))
    for settings in (target, replace(target, method="l1"), replace(target, solver="sgd")):
        fault = too_wide(settings, groups, module)
        assert fault is not None
        assert fault.try_ == "--keep 0"
