"""The closed form against slow, independent computations."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from dcptool.selection import gram
from dcptool.selection.features import (
    Positions,
    choose_positions,
    is_readable,
    rows_at,
    taps,
    values_at,
)
from dcptool.selection.joint import metric, weigh
from dcptool.selection.methods.thinet import contributions, drop_least


def _problem(units: int, width: int, outputs: int, *, rows: int = 400, seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(units * width, units * width, generator=draw)
    u = torch.randn(rows, units * width, generator=draw) @ mix
    t = u @ torch.randn(units * width, outputs, generator=draw) + 0.5
    t += torch.randn(rows, outputs, generator=draw)
    unit = torch.arange(units).repeat_interleave(width)
    moments = gram.Moments.empty(unit, outputs)
    moments.add(u[: rows // 2], t[: rows // 2])
    moments.add(u[rows // 2 :], t[rows // 2 :])
    return moments.mean(), u.double(), t.double(), unit


def _loss(u: torch.Tensor, t: torch.Tensor, columns: torch.Tensor) -> float:
    design = torch.cat([u[:, columns], torch.ones(len(u), 1, dtype=u.dtype)], dim=1)
    solution = torch.linalg.lstsq(design, t).solution
    return float((design @ solution - t).square().sum() / len(u))


def test_refit_is_least_squares() -> None:
    moments, u, t, unit = _problem(6, 3, 4)
    kept = torch.cat([unit != 2, torch.ones(1, dtype=torch.bool)])
    weights = gram.refit(moments, kept, ridge=1e-12)
    columns = torch.nonzero(unit != 2).flatten()
    design = torch.cat([u[:, columns], torch.ones(len(u), 1, dtype=u.dtype)], dim=1)
    wanted = torch.linalg.lstsq(design, t).solution
    got = torch.cat([weights[columns], weights[-1:]])
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert not weights[torch.nonzero(unit == 2).flatten()].any()
    assert gram.error(moments, weights) == pytest.approx(_loss(u, t, columns), rel=1e-4)


def test_ridge_pulls_towards_the_given_weights() -> None:
    moments, _, _, _ = _problem(4, 1, 2)
    aim = torch.randn(5, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    kept = torch.ones(5, dtype=torch.bool)
    strong = gram.refit(moments, kept, ridge=1e9, toward=aim)
    assert torch.allclose(strong[:-1], aim[:-1], atol=1e-5)


@pytest.mark.parametrize("width", [1, 4])
def test_forward_order_takes_the_largest_drop_each_time(width: int) -> None:
    moments, u, t, unit = _problem(5, width, 3)
    ranking = gram.forward_order([moments], 5, score="drop", ridge=1e-12)
    chosen: list[int] = []
    for wanted in ranking.order:
        rest = [j for j in range(5) if j not in chosen]
        losses = {
            j: _loss(u, t, torch.nonzero(torch.isin(unit, torch.tensor([*chosen, j]))).flatten())
            for j in rest
        }
        assert wanted == min(losses, key=losses.__getitem__)
        chosen.append(wanted)
        assert ranking.losses[len(chosen)] == pytest.approx(losses[wanted], rel=1e-4)


def test_gradient_order_is_the_papers_rule() -> None:
    moments, u, t, unit = _problem(5, 2, 3)
    ranking = gram.forward_order([moments], 5, score="gradient", ridge=1e-12)
    chosen: list[int] = []
    for wanted in ranking.order:
        columns = torch.nonzero(torch.isin(unit, torch.tensor(chosen, dtype=torch.long))).flatten()
        design = torch.cat([u[:, columns], torch.ones(len(u), 1, dtype=u.dtype)], dim=1)
        residual = design @ torch.linalg.lstsq(design, t).solution - t
        norms = {
            j: float((u[:, unit == j].T @ residual).norm()) for j in range(5) if j not in chosen
        }
        assert wanted == max(norms, key=norms.__getitem__)
        chosen.append(wanted)


@pytest.mark.parametrize("width", [1, 3])
def test_backward_order_removes_the_least_loss_each_time(width: int) -> None:
    moments, u, t, unit = _problem(5, width, 3)
    ranking = gram.backward_order([moments], 5, ridge=1e-12)
    alive = list(range(5))
    for wanted in ranking.order[:0:-1]:
        losses = {
            j: _loss(
                u,
                t,
                torch.nonzero(
                    torch.isin(unit, torch.tensor([k for k in alive if k != j]))
                ).flatten(),
            )
            for j in alive
        }
        assert wanted == min(losses, key=losses.__getitem__)
        alive.remove(wanted)
        assert ranking.losses[len(alive)] == pytest.approx(losses[wanted], rel=1e-4)


def test_backward_order_may_end_early() -> None:
    moments, _, _, _ = _problem(6, 2, 3)
    whole = gram.backward_order([moments], 6)
    part = gram.backward_order([moments], 6, count=4)
    assert set(part.order[:4]) == set(whole.order[:4])
    assert part.order[4:] == whole.order[4:]
    assert part.losses == pytest.approx(whole.losses[4:])


def test_several_readers_add_their_losses() -> None:
    one, u1, t1, unit = _problem(4, 1, 2, seed=1)
    two, u2, t2, _ = _problem(4, 1, 3, seed=2)
    ranking = gram.forward_order([one, two], 4, ridge=1e-12)
    first = {
        j: _loss(u1, t1, torch.nonzero(unit == j).flatten())
        + _loss(u2, t2, torch.nonzero(unit == j).flatten())
        for j in range(4)
    }
    assert ranking.order[0] == min(first, key=first.__getitem__)


def test_losses_never_rise_with_more_units() -> None:
    moments, _, _, _ = _problem(6, 2, 3)
    for ranking in (gram.forward_order([moments], 6), gram.backward_order([moments], 6)):
        pairs = itertools.pairwise(ranking.losses)
        assert all(more <= less + 1e-9 for less, more in pairs)
        assert sorted(ranking.order) == list(range(6))


def test_columns_outside_the_group_are_always_there() -> None:
    moments, u, t, _ = _problem(4, 1, 2)
    moments.unit = torch.tensor([-1, 0, 1, 2, -1])
    ranking = gram.forward_order([moments], 3, ridge=1e-12)
    assert ranking.losses[0] == pytest.approx(_loss(u, t, torch.tensor([0])), rel=1e-4)
    assert sorted(ranking.order) == [0, 1, 2]


LAYERS = {
    "plain": nn.Conv2d(3, 5, 3, padding=1),
    "strided": nn.Conv2d(3, 5, 3, stride=2, padding=1, bias=False),
    "dilated": nn.Conv2d(3, 5, 3, dilation=2, padding=2),
    "oblong": nn.Conv2d(3, 5, (1, 5), padding=(0, 2)),
    "pointwise": nn.Conv2d(3, 5, 1, stride=2),
    "reflect": nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_weights_are_the_layers_output(name: str) -> None:
    layer = LAYERS[name]
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    output = layer(images)
    at = choose_positions(output.shape, len(output), 6, torch.Generator().manual_seed(1))
    rows = rows_at(layer, images, at)
    assert rows.shape == (12, 3 * taps(layer))
    bias = layer.bias if layer.bias is not None else 0
    assert torch.allclose(rows @ layer.weight.flatten(1).T + bias, values_at(output, at), atol=1e-5)


def test_rows_of_same_padding() -> None:
    from timm.layers import Conv2dSame

    layer = Conv2dSame(3, 4, 3, stride=2)
    images = torch.randn(2, 3, 9, 9)
    output = layer(images)
    at = choose_positions(output.shape, len(output), 100, torch.Generator().manual_seed(1))
    got = rows_at(layer, images, at) @ layer.weight.flatten(1).T + layer.bias
    assert torch.allclose(got, values_at(output, at), atol=1e-5)


def test_rows_of_a_linear_layer_on_tokens() -> None:
    layer = nn.Linear(6, 4)
    tokens = torch.randn(3, 7, 6)
    output = layer(tokens)
    at = choose_positions(output.shape, len(output), 5, torch.Generator().manual_seed(0))
    got = rows_at(layer, tokens, at) @ layer.weight.T + layer.bias
    assert torch.allclose(got, values_at(output, at), atol=1e-5)


def test_grouped_and_transposed_layers_are_not_solved_for() -> None:
    assert not is_readable(nn.Conv2d(4, 4, 3, groups=2))
    assert not is_readable(nn.ConvTranspose2d(4, 4, 3))


def test_positions_are_distinct_and_seeded() -> None:
    output = torch.zeros(2, 3, 5, 5)
    first = choose_positions(output.shape, len(output), 10, torch.Generator().manual_seed(4))
    again = choose_positions(output.shape, len(output), 10, torch.Generator().manual_seed(4))
    flat = first.rows * 5 + first.columns
    assert all(len(set(row.tolist())) == 10 for row in flat)
    assert torch.equal(first.rows, again.rows)
    assert torch.equal(first.columns, again.columns)
    assert isinstance(first, Positions)


def test_contributions_against_direct_sums() -> None:
    moments, u, t, unit = _problem(4, 2, 3)
    weights = torch.randn(9, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    products, aim = contributions(moments, weights, 4)
    parts = [u[:, unit == j] @ weights[:-1][unit == j] for j in range(4)]
    for i, j in itertools.product(range(4), range(4)):
        assert float(products[i, j]) == pytest.approx(
            float((parts[i] * parts[j]).sum() / len(u)), rel=1e-4, abs=1e-6
        )
    for j in range(4):
        assert float(aim[j]) == pytest.approx(float((parts[j] * t).sum() / len(u)), rel=1e-4)


def test_drop_least_against_brute_force() -> None:
    draw = torch.Generator().manual_seed(0)
    parts = torch.randn(5, 50, generator=draw, dtype=torch.float64)
    gram_matrix = parts @ parts.T
    ranking = drop_least(gram_matrix)
    gone: list[int] = []
    for wanted in ranking.order[::-1]:
        energies = {
            j: float(parts[[*gone, j]].sum(0).square().sum()) for j in range(5) if j not in gone
        }
        assert wanted == min(energies, key=energies.__getitem__)
        gone.append(wanted)


def test_joint_metric_without_a_slope_is_reconstruction() -> None:
    plain = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    none = torch.zeros(3, 3, dtype=torch.float64)
    assert torch.allclose(metric(plain, none, 1.0), torch.diag(plain.square() / 5))


def test_joint_metric_gives_both_losses_the_same_say() -> None:
    """Whatever the scale of the gradients, each part has a trace of one at lambda 1."""
    plain = torch.rand(4, dtype=torch.float64) + 0.1
    g = torch.randn(50, 4, dtype=torch.float64)
    for scale in (1e-6, 1.0, 1e6):
        both = metric(plain, scale * g.T @ g, 1.0)
        assert float(both.trace()) == pytest.approx(2.0)
        alone = metric(plain, scale * g.T @ g, math.inf)
        assert float(alone.trace()) == pytest.approx(1.001)


def test_errors_count_as_the_metric_says() -> None:
    """Loss of the rotated problem against the metric applied to the errors themselves."""
    moments, u, t, _ = _problem(4, 1, 3)
    g = torch.randn(40, 3, dtype=torch.float64)
    omega = metric(torch.ones(3, dtype=torch.float64), g.T @ g, 0.7)
    turned = weigh(moments, omega)
    values, vectors = torch.linalg.eigh(omega)
    root = vectors * values.sqrt()
    kept = torch.tensor([True, False, True, True, True])
    solved = gram.refit(turned, kept, ridge=0.0)
    again = gram.refit(moments, kept, ridge=0.0)
    assert torch.allclose(solved, again @ root, atol=1e-9)
    design = torch.cat([u, torch.ones(len(u), 1, dtype=u.dtype)], dim=1)
    errors = design @ again - t
    wanted = float(((errors @ omega) * errors).sum() / len(u))
    explained = float((turned.c * solved).sum())
    energy = float(((t @ omega) * t).sum() / len(u))
    assert energy - explained == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(("rows", "noise"), [(40, 30.0), (400, 1.0), (400, 0.01)])
def test_the_ridge_is_the_weakest_that_does_well_on_the_other_half(rows: int, noise: float) -> None:
    draw = torch.Generator().manual_seed(0)
    u = torch.randn(rows, 12, generator=draw, dtype=torch.float64)
    own = torch.randn(13, 3, generator=draw, dtype=torch.float64)
    ones = torch.ones(rows, 1, dtype=torch.float64)
    t = torch.cat([u, ones], 1) @ own + noise * torch.randn(rows, 3, generator=draw).double()
    start = own + 0.3 * torch.randn(13, 3, generator=draw).double()
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    cut = rows // 2 - 3
    whole, half = (gram.Moments.empty(torch.arange(12), 3) for _ in range(2))
    whole.add(u, t)
    half.add(u[:cut], t[:cut])
    whole.half = half
    moments = whole.mean()
    rest = gram.Moments.empty(torch.arange(12), 3)
    rest.add(u[cut:], t[cut:])
    assert torch.allclose(moments.other_half().s, rest.mean().s)
    assert torch.allclose(moments.other_half().c, rest.mean().c)

    def solved(rows_of: slice, ridge: float) -> torch.Tensor:
        a, b = torch.cat([u, ones], 1)[rows_of], t[rows_of]
        penalty = ridge * float((a[:, :-1] ** 2).mean()) * len(a) * torch.eye(13).double()
        penalty[-1, -1] = 0.0
        return torch.linalg.solve(a.T @ a + penalty, a.T @ b + penalty @ start)

    def loss(ridge: float) -> float:
        first, second = slice(0, cut), slice(cut, None)
        design = torch.cat([u, ones], 1)
        return sum(
            float((((design[b] @ solved(a, ridge) - t[b]) * scale) ** 2).sum(1).mean())
            for a, b in ((first, second), (second, first))
        )

    kept = torch.ones(13, dtype=torch.bool)
    found = gram.best_ridge(moments, kept, start, scale)
    tried = [1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0]
    enough = 1.005 * min(loss(ridge) for ridge in tried)
    assert found == pytest.approx(next(ridge for ridge in tried if loss(ridge) <= enough))
    assert gram.best_ridge(rest.mean(), kept, start, scale) == gram.RIDGE


def test_noise_asks_for_a_stronger_ridge() -> None:
    """The chosen ridge is no constant: it follows what the rows can tell."""
    found = []
    for noise in (0.01, 30.0):
        draw = torch.Generator().manual_seed(1)
        u = torch.randn(60, 12, generator=draw)
        own = torch.randn(12, 3, generator=draw)
        t = u @ own + noise * torch.randn(60, 3, generator=draw)
        whole, half = (gram.Moments.empty(torch.arange(12), 3) for _ in range(2))
        whole.add(u, t)
        half.add(u[:30], t[:30])
        whole.half = half
        start = torch.cat([own, torch.zeros(1, 3)]).double()
        start += 0.1 * torch.randn(13, 3, generator=draw)
        kept = torch.ones(13, dtype=torch.bool)
        found.append(gram.best_ridge(whole.mean(), kept, start, torch.ones(3).double()))
    assert found[0] < found[1]


def test_few_rows_hold_a_choice_to_the_present_weights() -> None:
    """A unit that others explain by chance alone is not taken for one that can go."""
    torch.manual_seed(0)
    columns, images = 40, 50
    u, others = torch.randn(2, images, columns, dtype=torch.float64)
    weights = torch.zeros(columns + 1, 1, dtype=torch.float64)
    weights[:columns, 0] = torch.linspace(0.2, 1.0, columns)
    unit = torch.arange(columns)

    def moments(rows: torch.Tensor) -> gram.Moments:
        found, half = gram.Moments.empty(unit, 1), gram.Moments.empty(unit, 1)
        found.add(rows, rows @ weights[:-1])
        half.add(rows[: images // 2], rows[: images // 2] @ weights[:-1])
        found.half = half
        return found.mean()

    plain, scale = moments(u), torch.ones(1, dtype=torch.float64)
    held = gram.steadied(plain, plain.unit, weights, scale, Fraction(1, 2), has_bias=True)
    truth = moments(others)
    lost = {}
    for name, problem in (("plain", plain), ("held", held)):
        order = gram.backward_order([problem], columns, count=columns // 2).order[: columns // 2]
        kept = torch.zeros(columns + 1, dtype=torch.bool)
        kept[list(order)] = True
        ridge = gram.best_ridge(plain, kept, weights, scale)
        lost[name] = gram.error(truth, gram.refit(plain, kept, ridge=ridge, toward=weights))
    assert lost["held"] < 0.8 * lost["plain"]


def test_many_rows_leave_a_choice_free() -> None:
    torch.manual_seed(0)
    u = torch.randn(4000, 8, dtype=torch.float64)
    u[:, 4:] += u[:, :4]
    weights = torch.randn(9, 2, dtype=torch.float64)
    found, half = gram.Moments.empty(torch.arange(8), 2), gram.Moments.empty(torch.arange(8), 2)
    found.add(u, u @ weights[:-1])
    half.add(u[:2000], u[:2000] @ weights[:-1])
    found.half = half
    plain = found.mean()
    scale = torch.ones(2, dtype=torch.float64)
    assert gram.steadied(plain, plain.unit, weights, scale, Fraction(1, 2), has_bias=True) is plain


def test_a_layer_that_sees_nothing_is_ordered_by_index() -> None:
    s, c = torch.zeros(9, 9, dtype=torch.float64), torch.zeros(9, 3, dtype=torch.float64)
    s[-1, -1] = 1.0
    unit = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, -1])
    dead = gram.Moments(s, c, torch.zeros(3, dtype=torch.float64), unit, 1)
    assert sorted(gram.forward_order([dead], 4).order) == [0, 1, 2, 3]
