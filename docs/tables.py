"""Write the numbers of results/*.json into the tables of README and docs/.     python docs/tables.py

A comment above a table says where its numbers come from: a file, then an entry for every column except the first. An
empty entry leaves its column as it is. Any other entry has a path into the file, a format and, if needed, a unit:

    <!-- results/speed-cpu.json | lengths/256/{0}/tokens_per_s ,.0f | memory_mb/{0}/4096 .0f MB -->

{0} and {1} are the first and second cell of the row, as names; an empty first cell means the one above it. A number in
a path selects an entry of a list. Any other list has an entry for each seed; the result is their mean. An empty cell
stays empty.
"""
import argparse
import json
import re
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TABLE = re.compile(r"^<!-- (results/.*) -->\n\n?((?:\|.*\n)+)", re.M)


def rewritten(page):
    """The text of a page with the current numbers in all its tables."""
    return TABLE.sub(lambda found: found[0].replace(found[2], filled(found[1], found[2])), page)


def filled(comment, table):
    """The lines of a table with the numbers that its comment names."""
    file, *entries = (part.strip() for part in comment.split("|"))
    head, line, *rows = table.splitlines()
    names, lines = ["", ""], [head, line]
    for row in rows:
        # \| is a bar inside a cell
        first, *cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|")))
        # as names: without quotes, a remark in brackets, or commas in a number
        one, two = (re.sub(r" \(derivatives\)$|(?<=\d),(?=\d{3})", "", cell.strip("`*")) for cell in (first, cells[0]))
        names = [one or names[0], two]
        for i, (entry, cell) in enumerate(zip(entries, cells, strict=True)):
            if entry and cell:
                path, form, *unit = entry.split()
                found = value_at(results_of(ROOT / file.format(*names)), path.format(*names).split("/"))
                text = " ".join([format(found, form), *unit])           # no minus before zero
                cells[i] = re.sub(r"^-(?=[\d.]*[1-9])", "−", text).removeprefix("-")
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in (first, *cells)))
    return "\n".join(lines) + "\n"


@cache
def results_of(path):                           # a table has many cells of one file
    return json.loads(path.read_text(encoding="utf-8"))


def value_at(found, steps):
    """The number at a path (keys and indices) in nested dicts and lists."""
    if not (steps or isinstance(found, list)):
        return found
    if isinstance(found, list) and not (steps and steps[0].isdigit()):  # an entry for each seed
        return float(np.mean([value_at(item, steps) for item in found]))
    return value_at(found[int(steps[0]) if isinstance(found, list) else steps[0]], steps[1:])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0].split(".  ")[0]).parse_args()       # only -h
    for path in PAGES:
        before = path.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: numbers changed")
