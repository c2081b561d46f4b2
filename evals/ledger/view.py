"""The ledger in markdown, for the terminal and for its pages, and as forest plots.

found: {claim: {where: its numbers}}, from results/claims.json; `here` is that of one claim.
"""
import shlex
import textwrap

import numpy as np

from common import files
from evals.jobs import all_jobs
from evals.lab_runs import PUBLIC
from evals.ledger.claim import (
    AGREES,
    CITED,
    CLAIMS,
    CONTRADICTS,
    COSTS,
    FILES,
    GRADES,
    MIXED,
    NOT_RUN,
    PAPERS,
    UNTESTABLE,
    VERDICTS,
    in_words,
    number,
)
from evals.ledger.experiments import jobs_of
from evals.pictures import pyplot, save_figure

PAGES = "results/claims"                        # the folder of the pages
HOW_TO_READ = f"""\
agrees, contradicts: every seed lies beyond the bounds at which the claim holds, or fails. A bound "on average" asks
this of the mean, and "clearly" of its whole 95 % interval: over seeds, or over windows of text where it says so.
mixed: neither. not testable: a condition is missing, such as a sink in softmax itself.
The bounds were written before the first run; {PAGES}/changes.md names those that were changed after it.

Five surprises:
  sigmoid-norm-sink        Rows that sum to 1 need not have a sink: normalised sigmoid spreads its weight.
  sink-logit-moves-sink    Without linear biases a sink logit takes nothing: the first token keeps the sink.
  elastic-removed-mass     "59.58 % sparsity" is removed mass. Exact zeros are another number.
  diff-fixed-sum           Differential softmax is called free of a fixed sum, and has one.
  focus-leak               Sinkhorn over a sequence lets earlier tokens see later ones while Focus trains.

python eval.py claims --show=ID    one claim: its verdict, its bounds and our numbers; --all adds everything else
python eval.py claims --run=ID     measure it again; {PAGES}/ has all of them with pictures"""


def table(header, rows):
    """A table in markdown whose columns are also aligned in a terminal."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)
    return "\n".join([head, "| " + " | ".join("-" * width for width in widths) + " |", *body])


# --------------------------------------------------------------------------------------------------------- all claims


def ledger(found, names):
    """Counts by grade and verdict, how to read them, and one line for each of these claims."""
    parts = [counts(found), HOW_TO_READ] if len(names) == len(CLAIMS) else []
    for title, claims in PAPERS.items():
        lines = []
        for claim in (claims[name] for name in claims if name in names):
            here = found.get(claim.id, {})
            grade, said = evidence(claim, here) or claim.cheapest, textwrap.shorten(claim.says, 96, placeholder=" ...")
            lines.append(f"  {claim.verdicts(here)['']:<13} {grade:<15} {claim.id:<24} {said}")
        parts += ["\n".join([title, *lines])] * bool(lines)
    return "\n\n".join(parts)


def counts(found):
    """How many claims have which verdict, by the grade of their evidence."""
    judged = [(evidence(claim, found.get(name, {})), claim.verdicts(found.get(name, {}))[""])
              for name, claim in CLAIMS.items()]
    rows = {grade: [str(judged.count((grade, verdict))) for verdict in VERDICTS[:-1]] for grade in GRADES
            if grade in dict(judged)}
    missing = sum(grade is None for grade, _ in judged)
    return "\n\n".join([f"{len(CLAIMS)} claims of five papers. {missing} are not run here.",
                        table(["evidence", *VERDICTS[:-1]], [[grade, *row] for grade, row in rows.items()]),
                        "\n".join(f"{grade}: {GRADES[grade]}" for grade in rows)])


def evidence(claim, here):
    """The grade of the numbers that decide a claim; None if it is not run."""
    where = claim.decided_by(here)
    return None if where is None else claim.readings[where].grade


# ---------------------------------------------------------------------------------------------------------- one claim


def section(claim, here, words=True):
    """A claim, its verdict, and what was found next to its bounds; with `words` also the paper's figures, our note and
    the changed bounds."""
    verdicts, grade = claim.verdicts(here), evidence(claim, here)
    how = f", evidence: {grade}" if grade else ""
    parts = [f"## {claim.id}", f"**{verdicts['']}**{reason(verdicts[''])}{how}. {claim.says} ({claim.place})"]
    if words:
        parts += [f"*Theirs:* {claim.theirs}"] + [f"*Note:* {claim.note}"] * bool(claim.note)
        parts += [f"*Changed {date}:* {changed} ({verdicts}). {why}".replace("->", "→")
                  for date, changed, verdicts, why in claim.changes]
    for name, reading in claim.readings.items():
        if name in here:
            seeds = f", {said_seeds(here[name])}" if any(here[name]["seeds"]) else ""
            tested = f" ({claim.tested})" if claim.tested and not name else ""
            rows = [[quantity.name + ", over windows" * (quantity.bound.error == "windows")
                     + " (cannot be tested)" * (not quantity.tested),
                     quantity.bound.agrees or (f"needs {quantity.bound.needs}" if quantity.bound.needs else "-"),
                     quantity.bound.contradicts or "-", effect(quantity)] for quantity in verdicts[name].quantities]
            parts += [f"{name or 'As written'}: {verdicts[name]}{reason(verdicts[name])}, {reading.grade}{seeds}"
                      f"{tested}.", table(["", "agrees", "contradicts", "ours"], rows)]
    if here and "" in claim.readings and "" not in here:
        parts += ["As written: not run here."]
    if not here:
        first = next(iter(claim.readings.values()), None)
        parts += [f"Not run here: it takes {claim.cheapest} ({COSTS[claim.cheapest]}). The bounds: "
                  f"{in_words(claim, first)}." if first else f"Not run here: {claim.tested}."]
    return "\n\n".join(parts)


def details(claim, here, folders):
    """The paper, and of each reading the number of every seed, where it comes from, and the commands. folders: a
    jobs.Place."""
    parts = [f"{claim.paper}: {CITED[claim.paper]}"]
    for name, reading in sorted(claim.readings.items(), key=lambda item: item[0] not in here):
        parts += [f"### {name or 'As written'} ({reading.grade})"]
        if name in here:
            seeds = here[name]["seeds"]
            rows = [[column, run, *(mean_of([value]) for value in values)]
                    for column, group in here[name]["numbers"].items() for run, values in group.items()]
            parts += [table(["", "run", *(f"seed {seed}" if seed else "" for seed in seeds)], rows),
                      made(claim, here[name])]
        else:
            seeds = claim.seeds_of(reading, [2])
            parts += [f"Not run here. The bounds: {in_words(claim, reading)}."]
        parts += [commands(claim, name, jobs_of(reading, seeds, folders))]
    return "\n\n".join(parts)


def reason(verdict):
    """Why a verdict is mixed, in brackets."""
    return f" ({verdict.why})" if getattr(verdict, "why", "") else ""


def effect(quantity):
    """The mean and its 95 % interval: "0.31 [0.28, 0.35]"."""
    low, high = quantity.interval
    return f"{quantity.values.mean():.3g}" + (f" [{low:.3g}, {high:.3g}]" if np.isfinite(low) and low < high else "")


def mean_of(values):
    """The mean over seeds as text: a number, a short list, or the mean and range of a long list."""
    mean = np.mean(np.array(values, float), 0).ravel()
    return (", ".join(f"{x:.3g}" for x in mean) if len(mean) <= 4 else
            f"{mean.mean():.4g} ({mean.min():.3g} to {mean.max():.3g})")


def said_seeds(found):
    """"seed 2" or "seeds 2, 3, 4"; empty if the runs have no seeds."""
    seeds = found["seeds"]
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}" if any(seeds) else ""


def made(claim, found):
    """The commit and machine of the numbers of these seeds, and the bounds by which they were first judged."""
    dirty = " with uncommitted changes" * bool(found.get("git_dirty"))
    own = f"commit {(found['git_commit'] or 'unknown')[:9]}{dirty}, {found['machine']}"
    version = found.get("version", 1)
    if version < claim.version:
        own += f"; measured under version {version} of the bounds, judged by version {claim.version}"
    earlier = found.get("earlier")
    return own + (f"\nseeds {', '.join(map(str, earlier['seeds']))}: {made(claim, earlier)}" if earlier else "")


def commands(claim, name, jobs):
    """The commands of the first seed, in order, and the measurements that only `claims` makes."""
    first = all_jobs(group[0] for group in jobs.values())
    lines = [f"python {' '.join(job.words)}" for job in first if not job.function]
    words = {word.rpartition("=")[2] for line in lines for word in line.split()}
    lines = [f"python data/weights.py {name}" for name, folder in PUBLIC.items() if folder in words] + lines
    lines += ["# the same with the other seeds"] * (bool(lines) and any(len(group) > 1 for group in jobs.values()))
    own = ", ".join(dict.fromkeys(job.words[0] for job in first if job.function))
    run = f"python eval.py claims --run={shlex.quote(f'{claim.id}@{name}')}"
    return "\n".join([*lines, run, *[f"# this also measures, by functions of evals/ledger/: {own}"] * bool(own)])


# ------------------------------------------------------------------------------------------------------------ the pages


def write_pages(folder, results):
    """A page and a forest plot for each paper, and the log of changed bounds."""
    folder.mkdir(parents=True, exist_ok=True)
    for title, claims in PAPERS.items():
        draw(folder / f"{FILES[title]}.png", results, title)
        parts = [f"# {title}", f"{CITED[title]}. Written by `python eval.py claims --pages={PAGES}`.",
                 f"![what was found over its bounds]({FILES[title]}.png)",
                 "In the picture each claim is shown by the one of its quantities that is nearest to failing. Left of "
                 "the white band the claim fails, right of it it holds. A dot is a seed, the bar is the 95 % interval. "
                 "Other set-ups are grey."]
        for name, claim in claims.items():
            parts += [section(claim, results["claims"].get(name, {})),
                      f"`python eval.py claims --show={name} --all` prints the numbers of each seed, and the commands."]
        with files.replacing(folder / f"{FILES[title]}.md", "w") as f:
            f.write("\n\n".join(parts) + "\n")
    rows = sorted(([f"`{claim.id}`", change.date, *change.changed.split(" -> "), change.verdicts.replace("->", "→"),
                    change.why] for claim in CLAIMS.values() for change in claim.changes), key=lambda row: row[1])
    with files.replacing(folder / "changes.md", "w") as f:
        f.write("# The log of changed bounds\n\nAll bounds were to be fixed before the first run. These were changed "
                "after numbers had been seen. The first complete run is commit 49b8a29.\n\n"
                + table(["claim", "date", "before", "after", "verdict", "why"], rows) + "\n")


COLOURS = {AGREES: "#2c6fb3", MIXED: "#d9a21b", CONTRADICTS: "#c8402f", UNTESTABLE: "#8a8a8a", NOT_RUN: "#bbbbbb"}


def draw(path, results, *titles):
    """A forest plot of these papers, or of all, side by side. A line for each claim: the quantity nearest to failing,
    as dots and an interval; below it in grey those of other set-ups."""
    papers = {title: PAPERS[title] for title in titles or PAPERS}
    most = max(map(len, papers.values()))
    figure, axes = pyplot().subplots(1, len(papers), figsize=(7.5 * len(papers), 1.3 + 0.42 * most), squeeze=False)
    for ax, (title, claims) in zip(axes[0], papers.items(), strict=True):
        for y, (name, claim) in enumerate(claims.items()):
            here = results["claims"].get(name, {})
            verdicts, decided = claim.verdicts(here), claim.decided_by(here)
            colour = COLOURS[verdicts[""]]
            ax.text(2.13, y, verdicts[""], va="center", fontsize=8.5, color=colour)
            for where in here:
                places = [place for place in map(positions, verdicts[where].quantities) if place]
                if places:
                    seeds, low, high = min(places, key=lambda place: np.mean(place[0]))
                    at, shade, width, size = (y, colour, 1.5, 5) if where == decided else (y + 0.3, "0.65", 1, 2.5)
                    ax.plot(np.clip([low, high], -1, 2), [at, at], color=shade, linewidth=width, alpha=0.8)
                    ax.plot(np.clip(seeds, -1, 2), [at] * len(seeds), "o", color=shade, markersize=size)
        ax.axvspan(-1.1, 0, color="#c8402f", alpha=0.07, linewidth=0)
        ax.axvspan(1, 2.1, color="#2c6fb3", alpha=0.07, linewidth=0)
        ax.set(xlim=(-1.1, 2.1), ylim=(most - 0.4, -0.8), xticks=(0, 1))
        ax.set_xticklabels(["fails", "holds"])
        ax.set_yticks(range(len(claims)), claims, fontsize=9)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.set_title(title, fontsize=11, loc="left")
    figure.tight_layout()
    save_figure(figure, path)


def positions(quantity):
    """A quantity on the axis of the forest plots, on which the claim fails below 0 and holds above 1: (each seed, low
    and high end of the interval), or None if it has no bounds. If there is one bound only, the unit is its size (1 if
    it is 0). If that bound is a range, the unit is half its width."""
    agrees, contradicts = (thresholds(getattr(quantity.bound, name)) for name in ("agrees", "contradicts"))
    two_sided = quantity.bound.agrees.startswith("could be ")
    if not agrees and not contradicts or two_sided or np.isnan(quantity.values).any():
        return None
    low, high = quantity.interval if np.isfinite(quantity.interval[0]) else (quantity.values.mean(),) * 2
    values = np.array([low, high, *quantity.values])
    in_range = len(agrees) == 2
    if in_range:                                # how far inside the range, in units of half its width
        values, contradicts, agrees = (np.minimum(np.subtract(x, agrees[0]), np.subtract(agrees[1], x))
                                       / (agrees[1] - agrees[0]) * 2 for x in (values, contradicts, agrees))
    one, zero = (bound[0] if len(bound) else None for bound in (agrees, contradicts))
    if one is None or zero is None or one == zero:
        at = one if one is not None else zero
        grows = (quantity.bound.agrees or quantity.bound.contradicts).removeprefix("not ").removeprefix("clearly ")[0]
        up = in_range or ((grows == ">") == (one is not None)) != quantity.bound.agrees.startswith("not ")
        place = (values - at) / (abs(at) or 1) * (1 if up else -1)      # above 0 is the good side
        place = np.where(place >= 0, 1 + place, np.maximum(1 + place, 0) if zero is None else place)
    else:
        place = (values - zero) / (one - zero)
    low, high, *seeds = place
    return seeds, min(low, high), max(low, high)


def thresholds(condition):
    """The numbers in a condition: [0.1], or of a range [0.4, 0.8]."""
    return [number(word) for word in condition.split() if word[0].isdigit() or word[0] in "-." and len(word) > 1]
