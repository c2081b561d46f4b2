"""A data set from any text of yours: a file, or a folder with files.

    python data/text.py --source notes.txt
    python data/text.py --source books/ --val moby-dick --tokenizer gpt2 --name books
    python train.py --dataset=books
    python data/text.py --source books/ --name books --tokenizer smollm2  goes to data/books-smollm2
    python train.py --dataset=books --init_from=out/smollm2                 finds it there

A .jsonl (or .parquet) holds a document in the "text" field of each row; any other file is one
document if it is UTF-8; .gz of these is unpacked. In a folder, empty and binary files are skipped.
Each document begins with a separator.

With --prompt=question --response=answer, a document is the text in these two fields of each row of
a .jsonl or .parquet, one after the other. The loss counts only the response and the separator
after it. (train.py and eval.py loss count so; the other instruments read all tokens.)

With --fixed_at=16 --length=256 the text is cut into sequences of 256 tokens and the target of the
last one. The separator replaces the token at place 16 of each. Does a token that is always at the
same place become the sink? (Lazy Attention, section 3.1 and figure 2a. Train with --block_size up
to that length, then measure with eval.py probe.)

--val names the files to hold out for validation. Without it, whole documents are held out, up to
--val_share of the bytes, in a random but fixed order. If there is only one document, its end is
held out.
"""

import contextlib
import itertools
import sys
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it would see only this folder
from common import files
from data import tokens


def held_out(sizes, args):
    """Which documents are held out: an array of bool, in the order of the files. sizes: {file:
    sizes in bytes of its documents}.

    With --val: all documents of the files that it names, with or without folder and ending.
    Otherwise: documents in a fixed random order as long as they fit into --val_share, or the
    shortest one if the first does not fit."""
    if not args.val:
        lengths = np.concatenate(list(sizes.values()))
        order = np.random.default_rng(0).permutation(len(lengths))
        mask = np.zeros(len(lengths), bool)
        mask[order[np.cumsum(lengths[order]) <= args.val_share * lengths.sum()]] = True
        if not mask.any():
            mask[lengths.argmin()] = True
        return mask
    named, missing = [], set(args.val)
    for path, documents in sizes.items():
        relative = str(path.relative_to(args.source))
        forms = {path.name, path.name.split(".")[0], relative, str(path)}
        named += [bool(forms & set(args.val))] * len(documents)
        missing -= forms
    if missing:
        known = ", ".join(sorted(path.name for path in sizes)[:20])
        raise ValueError(
            f"--val {min(missing)}: no such file in {args.source}, choose from {known}"
        )
    return np.array(named)


def texts_of(read, paths, mask):
    """The texts of one split, read from the files again: memory holds only a few at a time."""
    return itertools.compress(itertools.chain.from_iterable(map(read, paths)), mask)


def fixed(args, separator, pieces):
    """The ids of all texts in sequences of args.length + 1, with the separator at position
    args.fixed_at of each. An incomplete last sequence is dropped."""
    ids, width = np.concatenate(list(pieces)), args.length + 1
    sequences = ids[: len(ids) // width * width].reshape(-1, width)
    sequences[:, args.fixed_at] = separator
    yield sequences.reshape(-1)


def prepare(args):
    if not -1 <= args.fixed_at < args.length:
        raise ValueError(
            f"--fixed_at={args.fixed_at} must be a place in 0..{args.length - 1}, below --length"
        )
    if not 0 < args.val_share < 1:
        raise ValueError(f"--val_share={args.val_share} must lie between 0 and 1")
    if bool(args.prompt) != bool(args.response) or args.prompt and args.fixed_at >= 0:
        raise ValueError(
            f"--prompt={args.prompt} and --response={args.response}: give both, without --fixed_at"
        )
    files.check_name(args.name, "--name")  # --out_dir takes any folder
    if not args.out_dir and args.name in {*tokens.DATA_SETS} - {"text"}:
        raise ValueError(f"--name={args.name} is the name of a script in data/: choose another")
    coder, source = tokens.tokenizer_of(args, args.name), args.source
    entries, read, endings = {"dataset": args.name, "source": str(source)}, tokens.documents, None
    if args.prompt:
        entries |= {"prompt": args.prompt, "response": args.response}
        read, endings = partial(read, fields=(args.prompt, args.response)), tokens.ROWS
    sizes, paths = {}, tokens.source_files(source, endings)
    for path in paths:
        with contextlib.nullcontext() if path == source else contextlib.suppress(tokens.NotText):
            if found := [len("".join(text).encode()) for text in read(path)]:
                sizes[path] = np.array(found)
    if not sizes:
        raise ValueError(
            f"--source={source} holds no text: name files in UTF-8, or .jsonl or "
            '.parquet with a "text"'
        )
    count = sum(map(len, sizes.values()))
    if count == 1 and not args.val and not args.prompt:
        text = next(tokens.documents(next(iter(sizes))))
        end = int(len(text) * (1 - args.val_share))
        if not 0 < end < len(text):
            raise ValueError(
                f"--source={source} has {len(text)} characters, too few to hold out "
                f"{args.val_share}"
            )
        splits = {"train": [text[:end]], "val": [text[end:]]}
    else:
        mask = held_out(sizes, args)
        if mask.all():
            raise ValueError(
                f"all documents of --source={source} ({count}) are held out, so nothing is left to "
                "train on: name fewer files in --val, or add documents"
            )
        splits = {"train": texts_of(read, sizes, ~mask), "val": texts_of(read, sizes, mask)}
    print(
        f"source: {count} documents in {len(sizes)} files of {source}; "
        f"{len(paths) - len(sizes)} files without text skipped"
    )
    ids = {split: tokens.encode_all(coder, texts) for split, texts in splits.items()}
    if args.fixed_at >= 0:  # windows begin where sequences begin
        ids = {split: fixed(args, coder.separator, pieces) for split, pieces in ids.items()}
        entries |= {"stride": args.length + 1, "fixed_at": args.fixed_at}
    tokens.write_data_set(args.out_dir, coder, ids, **entries)
    dataset = args.name if args.out_dir.parent == tokens.HERE else args.out_dir
    base = f" --init_from=out/{coder.name}" if Path("out", coder.name).exists() else ""
    print(f"next:  python train.py --dataset={dataset}{base}")


if __name__ == "__main__":
    parser = tokens.flags(__doc__, "text", "gpt2")
    parser.add_argument(
        "--name", default="text", help="name of the data set and its folder (default: %(default)s)"
    )
    parser.add_argument("--prompt", help="field of a row with text that is no target of the loss")
    parser.add_argument("--response", help="field with the text after it, which is a target")
    parser.add_argument("--val", nargs="+", metavar="FILE", help="files to hold out")
    parser.add_argument(
        "--val_share", type=float, default=0.1, help="share to hold out (default: %(default)s)"
    )
    parser.add_argument(
        "--fixed_at",
        type=int,
        default=-1,
        metavar="PLACE",
        help="put the separator at this place, counted from 0, of every sequence",
    )
    parser.add_argument(
        "--length", type=int, default=256, help="tokens of such a sequence (default: %(default)s)"
    )
    args = parser.parse_args()
    if not args.source:
        parser.error("which text? give --source FILE or FOLDER")
    with files.one_line_errors():
        prepare(args)
