"""Tables of plain text for people who read a terminal."""

from __future__ import annotations

from typing import Any, Iterable, Mapping


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Lay out `rows` as lines of text: `columns` maps a row's key to its title.

    Lists are joined by commas, null and nothing are a dash, numbers stand to the right. Without rows there are no lines.
    """
    rows = list(rows)
    if not rows:
        return []
    cells = [[_cell(row.get(key)) for key in columns] for row in rows]
    titles = list(columns.values())
    widths = [max(len(line[i]) for line in [titles, *cells]) for i in range(len(titles))]
    numeric = [all(isinstance(row.get(key), (int, float)) for row in rows) for key in columns]

    def line(values: list[str]) -> str:
        padded = (v.rjust(w) if right else v.ljust(w) for v, w, right in zip(values, widths, numeric))
        return "  ".join(padded).rstrip()

    return [line(titles), "  ".join("-" * width for width in widths)] + [line(values) for values in cells]


def _cell(value: Any) -> str:
    if value is None or value in ([], ""):
        return "-"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return " ".join(str(value).split())
