"""Widths that the hardware likes, and one budget for the whole network."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from click.testing import CliRunner

from dcptool.cli.prune_command import command
from dcptool.deploy import granularity
from dcptool.deploy.latency import Table
from dcptool.errors import GateFailed, UsageError
from dcptool.network import models
from dcptool.network.graph import build_graph
from dcptool.pipeline.job import Job
from dcptool.pipeline.widths import check_reach, decide
from dcptool.selection import widths
from dcptool.selection.settings import Budget, Selection
from dcptool.training.dist import SINGLE


@pytest.mark.parametrize(
    ("units", "kept", "multiple", "good"),
    [
        (256, 180, 16, 176),
        (256, 184, 16, 192),  # of two as near the larger
        (64, 45, 16, 48),
        (32, 23, 16, 24),  # narrow groups are rounded more finely
        (16, 12, 16, 12),
        (6, 4, 16, 4),
        (100, 99, 16, 100),  # whole is always good
        (100, 3, 16, 4),  # below a block, halves of it
        (64, 45, 1, 45),
    ],
)
def test_nearest_good_width(units: int, kept: int, multiple: int, good: int) -> None:
    assert widths.nearest(units, kept, multiple) == good


@pytest.mark.parametrize("rate", ["0.1", "0.3", "0.45", "0.7", "0.9", "0.98"])
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_100"])
def test_rounding_keeps_the_macs_of_the_rate(name: str, rate: str) -> None:
    network = models.load(f"timm:{name}", pretrained=False)
    graph = build_graph(network.module, network.input.size)
    exact = Selection(rate=Fraction(rate))
    rounded = widths.at_rate(network, graph, replace(exact, round_to=16))
    for group in exact.groups(graph):
        assert rounded[group.name] in widths.good_widths(len(group.units), 16)
    macs = widths.macs_of(network, graph)
    wanted = macs(widths.at_rate(network, graph, exact))
    assert macs(rounded) == pytest.approx(wanted, rel=0.02)


ASKED = {"rate": "0.5"}


def _small() -> tuple[object, list[torch.Tensor]]:
    torch.manual_seed(0)
    network = models.load("zoo:resnet20", pretrained=False)
    return network, [torch.randn(8, 3, 32, 32)]


@pytest.mark.parametrize("kind", ["macs", "params"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_a_budget_is_met_within_one_percent(tmp_path, kind: str, multiple: int) -> None:
    network, images = _small()
    settings = Selection(budget=Budget(kind, 0.4, True), round_to=multiple, positions=8)
    found = decide(network, images, Job(settings, training=False), tmp_path, SINGLE, ASKED)
    graph = build_graph(network.module, network.input.size)
    count = widths.macs_of if kind == "macs" else widths.params_of
    cost = count(network, graph)
    dense = cost({group.name: len(group.units) for group in settings.groups(graph)})
    assert cost(found.plan) / dense == pytest.approx(0.4, rel=0.01)
    # The run knows its widths from now on.
    again = decide(network, [], Job(settings, training=False), tmp_path, SINGLE, ASKED)
    assert again.plan == found.plan
    # Whoever asks for something else takes none of them.
    half = Job(replace(settings, budget=replace(settings.budget, value=0.5)), training=False)
    other = decide(network, images, half, tmp_path, SINGLE, {"rate": "0.2"})
    assert cost(other.plan) / dense == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("value", [0.001, 5e9])
def test_a_budget_out_of_reach_names_the_range(value: float) -> None:
    network, _ = _small()
    settings = Selection(budget=Budget("macs", value, value <= 1))
    with pytest.raises(UsageError) as caught:
        check_reach(network, settings)
    assert "to 1 of the dense network" in caught.value.why
    check_reach(network, Selection(budget=Budget("macs", 0.5, True)))


def test_a_budget_that_is_missed_fails(tmp_path, monkeypatch) -> None:
    network, images = _small()
    monkeypatch.setattr("dcptool.pipeline.widths.spread", lambda *_: {"layer1.0.conv1": 15})
    settings = Selection(budget=Budget("macs", 0.4, True), positions=8)
    with pytest.raises(GateFailed):
        decide(network, images, Job(settings, training=False), tmp_path, SINGLE, ASKED)
    assert not list(tmp_path.iterdir())
    nearest = replace(settings, budget=replace(settings.budget, met=False))
    found = decide(network, images, Job(nearest, training=False), tmp_path, SINGLE, ASKED)
    assert found.plan == {"layer1.0.conv1": 15}


def test_milliseconds_are_met_and_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dcptool.deploy.latency.SECONDS", 0.2)
    network, images = _small()
    budget = Budget("latency", 0.75, True, threads=1, batch_size=8)
    settings = Selection(budget=budget, positions=8)
    check_reach(network, settings)
    try:
        found = decide(network, images, Job(settings, training=False), tmp_path, SINGLE, ASKED)
    except GateFailed:
        pytest.skip("the machine is too noisy to time anything")
    assert (tmp_path / "widths.json").is_file()
    graph = build_graph(network.module, network.input.size)
    macs = widths.macs_of(network, graph)
    full = {group.name: len(group.units) for group in settings.groups(graph)}
    assert macs(found.plan) < macs(full)


def test_table_of_milliseconds() -> None:
    table = Table({"a": ((10, 1.0), (20, 3.0)), "b": ((5, 2.0),)}, ((0.0, 0.0), (10.0, 20.0)))
    assert table.predict({"a": 15, "b": 5}) == pytest.approx(8.0)
    assert table.predict({"a": 5, "b": 5}) == pytest.approx(5.0)


def test_the_finest_multiple_that_is_as_fast() -> None:
    assert granularity.best({1: 1.2, 8: 1.01, 16: 1.0, 32: 1.0}) == 8
    assert granularity.best({1: 1.0, 8: 1.0}) == 1
    assert granularity.auto("cpu") in (8, 16)
    assert granularity.auto("cuda") == 8


def test_measured_multiples_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert granularity.recall("a network") is None
    granularity.remember("a network", 16)
    granularity.remember("another", 8)
    assert granularity.recall("a network") == 16


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--target-latency", "1.5"], "is no target"),
        (["--target-macs", "half"], "is no target"),
        (["--target-macs", "-1"], "is no target"),
        (["--target-macs", "0.5", "--rate", "0.5"], "exclude each other"),
        (["--max-accuracy-drop", "1", "--rate", "0.5"], "exclude each other"),
        (["--max-accuracy-drop", "nan"], "nan"),
        (["--rate", "0.5", "--round-to", "0"], "'0'"),
        (["--rate", "0.5", "--round-to", "9999"], "256"),
        (["--epsilon", "0.1", "--solver", "sgd", "--round-to", "8"], "exact counts"),
        (["--rate", "0.5", "--provider", "quantum"], "unknown provider"),
    ],
)
def test_budgets_that_make_no_sense(words: list[str], says: str) -> None:
    done = CliRunner().invoke(command, ["zoo:resnet20", "--no-pretrained", *words])
    assert done.exit_code
    told = done.output + str(done.exception) + str(getattr(done.exception, "why", ""))
    assert says in told


@pytest.mark.parametrize(
    ("change", "could"),
    [
        ({}, True),
        ({"widths": "curves"}, False),
        ({"round_to": 1}, False),  # exact counts were asked for
        ({"rate": Fraction(0)}, False),
        ({"rates": {"conv1": Fraction(1, 4)}}, False),
        ({"method": "l1"}, False),
        ({"solver": "sgd"}, False),
        ({"rate": None, "epsilon": 0.01}, False),
    ],
)
def test_where_curves_could_do_better(change: dict, could: bool) -> None:
    plain = Selection(rate=Fraction(1, 2), round_to=16)
    assert replace(plain, **change).could_spread is could
