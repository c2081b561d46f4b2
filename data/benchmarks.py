"""Public benchmarks: fetch their files, and turn their rows into questions in lm-evaluation-harness 0.4.13's words.

    python data/benchmarks.py                           all of them, into data/benchmarks/
    python data/benchmarks.py --tasks=piqa,lambada      some of them
    python data/benchmarks.py --source=FOLDER           from local files

They are for evaluation only (python eval.py bench), not for training. A file keeps its authors' rows: one JSON object
per line, and plain text for WikiText. (PIQA and SIQA publish their labels apart; each row gets its label.) Its name is
one of those in TASKS below, or the same with .gz. A fetched file gets its name only if it has the expected number of
rows. Only the needed parts of a zip are fetched: ARC's zip has 680 MB, of which the questions are 2 MB.

Each row of a file becomes a Row: a context and a possible continuation for every choice. The words around the question
are those of lm-evaluation-harness, because every space in them affects a score.
"""
import http.client
import io
import itertools
import json
import re
import shutil
import sys
import urllib.request
import zipfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))                      # as a script it would see this folder only
from common import files
from common.flags import Parser
from data import tokens
from data.downloads import TIMEOUT, download, size_of

HERE = Path(__file__).parent / "benchmarks"


class Row(NamedTuple):
    """One question: choices[i] follows contexts[i] and a space. gold: the index of the right choice."""
    contexts: list[str]
    choices: list[str]
    gold: int


def question(name, row):
    """The Row of a task that a row of its file becomes. Raises ValueError if it cannot be scored."""
    match name:
        case "hellaswag" if "query" in row:     # some copies have joined and cleaned fields
            contexts, choices, gold = row["query"], row["choices"], row["gold"]
        case "hellaswag":                       # Zellers et al. 2019. WikiHow's pages have marks: [header], [step], ...
            contexts, *choices = (
                re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ") for text in (
                    f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}", *row["endings"]))
            gold = int(row["label"])
        case "arc_easy" | "arc_challenge":      # AI2's science exams, Clark et al. 2018, in the forms of openbookqa
            (stem, *_), choices, gold = question("openbookqa", row)
            contexts = f"Question: {stem}\nAnswer:"
        case "openbookqa" if "gold" in row:     # the flat form of some copies
            contexts, choices, gold = row.get("question") or row["question_stem"], row["choices"], row["gold"]
        case "openbookqa":                      # Mihaylov et al. 2018: only the question, without the facts of the book
            contexts, choices = row["question"]["stem"], [choice["text"] for choice in row["question"]["choices"]]
            letters = [choice["label"] for choice in row["question"]["choices"]]        # A B C D, in some exams 1 2 3 4
            gold = letters.index(row["answerKey"].strip())
        case "piqa":                            # physical interactions, Bisk et al. 2020
            contexts, choices = f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]]
            gold = int(row["label"])
        case "siqa":                            # social interactions, Sap et al. 2019
            contexts, choices = f"Q: {row['context']} {row['question']}\nA:", [row[f"answer{x}"] for x in "ABC"]
            gold = int(row["label"]) - 1
        case "winogrande":                      # Sakaguchi et al. 2021. Each option fills the gap; the end is scored
            before, after = row["sentence"].split("_", 1)
            contexts, choices = [before + row["option1"], before + row["option2"]], [after.strip()] * 2
            gold = int(row["answer"]) - 1
        case "boolq":                           # Clark et al. 2019, as in SuperGLUE
            contexts, choices = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"]
            gold = int(row["label"])
        case "lambada":                         # Paperno et al. 2016, in OpenAI's version: what is the last word?
            contexts, _, word = row["text"].rpartition(" ")
            choices, gold = [word], 0           # right if it is the likeliest continuation
    contexts = [contexts] * len(choices) if isinstance(contexts, str) else contexts
    if len(choices) < 2 and name != "lambada":
        raise ValueError("there is nothing to choose from")
    if not all(text and isinstance(text, str) for text in choices) or not all(isinstance(c, str) for c in contexts):
        raise ValueError("a context or a choice is not text, or is empty")
    if not 0 <= gold < len(choices):
        raise ValueError(f"the right answer is number {gold + 1} of {len(choices)}")
    return Row(contexts, choices, gold)


class Page(NamedTuple):
    """A page of WikiText as readable text, with the numbers of words and bytes of its original."""
    text: str
    words: int
    bytes: int


def pages(text):
    """The pages of wiki.test.raw. Each begins at a heading of the first level: " = Robert Boulter = ". The text of a
    page loses the spaces of WikiText's tokenization, by lm-evaluation-harness's rules in its order."""
    lines, found = text.split("\n"), []
    starts = [i for i, line in enumerate(lines) if re.fullmatch(r"= [^=].* =", line.strip())]
    for i, j in itertools.pairwise([*starts, len(lines)]):
        raw = "\n".join(lines[i:j])
        text = raw.replace("s '", "s'")
        for mark in "-,.":                      # 1 @,@ 000
            text = text.replace(f" @{mark}@ ", mark)
        for mark in ":;.!?,":
            text = text.replace(f" {mark} ", f"{mark} ")
        for left, right in ("()", "[]", "{}", '""', "''"):              # ( like these )
            inside = rf"\s*([^{re.escape(right)}]*?)\s*"
            text = re.sub(re.escape(left) + inside + re.escape(right), rf"{left}\1{right}", text)
        for level in (4, 3, 2):                 # = = = headings
            text = text.replace(" ".join("=" * level), "=" * level)
        for before, after in ((" ° ", "°"), (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
            text = text.replace(before, after)
        # words: the empty pieces at both ends count, as in lm-evaluation-harness
        found.append(Page(text, len(re.split(r"\s+", raw)), len(raw.encode())))
    return found


class Task(NamedTuple):
    file: str                                   # its name here
    rows: int                                   # number of rows of the public split
    url: str                                    # where it is published
    members: tuple = ()                         # of a zip: names of the file and, if separate, of its labels
    sha256: str | None = None                   # of the file, where it is published


GOOGLE = "https://storage.googleapis.com/ai2-mosaic/public/"
AMAZON = "https://s3-us-west-2.amazonaws.com/ai2-website/data/"
ARC, OPENBOOK = "ARC-V1-Feb2018", "OpenBookQA-V1-Sep2018"
PHYSICAL, SOCIAL = "physicaliqa-train-dev", "socialiqa-train-dev"
TASKS = {
    "hellaswag": Task("hellaswag_val.jsonl", 10042,
                      "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"),
    "arc_easy": Task("arc_easy_test.jsonl", 2376, f"{AMAZON}{ARC}.zip", (f"{ARC}-2/ARC-Easy/ARC-Easy-Test.jsonl",)),
    "arc_challenge": Task("arc_challenge_test.jsonl", 1172, f"{AMAZON}{ARC}.zip",
                          (f"{ARC}-2/ARC-Challenge/ARC-Challenge-Test.jsonl",)),
    "piqa": Task("piqa_valid.jsonl", 1838, f"{GOOGLE}physicaliqa/{PHYSICAL}.zip",
                 (f"{PHYSICAL}/dev.jsonl", f"{PHYSICAL}/dev-labels.lst")),
    "winogrande": Task("winogrande_xl_valid.jsonl", 1267, f"{GOOGLE}winogrande/winogrande_1.1.zip",
                       ("winogrande_1.1/dev.jsonl",)),
    "openbookqa": Task("openbookqa_test.jsonl", 500, f"{AMAZON}{OPENBOOK}.zip", (f"{OPENBOOK}/Data/Main/test.jsonl",)),
    "siqa": Task("siqa_valid.jsonl", 1954, f"{GOOGLE}socialiqa/{SOCIAL}.zip",
                 (f"{SOCIAL}/dev.jsonl", f"{SOCIAL}/dev-labels.lst")),
    "boolq": Task("boolq_valid.jsonl", 3270, "https://dl.fbaipublicfiles.com/glue/superglue/data/v2/BoolQ.zip",
                  ("BoolQ/val.jsonl",)),
    "lambada": Task("lambada_openai_test.jsonl", 5153,
                    "https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl", (),
                    "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"),
    "wikitext": Task("wiki.test.raw", 62,
                     "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
                     ("wikitext-2-raw/wiki.test.raw",),
                     "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"),
}


def task_names(text, folder):
    """The tasks in "hellaswag,piqa", all tasks for "all", or for "" those with a file in a folder. Raises ValueError on
    an unknown task, or if the folder has no file."""
    names = list(TASKS) if text == "all" else text.split(",") if text else [n for n in TASKS if find(n, folder)]
    if not names:
        raise ValueError(f"no benchmark's file in {folder}: fetch them with python data/benchmarks.py, or name a "
                         "folder that has them with --source")
    for name in names:
        if name not in TASKS:
            raise ValueError(f"unknown task {name!r}: choose from {', '.join(TASKS)}, or all")
    return names


def find(name, folder):
    """The path of a task's file in a folder, compressed or not; None if it is missing."""
    places = (Path(folder, TASKS[name].file + end) for end in ("", ".gz"))
    return next((place for place in places if place.exists()), None)


def read(name, folder, path=None):
    """The rows of a task: [Row], for wikitext [Page]. Raises ValueError if its file is missing, damaged or not
    this task's. path: another name of the file."""
    path = path or find(name, folder)
    if path is None:
        raise ValueError(f"{name}: no {TASKS[name].file} in {folder}: fetch it with python data/benchmarks.py "
                         f"--tasks={name}, or name a folder that has it with --source")
    if name == "wikitext":
        rows = pages(tokens.read_text(path))
    else:
        rows = list(tokens.jsonl_rows(path, partial(question, name), f"row of {name}"))
    if not rows:
        raise ValueError(f"{path} has no rows of {name}: fetch it again")
    return rows


class Remote(io.RawIOBase):
    """A file at a URL. Only the parts that are read are fetched. Raises OSError if the server cannot do that."""

    def __init__(self, url):
        self.url, self.size, self.place = url, size_of(url), 0

    readable = seekable = lambda self: True

    def seek(self, offset, whence=io.SEEK_SET):
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, buffer):
        end = min(self.place + len(buffer), self.size)
        if end <= self.place:
            return 0
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={self.place}-{end - 1}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            if answer.status != 206:
                raise OSError("the server sends whole files only")
            found = answer.read()
        buffer[:len(found)] = found
        self.place += len(found)
        return len(found)


def fetch(name, folder):
    """Put a task's public file into a folder. It gets its name only if it is complete. Raises ValueError."""
    task, path, otherwise = TASKS[name], folder / TASKS[name].file, "name a folder that has it with --source"
    part = path.with_name(path.name + ".new")
    try:
        if task.members:
            with zipfile.ZipFile(io.BufferedReader(Remote(task.url), 1 << 18)) as archive:
                content, *labels = (archive.read(member) for member in task.members)
            if labels:                          # labels are in a separate file: each row gets its label
                pairs = zip(content.splitlines(), labels[0].split(), strict=True)
                rows = (json.loads(row) | {"label": int(label)} for row, label in pairs)
                content = "".join(json.dumps(row) + "\n" for row in rows).encode()
            with files.replacing(part) as f:
                f.write(content)
        else:
            download(task.url, part, None, task.sha256, name, otherwise)
        count = len(read(name, folder, part))
        if count != task.rows or task.sha256 not in (None, files.sha256(part)):
            raise ValueError(f"{name}: the fetched file is not the public one (it has {count:,} rows of {task.rows:,}, "
                             "or another sha256): run this again")
        part.replace(path)
    except (OSError, http.client.HTTPException, KeyError, *files.BAD_ZIP) as e:
        raise ValueError(f"{name} could not be fetched from {task.url} ({getattr(e, 'reason', None) or e}): run "
                         f"this again with network, or {otherwise}") from None
    finally:
        part.unlink(missing_ok=True)


def main(argv):
    parser = Parser(prog="benchmarks.py", description=__doc__)
    parser.add_argument("--tasks", help="tasks, separated by commas (default: all, or with --source those found there)"
                                        f": {', '.join(TASKS)}")
    parser.add_argument("--source", type=Path, help="folder with the files; without it they are fetched")
    parser.add_argument("--out_dir", type=Path, default=HERE, help="folder for the files (data/benchmarks)")
    args = parser.parse_args(argv)
    with files.one_line_errors():
        for name in task_names(args.tasks or ("" if args.source else "all"), args.source):
            if args.source:
                read(name, args.source)         # raises ValueError on a wrong file
                with (tokens.unpacked(find(name, args.source)) as there,
                      files.replacing(args.out_dir / TASKS[name].file) as here):
                    shutil.copyfileobj(there, here)                     # decompressed
            elif find(name, args.out_dir) is None:
                fetch(name, args.out_dir)
            count, wanted = len(read(name, args.out_dir)), TASKS[name].rows
            of = f" of {wanted:,}" if count != wanted else ""
            print(f"{find(name, args.out_dir)}: {count:,} rows{of}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
