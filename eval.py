"""The instruments: commands that measure trained runs, and commands that time and read this code.

    python eval.py COMMAND --out_dir=out/stdlib-elastic [--json]        python eval.py COMMAND -h

eval.py rebuilds the model from the run's meta.json. --attn and the flags of its axes replace the
run's own choices if its parameters still fit. --out_dir=out/a,out/b and --out_dir='out/lab/*' look
at several runs, one after another, and --attn=softmax,softmax1 at a run under several recipes:
--attn=softmax,window --window=16 gives only window 16 keys. evals/measures.py and evals/stream.py
give the sources of the measures.
"""

import json
import sys
import textwrap
from collections.abc import Callable
from typing import NamedTuple

from common import files
from common.flags import Parser, add_flags, given_flags, nearest
from evals import (
    bench,
    board,
    curve,
    groups,
    heads,
    lab,
    lengths,
    loss,
    maps,
    params,
    passkey,
    probe,
    routers,
    sample,
    show,
    speed,
    theory,
)
from evals.instrument import (
    OVERRIDES,
    Common,
    OpenedRun,
    Picture,
    new_parameters,
    overrides_of,
    recipe_names,
    runs_named,
    side_by_side,
)
from model import GPTConfig


class Command(NamedTuple):
    """An instrument: the dataclass of its flags, and its functions, as evals/instrument.py
    describes them."""

    flags: type
    run: Callable
    draw: Callable | None = None  # for --png
    page: Callable | None = None  # for --html
    compare: Callable | None = None  # one text for several runs
    check: Callable | None = None  # raises if runs cannot be compared


OF_A_RUN = {  # eval.py opens the trained run that these look at
    "loss": Command(loss.Loss, loss.command, loss.draw, None, loss.compare, loss.check),
    "lengths": Command(lengths.Lengths, lengths.command, lengths.draw),
    "sample": Command(sample.Sample, sample.command),
    "probe": Command(probe.ProbeFlags, probe.command, probe.draw),
    "heads": Command(heads.Heads, heads.command, heads.draw),
    "params": Command(params.Params, params.command, params.draw),
    "maps": Command(maps.Maps, maps.command, maps.draw, maps.page),
    "groups": Command(groups.Groups, groups.command, groups.draw),
    "routers": Command(routers.Routers, routers.command, routers.draw),
    "passkey": Command(passkey.Passkey, passkey.command, passkey.draw),
    "bench": Command(bench.Bench, bench.command),
}
OF_THEIR_OWN = {  # eval.py opens no run for these: they get None instead
    "lab": Command(lab.Lab, lab.command),
    "board": Command(board.Board, board.command, board.draw),
    "theory": Command(theory.Theory, theory.command),
    "speed": Command(speed.Speed, speed.command),
    "curve": Command(curve.Curve, curve.command, curve.draw),
    "show": Command(show.Show, show.command),
}
COMMANDS = OF_A_RUN | OF_THEIR_OWN


def main(argv):
    name = argv[0] if argv else ""
    if name not in COMMANDS:
        parser = Parser(prog="eval.py", description=f"{__doc__}\n{listed_commands()}")
        parser.parse_args([a for a in argv if a in ("-h", "--help")])
        problem = f"unknown command {name!r}{nearest(name, COMMANDS) or ':'}"
        problem = problem if name else "which command?"
        parser.error(f"{problem} python eval.py -h lists all: {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    of_a_run = name in OF_A_RUN
    parser = Parser(prog=f"eval.py {name}", description=one_line(command.run.__doc__))
    shared = [Picture] if command.draw else []
    shared += [Common] if of_a_run else []
    add_flags(parser, command.flags, *shared)
    if of_a_run:
        add_flags(parser, GPTConfig, only=OVERRIDES)
    parsed = parser.parse_args(argv[1:])
    if of_a_run and not parsed.out_dir:
        parser.error("which run? give --out_dir=out/...")
    try:
        args = command.flags(**given_flags(parsed, command.flags))
        if of_a_run and parsed.attn is not None:
            recipe_names(parsed.attn)
    except ValueError as e:
        parser.error(str(e))
    # the flags are valid; from here on an error is about a run, its data or the disk
    with files.one_line_errors():
        if not of_a_run:
            numbers, text = command.run(args, None)
            found = numbers
        else:
            found, text = run_on_each(command, args, parsed)
            if found is None:  # another rank draws and prints
                return
            numbers = found if len(found) > 1 else next(iter(found.values()))
        if command.draw and parsed.png:
            command.draw(parsed.png, found)
        if command.page and parsed.html:
            command.page(parsed.html, found)
        print(json.dumps(numbers, indent=2) if getattr(parsed, "json", False) else text)


def one_line(text):
    return " ".join(text.split())


def listed_commands():
    """A line for each command, from the docstring of its function."""
    lines = [f"{name:10}{one_line(command.run.__doc__)}" for name, command in COMMANDS.items()]
    return "\n".join(textwrap.fill(line, 120, subsequent_indent=" " * 10) for line in lines)


def run_on_each(command, args, parsed):
    """Run an instrument on each run in turn, so that memory holds only one model. Returns {run:
    numbers} and the text; None on all ranks but one."""
    places = runs_named(parsed.out_dir)
    overrides = {name: getattr(parsed, name) for name in ("attn", *OVERRIDES)}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    recipes = recipe_names(overrides["attn"]) if "attn" in overrides else []
    variants = [overrides]
    named = len(recipes) > 1
    if named:
        variants = overrides_of(recipes, overrides).values()
    cases = {}  # {what is printed above its table: (run, overrides)}
    for place in places:
        for changed in variants:
            flags = [f"--{name}={value}" for name, value in changed.items()] if named else []
            cases[" ".join([place, *flags])] = place, changed
    if command.check:  # before the work begins
        command.check(args, places, parsed.dataset)
    for place, changed in cases.values():
        if changed and len(cases) > 1:
            new_parameters(place, changed)  # raises ValueError before the work begins
    found, texts = {}, {}
    for name, (place, changed) in cases.items():
        run = OpenedRun(Common(**given_flags(parsed, Common) | {"out_dir": place}), changed)
        found[name], texts[name] = command.run(args, run)
        run.machine.close()
    if not run.machine.main:
        return None, None
    if len(cases) == 1:
        return found, texts[name]
    if command.compare:
        return found, command.compare(found)
    parts = [f"{name}\n\n{text}" for name, text in texts.items()]
    return found, "\n\n".join([*parts, *side_by_side(found)])


if __name__ == "__main__":
    main(sys.argv[1:])
