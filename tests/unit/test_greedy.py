"""The loop of Algorithm 2 against a slow transcription that shares none of its code."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn

from dcptool.network.base import Base, Input, Network
from dcptool.selection import stages
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select

SPEC = Input((3, 8, 8), (0.0,) * 3, (1.0,) * 3)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.conv1 = nn.Conv2d(4, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.conv2(torch.relu(self.conv1(x))))
        return self.head(x.mean((2, 3)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1)
        self.conv2 = nn.Conv2d(6, 4, 3, padding=1, bias=False)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.conv2(torch.relu(self.conv1(x)))).mean((2, 3)))


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 1)
        self.wise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.conv2 = nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.wise(torch.relu(self.conv1(x))))
        return self.head(torch.relu(self.conv2(x)).mean((2, 3)))


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, stride=4)
        self.conv2 = nn.Linear(24, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv1(x)).flatten(1)
        return self.head(torch.relu(self.conv2(x)))


NETWORKS = {"residual": Residual, "plain": Plain, "depthwise": Depthwise, "linear": Flat}
SEED = 7


def _network(name: str) -> Network:
    torch.manual_seed(SEED)
    return Network(NETWORKS[name]().eval(), Base("custom", name, 5), SPEC)


def _data() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(24, 3, 8, 8, generator=draw)
    labels = torch.randint(0, 5, (24,), generator=draw)
    return list(images.split(8)), list(labels.split(8))


def _slow(
    module: nn.Module, discrimination: float, count: int | None, epsilon: float | None
) -> tuple[list[int], list[float], torch.Tensor]:
    """Algorithm 2 with the whole network run for everything, and hooks to catch the output."""
    images, labels = _data()
    reader = module.conv2
    taps = 4 if isinstance(reader, nn.Linear) else 1
    caught: list[torch.Tensor] = []
    reader.register_forward_hook(lambda _m, _i, output: caught.append(output))
    with torch.no_grad():
        targets = []
        for batch in images:
            module(batch)
            targets.append(caught.pop())
    fine_tuned = reader.weight.detach().clone()

    def loss(i: int) -> torch.Tensor:
        scores = module(images[i])
        output = caught.pop()
        value = (output - targets[i]).square().mean() / 2
        return value + discrimination * nn.functional.cross_entropy(scores, labels[i])

    def walk() -> tuple[float, torch.Tensor]:
        module.zero_grad()
        total = sum(loss(i) for i in range(3)) / 3
        total.backward()
        each = reader.weight.grad.square().sum([d for d in range(reader.weight.dim()) if d != 1])
        return float(total.detach()), each.view(6, taps).sum(1).sqrt()

    chosen: list[int] = []
    reader.weight.data.zero_()
    losses: list[float] = []
    while True:
        value, norms = walk()
        losses.append(value)
        if epsilon is not None and chosen and abs(losses[-2] - value) / losses[0] <= epsilon:
            break
        if len(chosen) == (6 if count is None else count):
            break
        norms[chosen] = -1
        chosen.append(int(norms.argmax()))
        columns = torch.cat([torch.arange(taps) + taps * c for c in chosen])
        newest = torch.arange(taps) + taps * chosen[-1]
        reader.weight.data[:, newest] = fine_tuned[:, newest]
        trained = [reader.weight] + ([reader.bias] if reader.bias is not None else [])
        optimizer = torch.optim.SGD(trained, 0.01, momentum=0.9, weight_decay=1e-4, nesterov=True)
        for i in range(3):
            module.zero_grad()
            loss(i).backward()
            keep = torch.zeros(reader.weight.shape[1])
            keep[columns] = 1
            shape = [1, -1] + [1] * (reader.weight.dim() - 2)
            reader.weight.grad.mul_(keep.view(shape))
            optimizer.step()
    return chosen, losses, reader.weight.detach()


@pytest.mark.parametrize("discrimination", [0.0, 1.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_loop_with_a_rate_is_the_transcription(
    name: str, discrimination: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One stage with the network's own loss, which is what the transcription knows.
    monkeypatch.setattr(stages, "plan_stages", lambda *_: [(None, 10**9)])
    images, labels = _data()

    def fit_stage(module: nn.Module, pivot: str | None, number: int, is_fitted: bool):
        return [
            lambda scores, y=y: nn.functional.cross_entropy(scores, y, reduction="sum")
            for y in labels
        ]

    settings = Selection(
        rate=Fraction("0.5"),
        solver="sgd",
        target="conv",
        discrimination=discrimination,
        keep=("stem",),
    )
    network = _network(name)
    outcome = select(network, images, settings, fit_stage=fit_stage)
    choice = next(c for c in outcome.choices if c.group == "conv1")
    order, losses, weights = _slow(_network(name).module, discrimination, 3, None)
    assert list(choice.order) == order
    assert choice.losses == pytest.approx(losses, rel=1e-4)
    taps = 4 if name == "linear" else 1
    columns = torch.cat([torch.arange(taps) + taps * c for c in sorted(order)])
    got = outcome.network.module.conv2.weight
    assert torch.allclose(got, weights[:, columns], atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.2, 0.02])
def test_loop_with_epsilon_is_the_transcription(epsilon: float) -> None:
    images, _ = _data()
    settings = Selection(epsilon=epsilon, solver="sgd", target="conv", keep=("stem",))
    outcome = select(_network("residual"), images, settings)
    choice = next(c for c in outcome.choices if c.group == "conv1")
    order, losses, _ = _slow(_network("residual").module, 0.0, None, epsilon)
    assert list(choice.order) == order
    assert choice.losses == pytest.approx(losses, rel=1e-4)
    assert choice.why_stopped == ("epsilon" if len(order) < 6 else choice.why_stopped)


def test_dead_channels_are_filled_by_index_and_counted() -> None:
    network = _network("residual")
    with torch.no_grad():
        network.module.conv1.weight[[1, 2, 4, 5]] = 0.0
        network.module.conv1.bias[[1, 2, 4, 5]] = -1.0
    images, _ = _data()
    settings = Selection(rate=Fraction("0.3"), solver="sgd", target="conv", keep=("stem",))
    choice = select(network, images, settings).choices[0]
    assert set(choice.order[:2]) == {0, 3}
    assert choice.order[2:] == (1, 2, 4)
    assert choice.dead == 3


def test_random_keeps_its_own_order_and_trains_like_dcp() -> None:
    images, _ = _data()
    settings = Selection(
        rate=Fraction("0.5"), solver="sgd", target="conv", method="random", keep=("stem",)
    )
    first = select(_network("residual"), images, settings)
    again = select(_network("residual"), images, settings)
    assert first.choices == again.choices
    assert first.choices[0].losses[-1] < first.choices[0].losses[0]
