"""The data set for a machine without network: Python's own standard library, as found on it, byte by byte.

    python data/stdlib.py

About 12 MB of source text under 257 symbols (256 bytes and a separator before each file). The files are read, never
imported; tests are left out; about one file in twenty, chosen by a hash of its name, is held out for validation. The
text differs a little between Python versions, so compare losses only on one machine.
"""
import argparse
import platform
import sys
import sysconfig
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from data import files, tokens

SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def modules(root):
    """The source files below a folder, in an order that does not depend on the file system: {relative name: path}."""
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    return {name.as_posix(): root / name for name in sorted(names, key=Path.as_posix) if not SKIP & set(name.parts)}


def held_out(name):
    return zlib.crc32(name.encode()) % 20 == 0


def prepare(out, root):
    found = modules(root)
    parts = {"train": [path for name, path in found.items() if not held_out(name)],
             "val": [path for name, path in found.items() if held_out(name)]}
    if not all(parts.values()):
        raise ValueError(f"{len(found)} Python files under {root} are too few to train on and to hold out: "
                         "name another folder with --source")
    texts = {split: (path.read_text(encoding="utf-8", errors="replace") for path in paths)
             for split, paths in parts.items()}
    tokens.write_data_set(out, tokens.Bytes(), texts, dataset="stdlib", source=f"Python {platform.python_version()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", type=Path, default=Path(__file__).with_name("stdlib"))
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]),
                        help="folder of Python sources")
    args = parser.parse_args()
    with files.one_line_errors():
        prepare(args.out_dir, args.source)
