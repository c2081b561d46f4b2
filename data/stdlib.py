"""The data set for a machine without network: Python's own standard library, byte by byte.

    python data/stdlib.py
    python data/stdlib.py --tokenizer smollm2       in the tokenizer of the run out/smollm2; goes to data/stdlib-smollm2

About 12 MB of source text under 257 symbols (256 bytes and a separator before each file). The files are read, never
imported. Tests are left out. About one file in twenty, chosen by a hash of its name, is held out for validation. The
text differs a little between Python versions, so compare losses only on one machine.
"""
import platform
import sys
import sysconfig
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from common import files
from data import tokens

SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def modules(root):
    """{relative name: path} of the source files below a folder, in an order independent of the file system."""
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    return {name.as_posix(): root / name for name in sorted(names, key=Path.as_posix) if not SKIP & set(name.parts)}


def held_out(name):
    return zlib.crc32(name.encode()) % 20 == 0


def prepare(args):
    coder, found = tokens.settle(args, "stdlib"), modules(args.source)
    parts = {"train": [path for name, path in found.items() if not held_out(name)],
             "val": [path for name, path in found.items() if held_out(name)]}
    if not all(parts.values()):
        raise ValueError(f"{len(found)} Python files under {args.source} are too few to train on and to hold out: "
                         "name another folder with --source")
    texts = {split: (path.read_text(encoding="utf-8", errors="replace") for path in paths)
             for split, paths in parts.items()}
    tokens.write_data_set(args.out_dir, coder, texts, dataset="stdlib", source=f"Python {platform.python_version()}")


if __name__ == "__main__":
    parser = tokens.flags(__doc__, "stdlib", "bytes")
    parser.set_defaults(source=Path(sysconfig.get_paths()["stdlib"]))
    with files.one_line_errors():
        prepare(parser.parse_args())
