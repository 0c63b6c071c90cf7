"""A sweep as a picture: SVG, written by hand, of rates over lengths with their spread."""

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from lily.speed import Row

WIDTH, HEIGHT, MARGIN = 460, 340, 56
COLOURS = ("#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72")


def svg(rows: Sequence[Row], title: str) -> str:
    """Draw prefill on the left and decoding on the right: medians as lines, least and greatest as bars."""
    panels = [
        _panel(rows, 0, "prefill, tok/s", lambda row: row.prefill),
        _panel(rows, WIDTH, "decode, tok/s", lambda row: row.decode),
    ]
    names = "".join(
        f'<text x="{MARGIN + 190 * i}" y="{HEIGHT + 24}" fill="{COLOURS[i % len(COLOURS)]}">'
        f"{escape(name)}</text>"
        for i, name in enumerate(_engines(rows))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT + 40}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN}" y="20" font-size="14">{escape(title)}</text>{"".join(panels)}{names}</svg>\n'
    )


def _engines(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.engine for row in rows))


def _panel(rows: Sequence[Row], left: float, label: str, samples: Callable[[Row], Sequence[float]]) -> str:
    lengths = sorted({row.length for row in rows})
    top = 1.08 * max(max(samples(row)) for row in rows)
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])

    def x(length: int) -> float:
        return left + MARGIN + (WIDTH - 1.4 * MARGIN) * (math.log2(length) - first) / max(last - first, 1)

    def y(rate: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 1.8 * MARGIN) * rate / top

    parts = [f'<text x="{left + MARGIN}" y="40">{label}</text>']
    for i in range(5):
        rate = top * i / 4
        parts.append(
            f'<line x1="{left + MARGIN}" x2="{x(lengths[-1]):.1f}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" '
            f'stroke="#ddd"/><text x="{left + MARGIN - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">'
            f"{rate:.0f}</text>"
        )
    for length in lengths:
        name = f"{length // 1024}K" if length % 1024 == 0 else str(length)
        parts.append(
            f'<text x="{x(length):.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{name}</text>'
        )
    for i, engine in enumerate(_engines(rows)):
        colour = COLOURS[i % len(COLOURS)]
        own = sorted((row for row in rows if row.engine == engine), key=lambda row: row.length)
        points = [(x(row.length), y(statistics.median(samples(row)))) for row in own]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row, (a, b) in zip(own, points, strict=True):
            low, high = y(min(samples(row))), y(max(samples(row)))
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>')
            parts.append(f'<path d="M{a:.1f} {low:.1f}V{high:.1f}" stroke="{colour}"/>')
    return "".join(parts)
