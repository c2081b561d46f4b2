"""The instruments: look at a trained run.    python eval.py COMMAND --out_dir=out/stdlib-elastic [--json]

    loss      loss in nats per token and bits per byte on fixed windows (also under torchrun, which splits the windows
              over the ranks)
    probe     where the attention goes: sinks, spread, exact zeros, by layer or head; what becomes of the first token in
              the stream through the blocks: massive activations, norms, cosines
    sample    generate text
    heads     per layer and head: how dormant, local, global and important; with --cost what the loss gains without
              its sink or without the head; with --against another data set beside the first
    params    what attention has learned outside its linear layers: thresholds, distance biases, gates, lambdas
    groups    of Focus: how even its groups of tokens are, which tokens they hold, which pairs they keep; whether they
              are those of another checkpoint
    routers   Focus at every k and several lengths beside full attention: perplexity, pairs kept, speed; with --sweep
              routers trained with other knobs on a run of plain attention
    maps      the attention maps of a sentence
    lengths   loss and perplexity at several lengths on the same tokens, and by the place in the window
    passkey   whether a number hidden in a long text is found
    scrolls   summaries of and questions on long documents
    bench     zero-shot scores on public benchmarks, from HellaSwag to WikiText (python data/benchmarks.py fetches them)
    compare   several runs in one table: losses, sinks, sizes; seeds become means
    lab       train every recipe in the sink lab and compare them
    claims    what five papers claim, and what is found here: the ledger, one claim, or --run what is missing of it
    speed     time every recipe's training step and attention on this machine. With --kernels, the fused kernels against
              torch's own; with --live (and --out_dir), what the zeros of a trained run are worth
    show      a recipe on one page: its choices, PyTorch, Triton, and where they stand (python eval.py show elastic)
    compile   the Triton kernels, compiled for GPUs that need not be there: registers, shared memory, spills

lab, claims, speed, show and compile need no run.

The model is rebuilt from the run's meta.json alone; --attn and the flags of its axes override it where the parameters
allow. --out_dir=out/a,out/b and --out_dir='out/lab-*' look at several runs, one after another. Where the measures come
from is said in evals/measures.py (of attention's weights) and evals/stream.py.
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
from evals.instrument import Common, OpenedRun, Overrides, Picture, check_overrides, runs_named


class Command(NamedTuple):
    """An instrument, as evals/instrument.py describes it."""
    flags: type                                 # the dataclass of its flags
    run: Callable                               # command(args, run) -> (numbers, text)
    draw: Callable | None = None                # draw(path, {run: numbers}): what --png is for
    tell: Callable | None = None                # tell(args, {run: numbers}) -> text: several runs in one table
    check: Callable | None = None               # check(args, runs): raises ValueError on runs that do not go together


OF_A_RUN = {                                    # these look at a trained run, which is opened for them
    "loss": Command(loss.Loss, loss.command),
    "probe": Command(probe.ProbeFlags, probe.command, probe.draw, probe.tell),
    "sample": Command(sample.Sample, sample.command),
    "heads": Command(heads.Heads, heads.command, heads.draw, heads.tell),
    "params": Command(params.Params, params.command, params.draw, params.tell),
    "groups": Command(groups.Groups, groups.command, groups.draw, groups.tell),
    "routers": Command(routers.Routers, routers.command, routers.draw, routers.tell),
    "maps": Command(maps.Maps, maps.command, maps.draw),
    "lengths": Command(lengths.Lengths, lengths.command, lengths.draw, lengths.tell),
    "passkey": Command(passkey.Passkey, passkey.command, passkey.draw, passkey.tell),
    "scrolls": Command(scrolls.Scrolls, scrolls.command, tell=scrolls.tell),
    "bench": Command(bench.Bench, bench.command, bench.draw, bench.tell),
    "compare": Command(compare.Compare, compare.command, compare.draw, compare.tell, compare.check),
}
OF_THEIR_OWN = {                                # these train or build their models themselves, and get None as the run
    "lab": Command(lab.Lab, lab.command),
    "claims": Command(claims.ClaimsFlags, claims.command),
    "speed": Command(speed.Speed, speed.command),
    "show": Command(show.Show, show.command),
    "compile": Command(compile.Compile, compile.command),
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
    except ValueError as e:
        parser.error(str(e))
    # the flags are in order; from here on what can be wrong is a run, its data or the disk
    with files.one_line_errors():
        if of_a_run:
            look(command, args, parsed)
        else:
            numbers, text = command.run(args, None)
            print(json.dumps(numbers, indent=2) if getattr(parsed, "json", False) else text)


def look(command, args, parsed):
    """Run an instrument on each run in turn, so that memory holds one model, and print what it found."""
    found, texts, places = {}, [], runs_named(parsed.out_dir)
    overrides = given_flags(parsed, Overrides)
    if command.check:                           # before the work begins
        command.check(args, places)
    for place in places if overrides and len(places) > 1 else []:
        check_overrides(place, overrides)
    for place in places:
        run = OpenedRun(Common(**given_flags(parsed, Common) | {"out_dir": place}), overrides)
        found[place], text = command.run(args, run)
        texts.append(text if len(places) == 1 else f"{place}\n\n{text}")
        main = run.machine.main                 # of several ranks, one prints
        run.machine.close()
    if not main:
        return
    if command.draw and parsed.png:
        command.draw(parsed.png, found)
    if parsed.json:
        print(json.dumps(found[place] if len(places) == 1 else found, indent=2))
    else:
        print(command.tell(args, found) if command.tell else "\n\n".join(texts))


if __name__ == "__main__":
    main(sys.argv[1:])
