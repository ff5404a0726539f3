"""Makes architecture.svg, headrace's processes and the calls between them. `python docs/pictures/architecture.py`"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("architecture.svg")
WIDTH, HEIGHT = 900, 560
INK, PAPER, LINE = "#1f2328", "#ffffff", "#57606a"
BLUE, RED, GREEN, VIOLET, GREY = "#ddf4ff", "#ffebe9", "#dafbe1", "#fbefff", "#f6f8fa"


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    width: int
    height: int
    color: str
    title: str
    lines: tuple[str, ...] = ()

    def svg(self) -> str:
        parts = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" '
            f'rx="8" fill="{self.color}" stroke="{LINE}"/>',
            text(self.x + 14, self.y + 24, self.title, "title"),
        ]
        parts += [text(self.x + 14, self.y + 45 + 18 * i, line, "line") for i, line in enumerate(self.lines)]
        return "\n".join(parts)


@dataclass(frozen=True)
class Arrow:
    """Straight, from one point to another; the label's lines stand beside its middle."""

    x1: int
    y1: int
    x2: int
    y2: int
    label: tuple[str, ...] = ()
    side: str = "start"  # the label's anchor: right of the arrow, or "end": left of it

    def svg(self) -> str:
        gap = 8 if self.side == "start" else -8
        x, y = (self.x1 + self.x2) // 2 + gap, (self.y1 + self.y2) // 2 + 4 - 8 * (len(self.label) - 1)
        parts = [f'<line x1="{self.x1}" y1="{self.y1}" x2="{self.x2}" y2="{self.y2}" stroke="{LINE}" marker-end="url(#head)"/>']
        parts += [text(x, y + 16 * i, line, "label", self.side) for i, line in enumerate(self.label)]
        return "\n".join(parts)


def text(x: int, y: int, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


BOXES = (
    Box(30, 20, 400, 44, GREY, "OpenAI clients: HTTP, server-sent events"),
    Box(520, 20, 350, 44, GREY, "headrace ps · inspect · abort"),
    Box(30, 110, 400, 84, BLUE, "API servers", ("text: templates, tokens, stop strings, answers", "any number, on one socket")),
    Box(30, 254, 840, 84, RED, "Redis", ("requests stream and order · records · journals", "control streams · slots · channels")),
    Box(30, 402, 400, 66, GREEN, "Engine", ("intake → schedule, execute, take in → publisher",)),
    Box(520, 402, 350, 66, VIOLET, "Maintenance (Celery)", ("ends what dead processes left, sums usage",)),
    Box(30, 506, 192, 40, GREEN, "Worker, rank 0"),
    Box(238, 506, 192, 40, GREEN, "Worker, rank 1 ..."),
)
ARROWS = (
    Arrow(150, 64, 150, 110),
    Arrow(310, 110, 310, 64),
    Arrow(150, 194, 150, 254, ("enqueue, finish,", "takeover")),
    Arrow(310, 254, 310, 194, ("outputs (pub/sub)",)),
    Arrow(690, 64, 690, 254, ("finish, reads",)),
    Arrow(150, 338, 150, 402, ("take, control",)),
    Arrow(310, 402, 310, 338, ("flush: one call a step", "checkpoint, reconcile")),
    Arrow(690, 402, 690, 338, ("finish, takeover", "roll_usage")),
    Arrow(50, 468, 50, 506, ("plan of a step",)),
    Arrow(170, 506, 170, 468, ("sampled tokens",)),
    Arrow(334, 468, 334, 506, ("plan",)),
)


def svg() -> str:
    style = (
        f"text {{ font-family: system-ui, -apple-system, 'Segoe UI', sans-serif; fill: {INK}; }} "
        ".title { font-size: 16px; font-weight: 600; } .line { font-size: 14px; } .label { font-size: 13px; font-style: italic; }"
    )
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M 0 0 L 10 5 L 0 10 z" fill="{LINE}"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>headrace's processes and the calls between them</title>",
        f"<style>{style}</style>",
        f"<defs>{head}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{PAPER}" rx="12"/>',
        *(shape.svg() for shape in (*BOXES, *ARROWS)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg())
