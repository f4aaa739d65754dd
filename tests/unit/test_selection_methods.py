"""The rules that order channels, and what holds for all of them."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from three_blocks import blocks, noise

from dcptool.errors import UsageError
from dcptool.network.graph import Group
from dcptool.selection.gram import Moments
from dcptool.selection.methods import METHODS
from dcptool.selection.methods.question import Question
from dcptool.selection.settings import Selection
from dcptool.selection.stages import select


def _question(units: int = 5, outputs: int = 3) -> Question:
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(200, units, generator=draw)
    weights = torch.randn(units + 1, outputs, generator=draw, dtype=torch.float64)
    moments = Moments.empty(torch.arange(units), outputs)
    moments.add(u, (u.double() @ weights[:-1]).float())
    group = Group("g", tuple(range(units)), units, ("p",), (), ("c",), "prunable", "")
    filters = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0], dtype=torch.float64)
    zeros = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.2], dtype=torch.float64)
    return Question(group, [moments.mean()], [weights], filters, zeros)


def test_l1_keeps_the_largest_filters() -> None:
    assert METHODS["l1"].order(_question()).order == (3, 4, 0, 2, 1)


def test_apoz_keeps_the_fewest_zeros() -> None:
    assert METHODS["apoz"].order(_question()).order == (1, 4, 3, 0, 2)


def test_apoz_refuses_activations_without_zeros() -> None:
    question = _question()
    blind = Question(question.group, question.moments, question.weights, question.filters, None)
    with pytest.raises(UsageError, match="apoz cannot rank g"):
        METHODS["apoz"].order(blind)


def test_random_is_seeded_by_run_and_group() -> None:
    question = _question()
    order = METHODS["random"].order(question).order
    assert sorted(order) == list(range(5))
    assert order == METHODS["random"].order(question).order


def test_cp_follows_the_lasso_path() -> None:
    """Independent contributions: the path lets the smallest go first."""
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(4000, 4, generator=draw)
    scale = torch.tensor([1.0, 8.0, 2.0, 4.0], dtype=torch.float64)
    weights = torch.cat([torch.diag(scale), torch.zeros(1, 4, dtype=torch.float64)])
    moments = Moments.empty(torch.arange(4), 4)
    moments.add(u, (u.double() @ weights[:-1]).float())
    group = Group("g", (0, 1, 2, 3), 4, ("p",), (), ("c",), "prunable", "")
    question = Question(group, [moments.mean()], [weights], scale, None)
    assert METHODS["cp"].order(question).order == (1, 3, 2, 0)
    assert METHODS["thinet"].order(question).order == (1, 3, 2, 0)
    assert METHODS["dcp"].order(question).order == (1, 3, 2, 0)


@pytest.mark.parametrize(
    "method", ["dcp", "random", "l1", "apoz", "thinet", "cp", "slimming", "wm"]
)
def test_every_method_keeps_exactly_kappa_and_proves_it(method: str) -> None:
    network = blocks()
    before = {k: v.clone() for k, v in network.module.state_dict().items()}
    settings = Selection(rate=Fraction("0.5"), method=method, positions=16)
    outcome = select(network, noise(), settings)
    kept = {choice.group: len(choice.kept) for choice in outcome.choices}
    assert kept == {"one.conv1": 6, "two.conv1": 5, "three.conv1": 3}
    assert outcome.network.module.one.conv1.out_channels == 6
    assert outcome.network.module.one.conv2.in_channels == 6
    assert outcome.proof is not None
    assert outcome.proof.difference < 1e-5
    after = network.module.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(
    "method", ["dcp", "random", "l1", "apoz", "thinet", "cp", "slimming", "wm"]
)
@pytest.mark.parametrize("solver", ["gram", "sgd"])
def test_rate_zero_is_a_copy(method: str, solver: str) -> None:
    network = blocks()
    settings = Selection(rate=Fraction(0), method=method, solver=solver, prune_residual=True)
    outcome = select(network, noise(), settings)
    for key, value in network.module.state_dict().items():
        assert torch.equal(outcome.network.module.state_dict()[key], value), key
    assert [len(choice.kept) for choice in outcome.choices] == [8, 12, 10, 6]


def test_apoz_counts_zeros_of_residual_groups_too() -> None:
    settings = Selection(rate=Fraction("0.5"), method="apoz", positions=8, prune_residual=True)
    outcome = select(blocks(), noise(), settings)
    assert [len(choice.kept) for choice in outcome.choices] == [4, 6, 5, 3]
