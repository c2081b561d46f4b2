"""The instruments: look at a trained run.    python eval.py COMMAND --out_dir=out/stdlib-elastic [--json]

    loss      loss in nats per token and bits per byte on fixed windows (also under torchrun, which splits the windows over the ranks)
    probe     where the attention goes: sinks, density, exact zeros, per layer and head
    sample    generate text
    lab       train every recipe in the sink lab and compare them
    speed     time every recipe's training step and attention on this machine; these last two need no --out_dir. With --kernels, the fused
              kernels against torch's own; with --live (and --out_dir), what the zeros of a trained run are worth

The model is rebuilt from the run's meta.json alone; --attn and the flags of its axes override it where the parameters allow.
Definitions of the measures: sinks as in Gu et al. 2410.10781 (Sink_1^eps) and Lazy Attention 2601.00919, appendix C.3 (sink ratio,
density); sparsity as in Threshold Differential Attention 2601.12145, appendix D.1.
"""
import json
import sys

from common.flags import Parser, add_flags, given_flags
from data import files
from evals.instrument import OVERRIDES, Common, Loaded
from evals.lab import Lab, lab_command
from evals.loss import Loss, loss_command
from evals.probe import ProbeFlags, probe_command
from evals.sample import Sample, sample_command
from evals.speed import Speed, speed_command

COMMANDS = {"loss": (loss_command, Loss), "probe": (probe_command, ProbeFlags), "sample": (sample_command, Sample), "lab": (lab_command, Lab),
            "speed": (speed_command, Speed)}


def main(argv):
    if not argv or argv[0] not in COMMANDS:
        parser = Parser(prog="eval.py", description=__doc__)
        parser.parse_args([a for a in argv if a in ("-h", "--help")])
        parser.error(f"the first word must be a command: {', '.join(COMMANDS)}" + (f", not {argv[0]!r}" if argv else ""))
    command, flags = COMMANDS[argv[0]]
    of_runs = flags not in (Lab, Speed)         # these make models of their own
    parser = Parser(prog=f"eval.py {argv[0]}", description=command.__doc__)
    add_flags(parser, *((flags, Common, OVERRIDES) if of_runs else (flags,)))
    parsed = parser.parse_args(argv[1:])
    if of_runs and not parsed.out_dir:
        parser.error("which run? give --out_dir=out/...")
    try:
        args = flags(**given_flags(parsed, flags))
    except ValueError as e:
        parser.error(str(e))
    with files.one_line_errors():
        if of_runs:
            run = Loaded(Common(**given_flags(parsed, Common)), given_flags(parsed, OVERRIDES))
            result, text = command(args, run)
            if run.machine.main:
                print(json.dumps(result, indent=2) if parsed.json else text)
            run.machine.close()
        else:
            result, text = command(args)
            print(json.dumps(result, indent=2) if args.json else text)


if __name__ == "__main__":
    main(sys.argv[1:])
