"""data/benchmarks.py: a row of each public file becomes a question, and the files are fetched."""
import hashlib
import io
import json
import zipfile

import pytest

from data import benchmarks


def exam(stem, key, **choices):
    choices = [{"text": text, "label": label} for label, text in choices.items()]
    return {"question": {"stem": stem, "choices": choices}, "answerKey": key}


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
    found, = benchmarks.read(name, write_rows(tmp_path, name, PUBLIC[name]))
    assert tuple(found) == QUESTIONS[name]


def test_a_page_of_wikitext_begins_at_a_heading_of_the_first_level():
    """Words and bytes are counted in the raw text, before punctuation is joined."""
    first, second = benchmarks.pages(WIKI)
    assert first.text == ' = Ash-trees =\n\nThe tree\'s leaves (green) fall, "slowly".\n== Uses ==\n\n1,000 1 tools '
    raw = WIKI.split(" = Oak")[0].removeprefix(" \n")[:-1]
    assert first.words == len(raw.split()) + 2 and first.bytes == len(raw)
    assert second.text == " = Oak =\n\nIt stands.\n" and second.words == 6 + 2


def zipped(members):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return packed.getvalue()


@pytest.fixture
def fetch(server, tmp_path, monkeypatch):
    """Offers a file and fetches it."""
    def call(name, content, place="/it", **task):
        server.files["it"] = content
        monkeypatch.setitem(benchmarks.TASKS, name, benchmarks.TASKS[name]._replace(url=server.url + place, **task))
        benchmarks.fetch(name, tmp_path)
        return benchmarks.read(name, tmp_path)
    return call


def test_a_zip_is_read_in_parts_and_labels_are_joined(fetch, server, tmp_path):
    rows = [{key: value for key, value in PUBLIC["piqa"].items() if key != "label"}] * 3
    content = zipped({"corpus": bytes(1 << 22), "rows": "\n".join(map(json.dumps, rows)), "labels": "0\n1\n1\n"})
    found = fetch("piqa", content, rows=3, members=("rows", "labels"))
    assert [row.gold for row in found] == [0, 1, 1] and sum(sent for _, _, sent in server.asked) < 1 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["piqa_valid.jsonl"]


def test_a_file_is_kept_only_if_it_is_the_public_one(fetch, tmp_path):
    line, boolq = json.dumps(PUBLIC["lambada"]).encode(), zipped({"BoolQ/val.jsonl": json.dumps(PUBLIC["boolq"])})
    for says, *args in (
            ("lambada: the fetched file is not the public one", "lambada", line),
            ("boolq: the fetched file is not the public one .it has 1 rows of 3,270", "boolq", boolq),
            ("boolq could not be fetched from", "boolq", b"no zip"),
            ("boolq could not be fetched.*(404|Not Found).*--source", "boolq", boolq, "/gone.zip")):
        with pytest.raises(ValueError, match=says):
            fetch(*args)
    assert list(tmp_path.iterdir()) == []
    assert len(fetch("lambada", line, rows=1, sha256=hashlib.sha256(line).hexdigest())) == 1
