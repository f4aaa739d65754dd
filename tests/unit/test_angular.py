"""Angular softmax against its definition by angles, its annealing, and its places in training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dcptool.errors import UsageError
from dcptool.selection.heads import (
    AngularHeadLoss,
    Head,
    WithHead,
    WithHeads,
    new_head,
    summed,
    with_head_losses,
)
from dcptool.training import angular
from dcptool.training.losses import Outcome, cross_entropy, tell_step, with_sparsity


def psi(angle: float) -> float:
    sector = min(int(angle * 4 / math.pi), 3)
    return (-1) ** sector * math.cos(4 * angle) - 2 * sector


def test_psi_is_that_of_the_definition_and_falls():
    angles = [0.0, 0.2, 0.7, math.pi / 4, 1.0, 1.5, 2.0, 2.6, 3.0, math.pi]
    cosines = torch.tensor([math.cos(a) for a in angles], dtype=torch.float64)
    found = angular.margin_cosine(cosines)
    assert found.tolist() == pytest.approx([psi(a) for a in angles], abs=1e-6)
    assert found.diff().lt(0).all()
    assert (found[0].item(), found[-1].item()) == pytest.approx((1.0, -7.0))


def test_slopes_are_finite_everywhere():
    cosines = torch.tensor([-1.0, -0.5, 0.0, math.sqrt(0.5), 1.0], requires_grad=True)
    angular.margin_cosine(cosines).sum().backward()
    assert torch.isfinite(cosines.grad).all()


def test_logits_move_the_right_class_alone():
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 6, generator=draw) for n in (5, 3))
    targets = torch.tensor([0, 1, 2, 1, 0])
    found = angular.angular_logits(x, w, targets, blend=5.0)
    for row in range(5):
        for column in range(3):
            cosine = float(functional.cosine_similarity(x[row], w[column], dim=0))
            if column == targets[row]:
                cosine = (5 * cosine + psi(math.acos(cosine))) / 6
            assert float(found[row, column]) == pytest.approx(
                float(x[row].norm()) * cosine, abs=1e-4
            )
    plain = angular.angular_logits(x, w, targets, blend=1e9)
    assert torch.allclose(plain, x @ functional.normalize(w).T, atol=1e-4)


def test_annealing():
    falling = angular.Annealing()
    assert falling.at(0) == 1000
    assert falling.at(100) == pytest.approx(1000 / 13)
    assert falling.at(10**6) == 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 3, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])


def test_the_final_loss_reads_what_the_classifier_reads_and_follows_the_step():
    images, targets = batch()
    net = Net()
    loss = angular.AngularSoftmax()
    first = loss(net, images, targets)
    assert net.fc.weight.norm(dim=1).tolist() == pytest.approx([1.0] * 3)
    assert not net.fc.bias.any()
    features = torch.relu(net.norm(net.conv(images))).mean((2, 3))
    logits = angular.angular_logits(features, net.fc.weight, targets, 1000.0)
    assert first.loss.item() == pytest.approx(functional.cross_entropy(logits, targets).item())
    assert torch.allclose(first.scores, net(images))
    tell_step(loss, 10**6)
    assert loss(net, images, targets).loss.item() > first.loss.item()
    with pytest.raises(UsageError, match="one label"):
        loss(net, images, torch.zeros(6, 3))


def test_the_head_can_be_angular():
    images, targets = batch()
    net, head = Net(), new_head(4, 3, 0)
    with WithHead(net, "conv", head).attached() as both:
        loss = AngularHeadLoss()
        tell_step(loss, 10**6)
        outcome = loss(both, images, targets)
        outcome.loss.backward()
    assert net.conv.weight.grad is not None
    assert net.fc.weight.grad is None
    head.eval()
    value = net.conv(images).detach()
    pooled = head.pooled(value)
    logits = angular.angular_logits(pooled, head.linear.weight, targets, 5.0)
    wanted = functional.cross_entropy(logits, targets, reduction="sum")
    assert torch.allclose(summed(head, targets, "angular")(value), wanted)
    plain = functional.cross_entropy(head(value), targets, reduction="sum")
    assert torch.allclose(summed(head, targets)(value), plain)
    assert torch.allclose(summed(None, targets, "angular")(head(value)), plain)


@pytest.mark.parametrize("kind", ["cross-entropy", "angular"])
def test_extra_losses_are_added_to_the_networks_own(kind):
    images, targets = batch()
    net = Net().eval()
    heads: dict[str, Head] = {"conv": new_head(4, 3, 0).eval(), "norm": new_head(4, 3, 1).eval()}
    with WithHeads(net, heads).attached() as both:
        loss = with_head_losses(cross_entropy(), kind)
        tell_step(loss, 10**6)
        outcome = loss(both, images, targets)
    total = functional.cross_entropy(net(images), targets)
    for head, value in zip(
        heads.values(), (net.conv(images), net.norm(net.conv(images))), strict=True
    ):
        logits = head(value)
        if kind == "angular":
            logits = angular.angular_logits(head.pooled(value), head.linear.weight, targets, 5.0)
        total = total + functional.cross_entropy(logits, targets)
    assert torch.allclose(outcome.loss, total)
    assert torch.equal(outcome.scores, net(images))
    assert not both.values


def test_sparsity_pulls_on_norm_scales_alone():
    images, targets = batch()
    net = Net().eval()
    net.other = nn.BatchNorm2d(4)
    net.norm.weight.data = torch.tensor([1.0, -2.0, 0.5, 0.0])
    told = []

    def own(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> Outcome:
        return Outcome(model(images).sum() * 0)

    own.at_step = told.append
    loss = with_sparsity(own, 0.1)
    tell_step(loss, 7)
    outcome = loss(net, images, targets)
    assert outcome.loss.item() == pytest.approx(0.75)
    outcome.loss.backward()
    assert net.norm.weight.grad.tolist() == pytest.approx([0.1, -0.1, 0.1, 0.0])
    assert not net.conv.weight.grad.any()
    assert told == [7]
    with pytest.raises(UsageError, match="needs batch norms"):
        with_sparsity(own, 0.1)(nn.Linear(8, 2), images, targets)
