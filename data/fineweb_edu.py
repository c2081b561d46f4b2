"""FineWeb-Edu, the 10-billion-token sample (sample-10BT): educational web pages, the data of the
larger runs, in GPT-2 byte pairs.

    python data/fineweb_edu.py                      all: 28.5 GB to fetch, 20 GB of shards
    python data/fineweb_edu.py --train_shards 10    1 billion tokens; a later call can add more
    python data/fineweb_edu.py --source FOLDER --out_dir data/mine
                                                    local .parquet, .jsonl, .txt, also with .gz
    python data/fineweb_edu.py --tokenizer smollm2  in the tokenizer of the run out/smollm2;
                                                    goes to data/fineweb_edu-smollm2

Each document begins with the separator. A shard is full after the document with which it has
100 M tokens: val_000000.bin first, then train_000000.bin and so on. The last shard is shorter.
Memory holds a few documents at a time.

You can stop or kill it and start it again: after each shard, meta.json records which document of
the source is next, so the files are the same.
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it would see only this folder
from common import files
from data import tokens

COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
FILES = [f"sample/10BT/{i:03d}_00000.parquet" for i in range(14)]


def documents_from(paths, coder, place):
    """Yield (ids, place of the next document) for all documents from a place on: [file,
    document]."""
    first, skipped = place
    for i, path in enumerate(paths[first:], first):
        if not path.exists():
            fetch(path)
        texts = itertools.islice(tokens.documents(path), skipped, None)
        for j, ids in enumerate(tokens.encode_all(coder, texts), skipped + 1):
            yield ids, [i, j]
        skipped = 0


def fetch(path):
    """Fetch a public file to its path, data/fineweb_edu/source/sample/10BT/NAME. An earlier attempt
    is resumed."""
    hub = files.optional("huggingface_hub")
    try:
        hub.hf_hub_download(
            "HuggingFaceFW/fineweb-edu",
            "/".join(path.parts[-3:]),
            repo_type="dataset",
            revision=COMMIT,
            local_dir=path.parents[2],
        )
    except Exception as e:  # of several libraries
        raise ValueError(
            f"FineWeb-Edu's {path.name} could not be fetched ({e}): run this again, or name a "
            "folder of local files with --source"
        ) from None


def shard(stream, size, meta):
    """Yield the ids of the next documents until they are `size` tokens. meta["next"] is then the
    place after them."""
    count = 0
    for ids, meta["next"] in stream:
        yield ids
        count += len(ids)
        if count >= size:
            break


def resume(out, plan, coder):
    """The meta.json to continue from: that of a data set of this plan, which may get more shards,
    or a new one. Its entry "next" is the place of the next document."""
    path = out / "meta.json"
    if not path.exists():
        tokens.begin(out, coder)
        return plan | {"next": [0, 0], "shards": {}}
    meta = files.read_json(path)
    place = meta.get("next") if files.has(meta, next=list) and tokens.has_shards(meta) else []
    if len(place) != 2 or not all(isinstance(number, int) and number >= 0 for number in place):
        raise ValueError(f"{path} is damaged, or of another script: delete {out}, run this again")
    another = tokens.content_of(out) not in (None, coder.content)  # tokenizer of the same name
    if another or plan != {key: meta.get(key) for key in plan}:
        raise ValueError(
            f"{out} holds a data set from other sources or with other flags: "
            "delete it, or name another folder with --out_dir"
        )
    for name in meta["shards"]:
        tokens.read_shard(out / name)
    return meta


def prepare(args):
    if args.shard_tokens < 1 or args.train_shards < 0:
        raise ValueError("--shard_tokens must be at least 1 and --train_shards at least 0")
    coder, out, size = tokens.tokenizer_of(args, "fineweb_edu"), args.out_dir, args.shard_tokens
    # the source files' names and sizes (or their commit), by which a restart recognises them
    if args.source:
        paths = tokens.source_files(args.source, (".parquet", ".jsonl", ".txt"))
        below = args.source if args.source.is_dir() else args.source.parent
        names = [[path.relative_to(below).as_posix(), path.stat().st_size] for path in paths]
    else:  # they may not be fetched yet
        paths = [out / "source" / name for name in FILES]
        names = [[name, COMMIT] for name in FILES]
    if any(path.suffix == ".parquet" for path in paths):
        files.optional("pyarrow.parquet")  # fail before a long download
    plan = {"dataset": "fineweb_edu", "shard_tokens": size, "files": names}
    meta = resume(out, plan | tokens.tokenizer_entries(coder), coder)
    stream = documents_from(paths, coder, meta["next"])
    shards = meta["shards"]
    while not args.train_shards or len(shards) <= args.train_shards:
        first = next(stream, None)
        if first is None:
            break
        name = f"train_{len(shards) - 1:06d}.bin" if shards else "val_000000.bin"
        documents = itertools.chain([first], stream)
        row = tokens.write_shard(out / name, shard(documents, size, meta), coder)
        print(f"{name}: {row['tokens']:,} tokens, {row['bytes'] / 1e6:.2f} MB of text", flush=True)
        shards[name] = row
        files.write_json(out / "meta.json", meta)
    if len(shards) < 2:
        (out / "meta.json").unlink(missing_ok=True)
        raise ValueError(
            f"the source is held out whole, because it fits into one shard of {size:,} "
            "tokens: lower --shard_tokens, or name a larger source"
        )
    tokens.summarize(out, meta)


if __name__ == "__main__":
    parser = tokens.flags(__doc__, "fineweb_edu", "gpt2")
    parser.add_argument(
        "--shard_tokens",
        type=int,
        default=100_000_000,
        help="tokens per shard; the first shard is held out (default: %(default)s)",
    )
    parser.add_argument(
        "--train_shards", type=int, default=0, help="number of training shards (default: 0, all)"
    )
    with files.one_line_errors():
        prepare(parser.parse_args())
