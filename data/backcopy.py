"""The sink lab's data: the Bigram-Backcopy task (Guo et al. 2410.13835, section 2), made from a
seed, so its best possible loss is known.

    python data/backcopy.py

A sequence is BOS, then symbols 0..63. The next symbol is drawn from the bigram row of the current
one (each row Dirichlet(0.1)), except after one of five trigger symbols: a trigger is followed by a
copy of the symbol before it. So a head has work to do on triggers only; on all other rows it must
find a way to do nothing.

After BOS, and where the symbol before a trigger is BOS or the fixed token, the bigram row decides.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it would see only this folder
from common import files
from common.flags import Parser
from data import tokens

SYMBOLS, TRIGGERS, CONCENTRATION = 64, 5, 0.1
BOS, FIXED = 64, 65  # two more ids, each with its own bigram row


def draw_sequences(table, triggers, count, args, rng):
    """`count` sequences of length+1 ids, (count, length+1): the inputs and the last target."""
    cumulative = table.cumsum(1)
    x = np.zeros((count, args.length + 1), np.int64)
    x[:, 0] = BOS if args.bos else rng.integers(0, SYMBOLS, count)
    for i in range(args.length + 1):
        if i > 0:
            row = cumulative[x[:, i - 1]]  # (count, 64): of the previous symbol
            u = rng.random((count, 1)) * row[:, -1:]  # rounding may make the sum less than 1
            x[:, i] = (row <= u).sum(1)
        if i > 1:
            copies = np.isin(x[:, i - 1], triggers) & (x[:, i - 2] < SYMBOLS)
            x[copies, i] = x[copies, i - 2]
        if i == args.fixed_at:
            x[:, i] = FIXED
    return x


def prepare(args):
    if not 0 <= args.fixed_at <= args.length and args.fixed_at != -1:
        raise ValueError(
            f"--fixed_at={args.fixed_at} must be a position in 0..{args.length}, or -1 for none"
        )
    if min(args.length, args.sequences, args.val_sequences) < 1:
        raise ValueError("--length, --sequences and --val_sequences must be at least 1")
    rng = np.random.default_rng([args.seed, 0])
    table = rng.dirichlet([CONCENTRATION] * SYMBOLS, SYMBOLS + 2)  # (66, 64): bigrams of each id
    triggers = np.sort(rng.choice(SYMBOLS, TRIGGERS, replace=False))
    splits = {}
    for split, part, count in ("train", 1, args.sequences), ("val", 2, args.val_sequences):
        rng = np.random.default_rng([args.seed, part])
        splits[split] = [draw_sequences(table, triggers, count, args, rng).reshape(-1)]
    tokens.write_data_set(
        args.out_dir,
        None,
        splits,
        dataset="backcopy",
        tokenizer="numbers",
        vocab_size=SYMBOLS + 2,
        stride=args.length + 1,
        seed=args.seed,
        bos=args.bos,
        fixed_at=args.fixed_at,
        symbols=SYMBOLS,
        triggers=triggers.tolist(),
        bigrams=table.tolist(),
    )


if __name__ == "__main__":
    parser = Parser(description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path(__file__).with_name("backcopy"))
    for name, default, meaning in (
        ("seed", 0, "seed of the table, the triggers and the sequences"),
        ("length", 64, "symbols in a sequence: at least --block_size"),
        ("sequences", 40_000, "sequences to train on"),
        ("val_sequences", 2_000, "sequences to hold out"),
        ("fixed_at", -1, "put one fixed token at this position of every sequence; -1: none"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=meaning)
    parser.add_argument(
        "--no_bos",
        dest="bos",
        action="store_false",
        help="begin with a random symbol instead of BOS",
    )
    with files.one_line_errors():
        prepare(parser.parse_args())
