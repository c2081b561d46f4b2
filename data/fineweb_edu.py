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
from data.downloads import download

COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
ADDRESS = f"https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu/resolve/{COMMIT}/sample/10BT/"
TABLE = """
    000_00000.parquet 2152819114 b1ba7b2ce4cb5ea6ef42dca40263eabb85f37700d01693a68e9b30a31d78e871
    001_00000.parquet 2152222432 3fcf2dc69cd52503986276d3d2d26a8c356d0f2ea28a0de4fdbda8cf87755693
    002_00000.parquet 2151796315 547ae182d132c9f06b6ce63149567208ea9f57630bfd9b1a2938e504f0c9ebd7
    003_00000.parquet 2152437524 22184e6eb25759ddd97783751ffc73e1705dfa2542e630dae1f2a8bac8ee6ddb
    004_00000.parquet 2152338550 33557ddd87a07a4ae6fcaf7a4789c7b484e5cc0c273ca12a65b74200e6d8748b
    005_00000.parquet 2152189947 e08d79927ecb377786572cd854817c748ceb8880878b1a0eb91abf8c85d505ea
    006_00000.parquet 2152689867 554fa2613c9261d6c9c396caab881de3160175794c6c3e1856bf28a0e9cb9b76
    007_00000.parquet 2150686637 4b7d1f697d4afff7f5f65cb7aa4d83acc6db716da4d46ea23399d0c50608c6e3
    008_00000.parquet 2151274846 a6d9dcc0c72ecd7c7f0173c2d06b3a4249a2ccaa94961469d1a522ca689bbf1a
    009_00000.parquet 2151913277 f836cd3c70b95776699eb6c356b2dbf702816e25dcf39992f5c80a29029d23c3
    010_00000.parquet 2152798864 e5a2eae25f057f0856a10bfae314c6ca8ea8bb08456d2131e9e89b2b8305e2f6
    011_00000.parquet 2152323681 db71cf0425bb3d1813a09f12ff1acd6dabdfb91a2e4f141960254ee5a7f036e7
    012_00000.parquet 2152069689 08b47a3e1c25161f796d2f8dbf99ccf60affdebdcea4910833d0d5783315551f
    013_00000.parquet 540632672 b393f51fefab26cd6f4c8f65707c1924f6666c4961a0ebebe04bb57f7ec832de
"""  # name, bytes, sha256
FILES = {name: (int(size), sha) for name, size, sha in map(str.split, TABLE.strip().splitlines())}


def documents_from(paths, coder, place):
    """Yield (ids, place of the next document) for all documents from a place on: [file,
    document]."""
    first, skipped = place
    for i, path in enumerate(paths[first:], first):
        if not path.exists():
            otherwise = "name a folder of local files with --source"
            name = f"FineWeb-Edu's {path.name}"
            download(ADDRESS + path.name, path, *FILES[path.name], name, otherwise)
        texts = itertools.islice(tokens.documents(path), skipped, None)
        for j, ids in enumerate(tokens.encode_all(coder, texts), skipped + 1):
            yield ids, [i, j]
        skipped = 0


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
    # the source files' names and sizes, by which a restart recognises them
    if args.source:
        paths = tokens.source_files(args.source, (".parquet", ".jsonl", ".txt"))
        below = args.source if args.source.is_dir() else args.source.parent
        names = [[path.relative_to(below).as_posix(), path.stat().st_size] for path in paths]
    else:  # they may not be fetched yet
        paths = [out / "source" / name for name in FILES]
        names = [[name, length] for name, (length, _) in FILES.items()]
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
