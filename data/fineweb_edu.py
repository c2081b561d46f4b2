"""FineWeb-Edu, the 10-billion-token sample (sample-10BT): educational web pages, the data of the larger runs, in GPT-2
byte pairs.

    python data/fineweb_edu.py                              all: 28.5 GB to fetch, 20 GB of shards
    python data/fineweb_edu.py --train_shards 10            1 billion tokens; a later call with more continues
    python data/fineweb_edu.py --source FOLDER --out_dir data/mine
                                                            local .parquet, .jsonl, .txt (or .gz of the last two)
    python data/fineweb_edu.py --tokenizer smollm2          in the tokenizer of the run out/smollm2; goes to
                                                            data/fineweb_edu-smollm2

Each document begins with the separator. The documents fill shards of 100 M tokens and continue in the next shard when
one is full: val_000000.bin, then train_000000.bin and so on. Memory holds a few documents at a time.

You can stop or kill it and start it again: progress.json records where in the source the next shard begins, so the
files are the same.
"""
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from common import files
from data import tokens
from data.downloads import download

COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
ADDRESS = f"https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu/resolve/{COMMIT}/sample/10BT/"
FILES = {  # bytes and sha256
    "000_00000.parquet": (2152819114, "b1ba7b2ce4cb5ea6ef42dca40263eabb85f37700d01693a68e9b30a31d78e871"),
    "001_00000.parquet": (2152222432, "3fcf2dc69cd52503986276d3d2d26a8c356d0f2ea28a0de4fdbda8cf87755693"),
    "002_00000.parquet": (2151796315, "547ae182d132c9f06b6ce63149567208ea9f57630bfd9b1a2938e504f0c9ebd7"),
    "003_00000.parquet": (2152437524, "22184e6eb25759ddd97783751ffc73e1705dfa2542e630dae1f2a8bac8ee6ddb"),
    "004_00000.parquet": (2152338550, "33557ddd87a07a4ae6fcaf7a4789c7b484e5cc0c273ca12a65b74200e6d8748b"),
    "005_00000.parquet": (2152189947, "e08d79927ecb377786572cd854817c748ceb8880878b1a0eb91abf8c85d505ea"),
    "006_00000.parquet": (2152689867, "554fa2613c9261d6c9c396caab881de3160175794c6c3e1856bf28a0e9cb9b76"),
    "007_00000.parquet": (2150686637, "4b7d1f697d4afff7f5f65cb7aa4d83acc6db716da4d46ea23399d0c50608c6e3"),
    "008_00000.parquet": (2151274846, "a6d9dcc0c72ecd7c7f0173c2d06b3a4249a2ccaa94961469d1a522ca689bbf1a"),
    "009_00000.parquet": (2151913277, "f836cd3c70b95776699eb6c356b2dbf702816e25dcf39992f5c80a29029d23c3"),
    "010_00000.parquet": (2152798864, "e5a2eae25f057f0856a10bfae314c6ca8ea8bb08456d2131e9e89b2b8305e2f6"),
    "011_00000.parquet": (2152323681, "db71cf0425bb3d1813a09f12ff1acd6dabdfb91a2e4f141960254ee5a7f036e7"),
    "012_00000.parquet": (2152069689, "08b47a3e1c25161f796d2f8dbf99ccf60affdebdcea4910833d0d5783315551f"),
    "013_00000.parquet": (540632672, "b393f51fefab26cd6f4c8f65707c1924f6666c4961a0ebebe04bb57f7ec832de"),
}


def pieces(paths, coder, position, size):
    """Yield (shard, position after the piece, ids) for every document from a position (file, document, token) on. The
    pieces are cut where a shard is full: after `size` tokens. A restart needs only the position."""
    (file, document, token), count = position, 0
    for i, path in enumerate(paths[file:], file):
        if not path.exists():
            download(ADDRESS + path.name, path, *FILES[path.name], f"FineWeb-Edu's {path.name}",
                     "name a folder of local files with --source")
        texts = itertools.islice(tokens.documents(path), document, None)
        for j, ids in enumerate(tokens.encode_all(coder, texts), document):
            while token < len(ids):
                piece = ids[token:token + size - count % size]
                yield count // size, [i, j, token + piece.size], piece
                token, count = token + piece.size, count + piece.size
            token = 0
        document = 0


def resume(out, plan, coder):
    """The state to continue from: that of an unfinished or a finished data set (which may get more shards), or a new
    one. Its entry "next" is the position of the next token, or None at the end of the source."""
    path = next((path for path in (out / "progress.json", out / "meta.json") if path.exists()), None)
    if path is None:
        return plan | {"next": [0, 0, 0], "shards": {}}
    state = files.read_json(path)
    is_state = files.has(state, next=list | None) and "next" in state and tokens.has_shards(state)
    position = is_state and state["next"] or [0, 0, 0]
    if not (is_state and len(position) == 3 and all(isinstance(n, int) and n >= 0 for n in position)):
        raise ValueError(f"{path} is damaged: delete {out} and run this again")
    another = tokens.content_of(out) not in (None, coder.content)       # tokenizer of the same name
    if another or plan != {key: state.get(key) for key in plan}:
        raise ValueError(f"{out} holds a data set from other sources or with other flags: "
                         "delete it, or name another folder with --out_dir")
    for name in state["shards"]:
        tokens.read_shard(out / name)
    return state


def prepare(args):
    if args.shard_tokens < 1 or args.train_shards < 0:
        raise ValueError("--shard_tokens must be at least 1 and --train_shards at least 0")
    coder, out, size = tokens.settle(args, "fineweb_edu"), args.out_dir, args.shard_tokens
    if args.source:
        paths = tokens.source_files(args.source, (".parquet", ".jsonl", ".txt"))
        below = args.source if args.source.is_dir() else args.source.parent
        names = [[path.relative_to(below).as_posix(), path.stat().st_size] for path in paths]
    else:                                       # they may not be fetched yet
        paths, names = [out / "source" / name for name in FILES], [[name, size] for name, (size, _) in FILES.items()]
    if any(path.suffix == ".parquet" for path in paths):
        files.optional("pyarrow.parquet")       # fail before a long download
    # the source files' names and sizes, by which a restart recognises them
    plan = {"dataset": "fineweb_edu"} | tokens.described(coder) | {"shard_tokens": size, "files": names}
    state, progress = resume(out, plan, coder), out / "progress.json"
    stream = pieces(paths, coder, state["next"] or [len(paths), 0, 0], size)
    shards = itertools.groupby(stream, key=lambda piece: piece[0])
    # a shard is renamed first, then gets its row in progress.json: a kill between the two repeats the shard
    while not args.train_shards or len(state["shards"]) <= args.train_shards:
        _, shard = next(shards, (None, None))
        if shard is None:
            state["next"] = None
            break
        files.write_json(progress, state)
        tokens.begin(out, coder)
        number = len(state["shards"])
        name = f"train_{number - 1:06d}.bin" if number else "val_000000.bin"
        pieces_of_it = (ids for _, state["next"], ids in shard)         # "next": the position after the last piece
        row = state["shards"][name] = tokens.write_shard(out / name, pieces_of_it, coder)
        print(f"{name}: {row['tokens']:,} tokens, {row['bytes'] / 1e6:.2f} MB of text", flush=True)
        files.write_json(progress, state)
    rows = list(state["shards"].values())
    if len(rows) < 2:
        for path in (progress, out / "val_000000.bin", out / "val_000000.starts.bin"):
            path.unlink(missing_ok=True)
        raise ValueError(f"the source holds {rows[0]['tokens'] if rows else 0:,} tokens, and the first {size:,} are "
                         "held out: lower --shard_tokens, or name a larger source")
    if rows[-1]["tokens"] < size:
        print(f"the last shard is partial, {rows[-1]['tokens']:,} of {size:,} tokens: this is normal")
    tokens.finish(out, state)
    progress.unlink(missing_ok=True)


if __name__ == "__main__":
    parser = tokens.flags(__doc__, "fineweb_edu", "gpt2")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000,
                        help="tokens per shard; the first shard is held out (default: %(default)s)")
    parser.add_argument("--train_shards", type=int, default=0, help="number of training shards (default: 0, all)")
    with files.one_line_errors():
        prepare(parser.parse_args())
