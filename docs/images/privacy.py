"""Draws `privacy_accuracy.svg`, epsilon against accuracy, from what `benchmarks/privacy.py` has measured.

Run it as `python docs/images/privacy.py`. Look at what it has drawn.
"""

import json
import math
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "privacy.json"
TITLE = "Accuracy on Fashion-MNIST, a CNN with tanh"
# What Papernot et al. (2021) report for tempered sigmoids, and what the same model reaches without privacy.
PUBLISHED = 2.7, 0.861
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 690, 50, 340
STYLE = "font-family='Helvetica, Arial, sans-serif' fill='#222'"


def placed(points):
    """Points `(epsilon, accuracy)` in the picture, and the two scales."""
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    least = math.floor(20 * min(y for _, y in points)) / 20
    most = math.ceil(20 * max(y for _, y in points)) / 20

    def x_of(epsilon):
        share = math.log(epsilon / low) / math.log(high / low)
        return LEFT + 20 + share * (RIGHT - LEFT - 40)

    def y_of(accuracy):
        return BOTTOM - (accuracy - least) / (most - least) * (BOTTOM - TOP)

    return x_of, y_of, least, most


def drawn(points, without):
    """The picture.

    Args:
        points: Epsilons and accuracies.
        without: The accuracy without privacy, or `None`.
    """
    x_of, y_of, least, most = placed(
        [*points, PUBLISHED, *([(points[0][0], without)] if without else [])]
    )
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>",
        f"<text x='{LEFT}' y='28' font-size='16' {STYLE}>Accuracy on Fashion-MNIST, by epsilon (delta 1e-5)</text>",
    ]
    for tick in range(round(20 * least), round(20 * most) + 1):
        y = y_of(tick / 20)
        parts.append(f"<line x1='{LEFT}' x2='{RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#ddd'/>")
        parts.append(
            f"<text x='{LEFT - 8}' y='{y + 4:.1f}' font-size='13' text-anchor='end' {STYLE}>{5 * tick}%</text>"
        )
    for epsilon, _ in points:
        x = x_of(epsilon)
        parts.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{BOTTOM}' y2='{BOTTOM + 5}' stroke='#222'/>"
        )
        parts.append(
            f"<text x='{x:.1f}' y='{BOTTOM + 20}' font-size='13' text-anchor='middle' {STYLE}>{epsilon:g}</text>"
        )
    middle = (LEFT + RIGHT) / 2
    parts.append(
        f"<text x='{middle}' y='{BOTTOM + 44}' font-size='14' text-anchor='middle' {STYLE}>epsilon</text>"
    )
    if without:
        y = y_of(without)
        parts.append(
            f"<line x1='{LEFT}' x2='{RIGHT}' y1='{y:.1f}' y2='{y:.1f}' stroke='#777' stroke-dasharray='6 4'/>"
        )
        words = f"without privacy {100 * without:.1f}%"
        parts.append(
            f"<text x='{LEFT + 6}' y='{y + 17:.1f}' font-size='13' {STYLE}>{words}</text>"
        )
    line = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
    parts.append(f"<polyline points='{line}' fill='none' stroke='#1f6feb' stroke-width='2.5'/>")
    for epsilon, accuracy in points:
        x, y = x_of(epsilon), y_of(accuracy)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='#1f6feb'/>")
        parts.append(
            f"<text x='{x:.1f}' y='{y + 20:.1f}' font-size='13' text-anchor='middle' {STYLE}>"
            f"{100 * accuracy:.1f}</text>"
        )
    x, y = x_of(PUBLISHED[0]), y_of(PUBLISHED[1])
    parts.append(
        f"<path d='M{x:.1f} {y - 7:.1f} l7 7 l-7 7 l-7 -7 z' fill='none' stroke='#b35900' stroke-width='2'/>"
    )
    words = "Papernot et al., 86.1 at 2.7"
    parts.append(
        f"<text x='{x - 12:.1f}' y='{y - 14:.1f}' font-size='13' text-anchor='end' {STYLE}>{words}</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main():
    rows = json.loads(RESULTS.read_text())[TITLE]
    private = [(row["epsilon"], row["accuracy"]) for row in rows if row["epsilon"] is not None]
    without = next((row["accuracy"] for row in rows if row["epsilon"] is None), None)
    (HERE / "privacy_accuracy.svg").write_text(drawn(sorted(private), without))


if __name__ == "__main__":
    main()
