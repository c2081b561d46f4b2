"""data/benchmarks.py: a row of each public file becomes a question, and the files are fetched."""
import gzip
import hashlib
import io
import json
import zipfile

import pytest
from conftest import assert_says

from data import benchmarks

def exam(stem, key, **choices):
    """A row of AI2's exams."""
    return {"question": {"stem": stem, "choices": [{"text": text, "label": label} for label, text in choices.items()]},
            "answerKey": key}


PUBLIC = {                                      # one invented row in the form of each public file
    "hellaswag": {"activity_label": "Baking", "ctx_a": "[header] A baker  kneads [title] dough.", "ctx_b": "the BAKER",
                  "endings": [" [step] sings. ", "flies [substeps] off.", "sits   down.", "is"], "label": 3},
    "arc_easy": exam("What is wet?", "A", A="water", B="fire"),
    "arc_challenge": exam("Why?", "3", **{"1": "so", "2": "no", "3": "yes"}),
    "piqa": {"goal": "Open a jar", "sol1": "turn it", "sol2": "eat it", "label": 0},
    "winogrande": {"sentence": "The cup was on the tray, so _ fell first.", "option1": "the cup", "option2": "the tray",
                   "answer": "2"},
    "openbookqa": exam("Bees make", " B", A="honey", B="wax and noise"),
    "siqa": {"context": "Ada fixed it.", "question": "How is Ada?", "answerA": "glad", "answerB": "sad",
             "answerC": "lost", "label": "3"},
    "boolq": {"passage": "Ice is water.", "question": "is ice water", "label": True},
    "lambada": {"text": "She gave the dog\n a bone"},
}
FLAT = {                                        # the same rows in another layout
    "hellaswag": {"query": "Baking: A  baker [is]", "choices": [" sings.", "flies off.", "sits  down.", "is"],
                  "gold": 3},
    "arc_easy": {"question": "What is wet?", "choices": ["water", "fire"], "gold": 0},
    "openbookqa": {"question_stem": "Bees make", "choices": ["honey", "wax and noise"], "gold": 1},
}
QUESTIONS = {                                   # what these rows become
    "hellaswag": (["Baking: A baker kneads. dough. The baker"] * 4, [" sings.", "flies off.", "sits  down.", "is"], 3),
    "arc_easy": (["Question: What is wet?\nAnswer:"] * 2, ["water", "fire"], 0),
    "arc_challenge": (["Question: Why?\nAnswer:"] * 3, ["so", "no", "yes"], 2),
    "piqa": (["Question: Open a jar\nAnswer:"] * 2, ["turn it", "eat it"], 0),
    "winogrande": ([f"The cup was on the tray, so the {it}" for it in ("cup", "tray")], ["fell first."] * 2, 1),
    "openbookqa": (["Bees make"] * 2, ["honey", "wax and noise"], 1),
    "siqa": (["Q: Ada fixed it. How is Ada?\nA:"] * 3, ["glad", "sad", "lost"], 2),
    "boolq": (["Ice is water.\nQuestion: is ice water?\nAnswer:"] * 2, ["no", "yes"], 1),
    "lambada": (["She gave the dog\n a"], ["bone"], 0),
}
WIKI = (" \n = Ash @-@ trees = \n \n The tree 's leaves ( green ) fall , \" slowly \" . \n = = Uses = = \n \n 1 @,@ 000"
        " N tools \n = Oak = \n \n It stands . \n")


def write_rows(folder, name, *rows):
    (folder / benchmarks.TASKS[name].file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", PUBLIC)
def test_a_row_of_the_public_file_becomes_a_question(name, tmp_path):
    assert benchmarks.read(name, write_rows(tmp_path, name, PUBLIC[name])) == [benchmarks.Row(*QUESTIONS[name])]
    if name in FLAT:
        row, = benchmarks.read(name, write_rows(tmp_path, name, FLAT[name]))
        assert (row.choices, row.gold) == QUESTIONS[name][1:]
        assert row.contexts[0] == FLAT[name].get("query", QUESTIONS[name][0][0])


def test_a_page_of_wikitext_begins_at_a_heading_of_the_first_level():
    """Words and bytes are counted in the raw text, before punctuation is joined."""
    first, second = benchmarks.pages(WIKI)
    assert first.text == ' = Ash-trees =\n\nThe tree\'s leaves (green) fall, "slowly".\n== Uses ==\n\n1,000 1 tools '
    raw = WIKI.split(" = Oak")[0].removeprefix(" \n")[:-1]
    assert first.words == len(raw.split()) + 2 and first.bytes == len(raw)
    assert second.text == " = Oak =\n\nIt stands.\n" and second.words == 6 + 2


def test_files_of_a_folder_are_unpacked_copied_and_counted(tmp_path, capsys):
    source, out = write_rows(tmp_path, "boolq", PUBLIC["boolq"], PUBLIC["boolq"]), tmp_path / "out"
    row = json.dumps(PUBLIC["piqa"]).encode() + b"\n"
    (source / "piqa_valid.jsonl.gz").write_bytes(gzip.compress(row))
    for tasks in (["--tasks=piqa,boolq"], []):
        benchmarks.main([*tasks, f"--source={source}", f"--out_dir={out}"])
        assert_says("piqa_valid.jsonl: 1 rows of 1,838\n.*boolq_valid.jsonl: 2 rows of 3,270", capsys.readouterr().out)
    assert (out / "piqa_valid.jsonl").read_bytes() == row and len(benchmarks.read("piqa", out)) == 1
    assert benchmarks.task_names("all") == list(benchmarks.TASKS)


@pytest.fixture
def fetch(server, tmp_path, monkeypatch):
    """Offers a file, by its zip's members or its whole content, and fetches it into tmp_path/new."""
    def call(name, content, known=None, **task):
        if isinstance(content, dict):
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as archive:
                for member, text in content.items():
                    archive.writestr(member, text)
            content = packed.getvalue()
        server.files["it"] = content
        changed = benchmarks.TASKS[name]._replace(**{"url": server.url + "/it"} | task)
        monkeypatch.setitem(benchmarks.TASKS, name, changed)
        if known:
            monkeypatch.setitem(benchmarks.KNOWN, name, (len(content), known))
        benchmarks.fetch(name, tmp_path / "new")
        return benchmarks.read(name, tmp_path / "new")
    (tmp_path / "new").mkdir()
    return call


def test_a_zip_is_read_in_parts_and_labels_are_joined(fetch, server, tmp_path):
    rows = [{key: value for key, value in PUBLIC["piqa"].items() if key != "label"}] * 3
    found = fetch("piqa", {"corpus": bytes(1 << 22), "d/dev.jsonl": "\n".join(map(json.dumps, rows)),
                           "d/dev-labels.lst": "0\n1\n1\n"}, rows=3, members=("d/dev.jsonl", "d/dev-labels.lst"))
    assert [row.gold for row in found] == [0, 1, 1] and sum(sent for _, _, sent in server.asked) < 1 << 20
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["piqa_valid.jsonl"]


def test_a_file_is_kept_only_if_it_is_the_public_one(fetch, tmp_path):
    content, boolq = json.dumps(PUBLIC["lambada"]).encode() + b"\n", {"BoolQ/val.jsonl": json.dumps(PUBLIC["boolq"])}
    for says, name, *args in (
            ("lambada: the fetched file is not the public one", "lambada", content, "0" * 64),
            ("boolq: the fetched file has 1 rows, the public one 3,270", "boolq", boolq),
            ("boolq could not be fetched from", "boolq", b"no zip")):
        with pytest.raises(ValueError, match=says):
            fetch(name, *args)
    with pytest.raises(ValueError, match="boolq could not be fetched.*(404|Not Found).*--source"):
        fetch("boolq", boolq, url=benchmarks.TASKS["boolq"].url + "/gone.zip")
    assert list((tmp_path / "new").iterdir()) == []
    assert len(fetch("lambada", content, hashlib.sha256(content).hexdigest(), rows=1)) == 1
