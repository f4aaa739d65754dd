"""Charts as inline SVG: bars, curves, distributions, points.

Colours come from classes, so that the page's style decides about light and dark; every mark that
tells something carries it as `data-tip`, and as a title for files that stand alone. All text is
escaped by `Markup.format`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from dcptool.report.labels import LETTER_WIDTH, LINE_HEIGHT, Box, free_place, mark_at

MOST_POINTS = 160
STYLE = Path(__file__).with_name("charts.css")


@dataclass(frozen=True)
class Bar:
    """One layer: a value before and after, and what to say about it."""

    name: str
    before: float
    after: float
    tip: str
    is_locked: bool = False


@dataclass(frozen=True)
class Curve:
    """One line; `points` are x, y. `mark` is a point to be seen, with its text.

    A line with the role `dense` or `slim` has that network's colour, as in all other charts.
    """

    name: str
    points: Sequence[tuple[float, float]]
    mark: tuple[float, float] | None = None
    tip: str = ""
    role: str = ""


@dataclass(frozen=True)
class Band:
    """A stretch of bars that belong together, and what stands at its end."""

    first: int
    last: int
    name: str
    end: str = ""


def bars(items: Sequence[Bar], bands: Sequence[Band], *, title: str) -> Markup:
    """Widths before and after in forward order, and below them the share that was removed."""
    left, top, tall, low = 52, 58 if bands else 36, 170, 90
    step = min(max(940 // max(len(items), 1), 15), 34)
    keys = [("dense", "dense"), ("slim", "slim"), ("locked", "not open to pruning")]
    keys += [("gone", "removed"), *([("head", "head of a stage")] if bands else [])]
    width = max(left + step * len(items) + 12, _keys_width(keys, left))
    height = top + tall + 24 + low + 122
    most = max([1.0, *(item.before for item in items)])
    base, ground = top + tall, top + tall + 24 + low
    out = [_open(width, height, title), *_keys(keys, left)]
    for number, band in enumerate(bands):
        x = left + step * band.first
        wide = step * (band.last - band.first + 1)
        out.append(_rect(f"band{number % 2}", x, top - 16, wide, ground - top + 16))
        out.append(_text(x + 4, top - 20, band.name, "label"))
        if band.end:
            right = x + wide
            out.append(
                Markup(
                    '<path class="head" tabindex="0" data-tip="{t}" d="M{a} {y}h10l-5 9z">'
                    "<title>{t}</title></path>"
                ).format(t=band.end, a=right - 5, y=top - 16)
            )
            out.append(_line("headline", right, top - 6, right, ground))
    for value in _ticks(0, most):
        y = base - tall * value / most
        out += [_line("grid", left, y, width - 8, y), _text(left - 6, y + 4, _short(value), "tick")]
    for share in (0, 50, 100):
        y = ground - low * share / 100
        out += [_line("grid", left, y, width - 8, y), _text(left - 6, y + 4, f"{share} %", "tick")]
    out.append(_upright(12, top + tall / 2, "channels"))
    out.append(_upright(12, ground - low / 2, "removed"))
    for i, item in enumerate(items):
        x = left + step * i
        before, after = tall * item.before / most, tall * item.after / most
        gone = low * (1 - item.after / item.before) if item.before else 0.0
        kind = "locked" if item.is_locked else "slim"
        out.append(
            Markup(
                '<g class="bar" tabindex="0" role="img" aria-label="{t}" data-tip="{t}">'
            ).format(t=item.tip)
        )
        out.append(Markup("<title>{}</title>").format(item.tip))
        out.append(_rect("hit", x, top, step, ground - top))
        out.append(_rect("dense", x + 2, base - before, step - 4, before))
        out.append(_rect(kind, x + 2, base - after, step - 4, after))
        out.append(_rect("gone", x + 2, ground - gone, step - 4, gone))
        out.append(
            Markup(
                '<text class="name" transform="translate({x} {y}) rotate(-90)">{n}</text>'
            ).format(x=round(x + step / 2 + 3.5, 1), y=ground + 6, n=_cut(item.name, 22))
        )
        out.append(Markup("</g>"))
    out.append(Markup("</svg>"))
    return Markup("").join(out)


def curves(
    lines: Sequence[Curve],
    *,
    title: str,
    x_name: str,
    y_name: str,
    width: int = 560,
    height: int = 260,
    counts: bool = False,
    y_limits: tuple[float, float] | None = None,
) -> Markup:
    """Lines over one pair of axes; with `counts` the axis below has whole numbers alone."""
    points = [p for line in lines for p in line.points]
    if not points:
        return Markup("")
    left, right, bottom = 66, 12, 40
    top = 32 if len(lines) > 1 else 14
    x0, x1 = _range([x for x, _ in points])
    y0, y1 = y_limits or _range([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (width - left - right) * (x - x0) / (x1 - x0)
        return across, height - bottom - (height - top - bottom) * (y - y0) / (y1 - y0)

    out = [_open(width, height, title)]
    out += _axes(place, (x0, x1), (y0, y1), (x_name, y_name), 1.0 if counts else 0.0)
    for number, line in enumerate(lines):
        kind = _kind(line, number)
        shown = [place(x, y) for x, y in thin(line.points)]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        out.append(
            Markup(
                '<polyline class="{k}" tabindex="0" data-tip="{t}" points="{p}">'
                "<title>{t}</title></polyline>"
            ).format(k=kind, t=line.tip or line.name, p=text)
        )
        if len(shown) == 1:  # a line of one point would not be seen
            out.append(_dot(kind, *shown[0], 3.5, line.tip or line.name))
        if line.mark is not None:
            x, y = place(*line.mark)
            out.append(_dot("mark", x, y, 4.5, line.tip or line.name))
    if len(lines) > 1:
        out += _legend(lines, left)
    out.append(Markup("</svg>"))
    return Markup("").join(out)


def points(
    dots: Sequence[tuple[float, float, str]],
    front: Sequence[tuple[float, float]],
    *,
    title: str,
    x_name: str,
    y_name: str,
    dense: Sequence[tuple[float, float, str]] = (),
) -> Markup:
    """Cost and accuracy in percent of named points, and the line of those that none beats in both.

    Networks that nothing was cut from are `dense`; they stand beside, and beat nothing.
    """
    width, height, left, right, top, bottom = 740, 400, 58, 16, 58, 42
    everything = [*dots, *dense]
    x0, x1 = _range([x for x, _, _ in everything], room=0.08)
    y0, y1 = _range([y for _, y, _ in everything], room=0.1)
    # Nothing costs less than nothing, and no accuracy is above 100 %.
    x0, y1 = max(x0, 0.0), min(y1, 100.0)

    def place(x: float, y: float) -> tuple[float, float]:
        across = left + (width - left - right) * (x - x0) / (x1 - x0)
        return across, height - bottom - (height - top - bottom) * (y - y0) / (y1 - y0)

    best = set(front)
    keys = [("best", "beaten by none"), ("point", "beaten"), ("dense", "dense")]
    out = [_open(width, height, title), *_keys(keys[: 3 if dense else 2], left)]
    out += _axes(place, (x0, x1), (y0, y1), (x_name, y_name))
    line = " ".join("{:.1f},{:.1f}".format(*place(*p)) for p in front)
    out.append(Markup('<polyline class="front" points="{}"/>').format(line))
    names: dict[tuple[float, float], list[str]] = {}
    for x, y, name in everything:
        names.setdefault((x, y), []).append(name)
    for x, y, name in dense:
        a, b = place(x, y)
        out.append(_rect("dense", a - 5, b - 5, 10, 10, f"{name}: {_short(x)}, {y:.2f}"))
    for x, y, name in dots:
        kind = "best" if (x, y) in best else "point"
        out.append(_dot(kind, *place(x, y), 5.5, f"{name}: {_short(x)}, {y:.2f}"))
    marks = [mark_at(*place(*spot)) for spot in names]
    sheet = Box(left, top - 2 * LINE_HEIGHT - 4, width, height - bottom)
    written: list[Box] = []
    labels = []
    # Long names have the first choice: they find a place least easily.
    for spot, same in sorted(names.items(), key=lambda item: -len(item[1][0])):
        text = _cut(same[0], 34) + (f" and {len(same) - 1} more" if len(same) > 1 else "")
        box = free_place(*place(*spot), LETTER_WIDTH * len(text), marks, written, sheet)
        written.append(box)
        if box.gap(mark_at(*place(*spot))) > LINE_HEIGHT / 2:
            out.append(_line("leader", *place(*spot), *box.nearest(*place(*spot))))
        labels.append(_text(box.left, box.bottom - 2, text, "label halo"))
    # Above all marks, so that no line runs through a name.
    out += [*labels, Markup("</svg>")]
    return Markup("").join(out)


def standalone(picture: Markup) -> bytes:
    """A chart as a file of its own, with its style inside."""
    style = STYLE.read_text(encoding="utf-8")
    head, _, rest = str(picture).partition(">")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    # Without a paper of its own the text would be lost on a page of the other colour.
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return f"{head}><style>{style}</style>{paper}{rest}\n".encode()


def thin(values: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Few enough points to draw; the first and the last stay."""
    if len(values) <= MOST_POINTS:
        return list(values)
    step = (len(values) - 1) / (MOST_POINTS - 1)
    return [values[round(i * step)] for i in range(MOST_POINTS)]


def _axes(
    place: Callable[[float, float], tuple[float, float]],
    xs: tuple[float, float],
    ys: tuple[float, float],
    names: tuple[str, str],
    least_step: float = 0.0,
) -> list[Markup]:
    out = []
    start, _ = place(xs[0], ys[0])
    end, ground = place(xs[1], ys[0])
    for value in _ticks(*ys):
        _, y = place(xs[0], value)
        out += [_line("grid", start, y, end, y), _text(start - 6, y + 4, _short(value), "tick")]
    for value in _ticks(*xs, least=least_step):
        x, _ = place(value, ys[0])
        out.append(_text(x, ground + 16, _short(value), "xtick"))
    out.append(_line("axis", start, ground, end, ground))
    out.append(_text((start + end) / 2, ground + 33, names[0], "xtick"))
    out.append(_upright(12, (place(xs[0], ys[1])[1] + ground) / 2, names[1]))
    return out


def _kind(line: Curve, number: int) -> str:
    return f"line {line.role if line.role in ('dense', 'slim') else f'line{number % 4}'}"


def _legend(lines: Sequence[Curve], left: float) -> list[Markup]:
    """Names above the lines, which may go anywhere below."""
    out = []
    for number, line in enumerate(lines):
        x = left + 140 * number
        out.append(_line(_kind(line, number), x, 12, x + 20, 12))
        out.append(_text(x + 25, 16, _cut(line.name, 18), "label"))
    return out


def _keys(keys: Sequence[tuple[str, str]], left: float) -> list[Markup]:
    """What the colours mean, above the chart: class of the mark, and its name."""
    out = []
    for number, (kind, name) in enumerate(keys):
        x = _keys_width(keys[:number], left)
        if kind in ("best", "point"):
            out.append(Markup('<circle class="{}" cx="{}" cy="12" r="4.5"/>').format(kind, x + 5))
        else:
            out.append(_rect(kind, x, 7, 10, 10))
        out.append(_text(x + 15, 16, name, "label"))
    return out


def _keys_width(keys: Sequence[tuple[str, str]], left: float) -> float:
    return round(left + sum(30 + LETTER_WIDTH * len(name) for _, name in keys), 1)


def _open(width: float, height: float, title: str) -> Markup:
    return Markup(
        '<svg class="chart" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="group" '
        'aria-label="{t}">'
    ).format(w=round(width), h=round(height), t=title)


def _rect(
    kind: str, x: float, y: float, width: float, height: float, tip: str | None = None
) -> Markup:
    box = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"').format(
        kind, *(round(v, 1) for v in (x, y, max(width, 0.0), max(height, 0.0)))
    )
    if tip is None:
        return box + Markup("/>")
    told = Markup(' tabindex="0" data-tip="{t}"><title>{t}</title></rect>').format(t=tip)
    return box + told


def _line(kind: str, x: float, y: float, to_x: float, to_y: float) -> Markup:
    return Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(
        kind, *(round(v, 1) for v in (x, y, to_x, to_y))
    )


def _dot(kind: str, x: float, y: float, size: float, tip: str) -> Markup:
    return Markup(
        '<circle class="{k}" cx="{x}" cy="{y}" r="{r}" tabindex="0" data-tip="{t}">'
        "<title>{t}</title></circle>"
    ).format(k=kind, x=round(x, 1), y=round(y, 1), r=size, t=tip)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(
        kind, round(x, 1), round(y, 1), text
    )


def _upright(x: float, y: float, text: str) -> Markup:
    return Markup('<text class="xtick" transform="translate({} {}) rotate(-90)">{}</text>').format(
        round(x, 1), round(y, 1), text
    )


def _range(values: Sequence[float], *, room: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high <= low:
        pad = abs(low) * 0.05 or 1.0
        return low - pad, high + pad
    pad = (high - low) * room
    return low - pad, high + pad


def _ticks(low: float, high: float, *, least: float = 0.0) -> list[float]:
    """About five round values between two limits, at least `least` apart."""
    if high <= low:
        return [low]
    raw = max((high - low) / 5, least)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.2e}".replace("e-0", "e-") if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else "…" + text[1 - most :]
