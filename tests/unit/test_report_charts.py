"""Charts of the report: what can be told apart, and what covers nothing."""

from __future__ import annotations

import re

import pytest

from dcptool.report import charts, labels

NAMES = {"title": "t", "x_name": "x", "y_name": "y"}


def test_long_curves_are_thinned():
    values = [(float(i), float(i)) for i in range(10_000)]
    thin = charts.thin(values)
    assert len(thin) == charts.MOST_POINTS
    assert (thin[0], thin[-1]) == (values[0], values[-1])


def test_a_flat_curve_can_be_drawn():
    line = charts.Curve("x", [(1.0, 2.0)])
    assert "nan" not in charts.curves([line], **NAMES)


def ticks(chart: str) -> list[float]:
    return [float(text) for text in re.findall(r'class="tick"[^>]*>([^<]+)<', chart)]


@pytest.mark.parametrize("accuracies", [(99.0, 99.0), (100.0, 100.0), (95.0, 100.0)])
def test_no_axis_goes_above_all_images(accuracies):
    dots = [(float(i), y, f"run {i}") for i, y in enumerate(accuracies)]
    found = ticks(charts.points(dots, [dots[0][:2]], **NAMES))
    assert len(found) > 2
    assert max(found) <= 100


def test_points_that_none_beats_look_otherwise():
    dots = [(1.0, 90.0, "small"), (2.0, 95.0, "good"), (3.0, 94.0, "bad")]
    drawn = charts.points(dots, [(1.0, 90.0), (2.0, 95.0)], **NAMES)
    found = re.findall(r'class="(best|point)"[^>]*data-tip="(\w+):', drawn)
    assert found == [("best", "small"), ("best", "good"), ("point", "bad")]
    assert ">dense<" not in drawn


def test_the_dense_network_stands_beside():
    drawn = charts.points(
        [(1.0, 90.0, "a")], [(1.0, 90.0)], dense=[(4.0, 91.0, "dense r")], **NAMES
    )
    assert 'data-tip="dense r: 4, 91.00"' in drawn
    assert ">dense r</text>" in drawn


def test_names_come_after_the_line_and_have_a_halo():
    dots = [(1.0, 90.0, "a"), (2.0, 95.0, "b")]
    drawn = charts.points(dots, [dot[:2] for dot in dots], **NAMES)
    places = [drawn.index(text) for text in ('class="front"', 'data-tip="b:', 'class="label halo"')]
    assert places == sorted(places)
    style = charts.STYLE.read_text()
    assert re.search(r"\.halo \{[^}]*paint-order: stroke", style)


def test_runs_in_one_place_share_a_name():
    dots = [(1.0, 90.0, "a"), (1.0, 90.0, "b"), (1.0, 90.0, "c")]
    drawn = charts.points(dots, [(1.0, 90.0)], **NAMES)
    assert ">a and 2 more</text>" in drawn


def test_names_cover_neither_points_nor_each_other():
    sheet = labels.Box(0, 0, 700, 300)
    spots = [(100.0, 150.0), (108.0, 152.0), (104.0, 160.0), (260.0, 151.0)]
    marks = [labels.mark_at(*spot) for spot in spots]
    written: list[labels.Box] = []
    for spot in spots:
        box = labels.free_place(*spot, 150.0, marks, written, sheet)
        assert sheet.holds(box)
        assert not any(box.meets(other) for other in (*marks, *written))
        written.append(box)


def test_dense_and_slim_have_one_colour_each():
    lines = [charts.Curve(name, [(0.0, 1.0), (1.0, 2.0)], role=name) for name in ("slim", "dense")]
    drawn = charts.curves(lines, **NAMES)
    assert re.findall(r'polyline class="([^"]+)"', drawn) == ["line slim", "line dense"]
    style = charts.STYLE.read_text()
    for name, colour in (("dense", "before"), ("slim", "after")):
        assert f".chart .{name} {{ fill: var(--{colour}); }}" in style
        assert f".chart .line.{name} {{ stroke: var(--{colour}); }}" in style


def test_a_chart_of_its_own_has_a_paper():
    drawn = charts.standalone(charts.curves([charts.Curve("x", [(1.0, 2.0)])], **NAMES))
    assert b'<rect class="paper"' in drawn
