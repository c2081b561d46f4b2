"""The data set for a machine without network: Python's own standard library, as found on it, byte by byte.

    python data/stdlib.py

About 12 MB of source text under 257 symbols (256 bytes and a separator before each file). The files are read, never imported;
tests are left out; about one file in twenty, chosen by a hash of its name, is held out for validation. The text differs a little
between Python versions, so compare losses only on one machine.
"""
import argparse
import platform
import sysconfig
import zlib
from pathlib import Path

import numpy as np

import tokens

SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def sources(root):
    """(relative name, text) of every module, in an order that does not depend on the file system."""
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if not SKIP & set(name.parts):
            yield name.as_posix(), path.read_bytes()


def prepare(out, root):
    split = {"train": [], "val": []}
    size = {"train": 0, "val": 0}
    for name, text in sources(root):
        part = "val" if zlib.crc32(name.encode()) % 20 == 0 else "train"
        split[part] += [np.array([tokens.Bytes.separator], np.uint16), np.frombuffer(text, np.uint8).astype(np.uint16)]
        size[part] += len(text)
    if not size["train"] or not size["val"]:
        raise ValueError(f"no Python sources under {root}: name a folder that has them with --source")
    shards = {f"{part}.bin": tokens.write_shard(out / f"{part}.bin", np.concatenate(split[part])) | {"bytes": size[part]} for part in split}
    tokens.write_json(out / "meta.json", {
        "dataset": "stdlib", "tokenizer": "bytes", "vocab_size": tokens.Bytes.vocab_size,
        "source": f"Python {platform.python_version()}", "shards": shards})
    print(f"data: Python {platform.python_version()} standard library, {size['train'] / 1e6:.1f} MB to train on, "
          f"{size['val'] / 1e6:.2f} MB held out, in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out_dir", type=Path, default=Path(__file__).parent / "stdlib")
    parser.add_argument("--source", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of Python sources")
    args = parser.parse_args()
    with tokens.one_line_errors():
        prepare(args.out_dir, args.source)
