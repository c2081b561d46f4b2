"""Tiny Shakespeare: 1.1 MB of plays, the data set of char-rnn and of nanoGPT's first example.

    python data/shakespeare.py                      bytes, 257 symbols
    python data/shakespeare.py --tokenizer gpt2     GPT-2 byte pairs, 0.3 M tokens
    python data/shakespeare.py --tokenizer smollm2  in the tokenizer of the run out/smollm2;
                                                    goes to data/shakespeare-smollm2

The first 90 % of the characters are the training split, the rest is held out. Each part is encoded
by itself, without separators, as in nanoGPT. The file is fetched once into the data set's folder;
--source names a local copy (also .gz).
"""

import hashlib
import http.client
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script it would see only this folder
from common import files
from data import tokens

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def prepare(args):
    coder = tokens.tokenizer_of(args, "shakespeare")
    source = args.source or args.out_dir / "input.txt"
    if not args.source and not source.exists():
        try:
            with urllib.request.urlopen(URL, timeout=20) as answer, files.replacing(source) as f:
                f.write(content := answer.read())
                if hashlib.sha256(content).hexdigest() != SHA256:
                    raise OSError("what came is not the whole file")
        except (OSError, http.client.HTTPException) as e:  # no network, a timeout
            raise ValueError(
                f"{URL} could not be fetched ({e}): run this again, or name a local copy with "
                "--source"
            ) from None
    text = tokens.read_text(source)
    if hashlib.sha256(text.encode()).hexdigest() != SHA256:
        raise ValueError(
            f"{source} is not Tiny Shakespeare (sha256 differs): name the public file "
            f"({URL}) with --source, or use python data/text.py for a text of your own"
        )
    end = int(len(text) * 0.9)
    ids = {"train": [coder.encode(text[:end])], "val": [coder.encode(text[end:])]}
    tokens.write_data_set(args.out_dir, coder, ids, dataset="shakespeare", source=URL)


if __name__ == "__main__":
    with files.one_line_errors():
        prepare(tokens.flags(__doc__, "shakespeare", "bytes").parse_args())
