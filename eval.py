"""The instruments: commands that measure trained runs, and commands that time and read this code.

    python eval.py COMMAND --out_dir=out/stdlib-elastic [--json]        python eval.py COMMAND -h

Look at a trained run:

    loss      mean loss on fixed windows, in nats per token and bits per byte; torchrun's ranks share the windows
    lengths   loss and perplexity at several lengths on the same tokens, and by the place in the window
    compare   several runs in one table: losses, sinks, sizes; seeds become means
    sample    generate text
    probe     where the attention goes, by layer or head: sinks, spread, exact zeros; and how the first token differs
              from the others in the residual stream: massive activations, norms, cosines
    heads     how dormant, local, global and important each head is; with --cost how much the loss rises without its
              sink or without the head; with --against whether the same heads are dormant on another data set
    params    what attention has learned outside its linear layers: thresholds, distance biases, gates, lambdas
    maps      the attention maps of a sentence
    groups    the groups of tokens that Focus has learned: how even their sizes are, which tokens are in them, which
              pairs of tokens they keep; with --against whether another checkpoint has the same groups
    routers   Focus compared with full attention, for several k and lengths: perplexity, pairs kept, speed; with --sweep
              it trains routers with other settings on a run of plain attention

Benchmarks of a trained run:

    passkey   can the model find a number that is hidden in a long text?
    scrolls   summaries of long documents, and questions about them
    bench     zero-shot scores on public benchmarks, from HellaSwag to WikiText (python data/benchmarks.py fetches them)

The sink lab and the ledger, which train their own runs:

    lab       train every recipe in the sink lab, and compare them
    claims    the claims of five papers and our results: the whole ledger or one claim; --run measures missing results

Time, compile and read the code, without a run:

    speed     time every recipe's training step and attention on this machine; with --kernels the fused kernels and
              torch's own; with --decode decoding steps with long caches, and the bytes that they read; with --focus
              sparse Focus; with --live and --out_dir how much time the zeros of a trained run save
    compile   compile the Triton kernels, also for GPUs that this machine lacks: registers, shared memory, spills
    curve     the weights that recipes give to one row of scores (python eval.py curve softmax,elastic --png=curve.png)
    show      a recipe on one page: its choices, PyTorch, Triton, and where they are (python eval.py show elastic)

eval.py rebuilds the model from the run's meta.json. --attn and the flags of its axes replace the run's own choices if
its parameters still fit. --out_dir=out/a,out/b and --out_dir='out/lab/*' look at several runs, one after another, and
--attn=softmax,softmax1 at a run under several recipes.
evals/measures.py and evals/stream.py give the sources of the measures.
"""
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

from common import files
from common.flags import Parser, add_flags, given_flags
from evals import (
    bench,
    claims,
    compare,
    compile,
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
    scrolls,
    show,
    speed,
)
from evals.instrument import Common, OpenedRun, Overrides, Picture, check_overrides, recipe_names, runs_named


class Command(NamedTuple):
    """An instrument, as evals/instrument.py describes it."""
    flags: type                                 # the dataclass of its flags
    run: Callable                               # command(args, run) -> (numbers, text)
    draw: Callable | None = None                # draw(path, {run: numbers}): draws the picture for --png; for a command
                                                # that opens no run, draw(path, numbers)
    tell: Callable | None = None                # tell(args, {run: numbers}) -> text: several runs in one table
    check: Callable | None = None               # check(args, runs): raises ValueError on runs that cannot be compared
    page: Callable | None = None                # page(path, found), as draw: writes the page for --html


OF_A_RUN = {                                    # eval.py opens the trained run that these look at
    "loss": Command(loss.Loss, loss.command),
    "lengths": Command(lengths.Lengths, lengths.command, lengths.draw, lengths.tell),
    "compare": Command(compare.Compare, compare.command, compare.draw, compare.tell, compare.check),
    "sample": Command(sample.Sample, sample.command),
    "probe": Command(probe.ProbeFlags, probe.command, probe.draw, probe.tell),
    "heads": Command(heads.Heads, heads.command, heads.draw, heads.tell),
    "params": Command(params.Params, params.command, params.draw, params.tell),
    "maps": Command(maps.Maps, maps.command, maps.draw, page=maps.page),
    "groups": Command(groups.Groups, groups.command, groups.draw, groups.tell),
    "routers": Command(routers.Routers, routers.command, routers.draw, routers.tell),
    # benchmarks
    "passkey": Command(passkey.Passkey, passkey.command, passkey.draw, passkey.tell),
    "scrolls": Command(scrolls.Scrolls, scrolls.command, tell=scrolls.tell),
    "bench": Command(bench.Bench, bench.command, bench.draw, bench.tell),
}
OF_THEIR_OWN = {                                # eval.py opens no run for these: they get None in its place
    "lab": Command(lab.Lab, lab.command),
    "claims": Command(claims.ClaimsFlags, claims.command, claims.draw),
    # the code itself
    "speed": Command(speed.Speed, speed.command),
    "compile": Command(compile.Compile, compile.command),
    "curve": Command(curve.Curve, curve.command, curve.draw, page=curve.page),
    "show": Command(show.Show, show.command),
}
COMMANDS = OF_A_RUN | OF_THEIR_OWN


def main(argv):
    if not argv or argv[0] not in COMMANDS:
        parser = Parser(prog="eval.py", description=__doc__)
        parser.parse_args([a for a in argv if a in ("-h", "--help")])
        found = f", not {argv[0]!r}" if argv else ""
        parser.error(f"the first word must be a command: {', '.join(COMMANDS)}{found}")
    name, of_a_run = argv[0], argv[0] in OF_A_RUN
    command = COMMANDS[name]
    parser = Parser(prog=f"eval.py {name}", description=" ".join(command.run.__doc__.split()))     # as one line
    add_flags(parser, command.flags, *([Picture] if command.draw else []), *([Common, Overrides] if of_a_run else []))
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
        if of_a_run:
            look(command, args, parsed)
            return
        numbers, text = command.run(args, None)
        write_files(command, parsed, numbers)
        print(json.dumps(numbers, indent=2) if getattr(parsed, "json", False) else text)


def look(command, args, parsed):
    """Run an instrument on each run in turn, so that memory holds only one model, and print the results."""
    places, overrides = runs_named(parsed.out_dir), given_flags(parsed, Overrides)
    recipes = overrides.get("attn", "").split(",")                      # one run may be looked at under several
    cases = {place if len(recipes) == 1 else f"{place} --attn={attn}":
             (place, overrides | ({"attn": attn} if attn else {})) for place in places for attn in recipes}
    alone = len(cases) == 1
    if command.check:                           # before the work begins
        command.check(args, places)
    if not alone:
        for place, changed in cases.values():
            if changed:
                check_overrides(place, changed)
    found, texts = {}, {}
    for name, (place, changed) in cases.items():
        run = OpenedRun(Common(**given_flags(parsed, Common) | {"out_dir": place}), changed)
        found[name], texts[name] = command.run(args, run)
        run.machine.close()
    if not run.machine.main:                    # only one rank draws and prints
        return
    write_files(command, parsed, found)
    if parsed.json:
        print(json.dumps(found[name] if alone else found, indent=2))
    elif command.tell:
        print(command.tell(args, found))
    else:
        print(texts[name] if alone else "\n\n".join(f"{name}\n\n{text}" for name, text in texts.items()))


def write_files(command, parsed, found):
    """Draw the picture for --png and write the page for --html, if they were asked for."""
    if command.draw and parsed.png:
        command.draw(parsed.png, found)
    if command.page and parsed.html:
        command.page(parsed.html, found)


if __name__ == "__main__":
    main(sys.argv[1:])
