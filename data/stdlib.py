"""The data set for a machine without network: Python's own standard library, byte by byte.

    python data/stdlib.py
    python data/stdlib.py --tokenizer smollm2       in the tokenizer of the run out/smollm2;
                                                    goes to data/stdlib-smollm2

About 12 MB of source text under 257 symbols (256 bytes and a separator before each file). The files
are read, never imported. Tests are left out. About one file in twenty, chosen by a hash of its
name, is held out for validation. The text differs a little between Python versions, so compare
losses only on one machine.
"""

import platform
import sys
import sysconfig
import zlib
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it would see only this folder
from common import files
from data import tokens

SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def prepare(args):
    coder, parts = tokens.tokenizer_of(args, "stdlib"), {"train": [], "val": []}
    names = (path.relative_to(args.source) for path in args.source.rglob("*.py"))
    for name in sorted(names, key=Path.as_posix):  # independent of the file system
        if not SKIP & set(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % 20 == 0
            parts["val" if held_out else "train"].append(args.source / name)
    if not all(parts.values()):
        raise ValueError(
            f"{sum(map(len, parts.values()))} Python files under {args.source} are too "
            "few to train on and to hold out: name another folder with --source"
        )
    read = partial(Path.read_text, encoding="utf-8", errors="replace")
    ids = {split: tokens.encode_all(coder, map(read, paths)) for split, paths in parts.items()}
    source = f"Python {platform.python_version()}"
    tokens.write_data_set(args.out_dir, coder, ids, dataset="stdlib", source=source)


if __name__ == "__main__":
    parser = tokens.flags(__doc__, "stdlib", "bytes")
    parser.set_defaults(source=Path(sysconfig.get_paths()["stdlib"]))
    with files.one_line_errors():
        prepare(parser.parse_args())
