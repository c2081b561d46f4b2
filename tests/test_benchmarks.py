"""data/benchmarks.py: a row of each public file becomes a question, and the files are fetched."""
import gzip
import io
import json
import zipfile

import pytest
from conftest import ROOT, assert_says, run

from common import files
from data import benchmarks

# one invented row in the form of each public file, and the question that it becomes
PUBLIC = {
    "hellaswag": {"activity_label": "Baking", "ctx_a": "[header] A baker  kneads [title] dough.", "ctx_b": "the BAKER",
                  "endings": [" [step] sings. ", "flies [substeps] off.", "sits  down.", "eats."], "label": 3},
    "arc_easy": {"question": {"stem": "What is wet?", "choices": [{"text": "water", "label": "A"},
                                                                 {"text": "fire", "label": "B"}]}, "answerKey": "A"},
    "arc_challenge": {"question": {"stem": "Why?", "choices": [{"text": t, "label": str(i + 1)} for i, t in
                                                               enumerate(("so", "no", "yes"))]}, "answerKey": "3"},
    "piqa": {"goal": "Open a jar", "sol1": "turn it", "sol2": "eat it", "label": 0},
    "winogrande": {"sentence": "The cup was on the tray, so _ fell first.", "option1": "the cup", "option2": "the tray",
                   "answer": "2"},
    "openbookqa": {"question": {"stem": "Bees make", "choices": [{"text": "honey", "label": "A"},
                                                                {"text": "wax and noise", "label": "B"}]},
                   "answerKey": " B"},
    "siqa": {"context": "Ada fixed it.", "question": "How is Ada?", "answerA": "glad", "answerB": "sad",
             "answerC": "lost", "label": "3"},
    "boolq": {"passage": "Ice is water.", "question": "is ice water", "label": True},
    "lambada": {"text": "She gave the dog\n a bone"},
}
FLAT = {                                        # the same rows in another layout
    "hellaswag": {"query": "Baking: A  baker [is]", "choices": [" sings.", "flies off.", "sits down.", "eats."],
                  "gold": 3},
    "arc_easy": {"question": "What is wet?", "choices": ["water", "fire"], "gold": 0},
    "openbookqa": {"question_stem": "Bees make", "choices": ["honey", "wax and noise"], "gold": 1},
}
QUESTIONS = {
    "hellaswag": (["Baking: A baker kneads. dough. The baker"] * 4,
                  [" sings.", "flies off.", "sits down.", "eats."], 3),
    "arc_easy": (["Question: What is wet?\nAnswer:"] * 2, ["water", "fire"], 0),
    "arc_challenge": (["Question: Why?\nAnswer:"] * 3, ["so", "no", "yes"], 2),
    "piqa": (["Question: Open a jar\nAnswer:"] * 2, ["turn it", "eat it"], 0),
    "winogrande": (["The cup was on the tray, so the cup", "The cup was on the tray, so the tray"],
                   ["fell first."] * 2, 1),
    "openbookqa": (["Bees make"] * 2, ["honey", "wax and noise"], 1),
    "siqa": (["Q: Ada fixed it. How is Ada?\nA:"] * 3, ["glad", "sad", "lost"], 2),
    "boolq": (["Ice is water.\nQuestion: is ice water?\nAnswer:"] * 2, ["no", "yes"], 1),
    "lambada": (["She gave the dog\n a"], ["bone"], 0),
}
WIKI = (" \n = Ash @-@ trees = \n \n The tree 's leaves ( green ) fall , \" slowly \" . \n = = Uses = = \n \n 1 @,@ 000"
        " N tools \n = Oak = \n \n It stands . \n")


def write_rows(folder, name, *rows):
    folder.mkdir(exist_ok=True)
    (folder / benchmarks.TASKS[name].file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("name", PUBLIC)
def test_a_row_of_the_public_file_becomes_a_question(name, tmp_path):
    found = benchmarks.read(name, write_rows(tmp_path, name, PUBLIC[name]))
    assert found == [benchmarks.Row(*QUESTIONS[name])]


@pytest.mark.parametrize("name", FLAT)
def test_a_flat_row_becomes_the_same_question(name, tmp_path):
    """Converted copies of the public files have flat rows."""
    row, = benchmarks.read(name, write_rows(tmp_path, name, FLAT[name]))
    assert row.choices == QUESTIONS[name][1] and row.gold == QUESTIONS[name][2]
    assert row.contexts[0] == FLAT[name].get("query", QUESTIONS[name][0][0])


@pytest.mark.parametrize("text, clean", [
    (" one [title] two ", "one. two"), ("a [header] b", "a b"), ("a   b", "a  b"), ("[step] do [it] now", " do now")])
def test_text_is_cleaned_in_one_pass(text, clean):
    assert benchmarks.cleaned(text) == clean


def test_a_page_of_wikitext_begins_at_a_heading_of_the_first_level():
    """Words and bytes are counted in the raw text, before punctuation is joined."""
    first, second = benchmarks.pages(WIKI)
    assert first.text == (" = Ash-trees =\n\nThe tree's leaves (green) fall, \"slowly\".\n== Uses ==\n\n"
                          "1,000 1 tools ")
    raw = WIKI.split(" = Oak")[0].removeprefix(" \n")[:-1]
    assert first.words == len(raw.split()) + 2 and first.bytes == len(raw)
    assert second.text == " = Oak =\n\nIt stands.\n" and second.words == 6 + 2


def test_gzipped_files_are_read(tmp_path):
    with gzip.open(tmp_path / "piqa_valid.jsonl.gz", "wt") as f:
        f.write(json.dumps(PUBLIC["piqa"]) + "\n")
    assert len(benchmarks.read("piqa", tmp_path)) == 1


def test_the_name_all_means_every_task():
    assert benchmarks.task_names("all") == list(benchmarks.TASKS)


# ----------------------------------------------------------------------------------------- copying and fetching files


def test_files_of_a_folder_are_copied_and_counted(tmp_path, capsys):
    source = write_rows(tmp_path / "here", "piqa", PUBLIC["piqa"])
    write_rows(source, "boolq", PUBLIC["boolq"], PUBLIC["boolq"])
    benchmarks.main(["--tasks=piqa,boolq", f"--source={source}", f"--out_dir={tmp_path / 'out'}"])
    said = capsys.readouterr().out
    assert_says("piqa_valid.jsonl: 1 rows of 1,838\n.*boolq_valid.jsonl: 2 rows of 3,270", said)
    assert (tmp_path / "out" / "piqa_valid.jsonl").read_bytes() == (source / "piqa_valid.jsonl").read_bytes()
    benchmarks.main([f"--source={source}", f"--out_dir={tmp_path / 'out'}"])
    assert capsys.readouterr().out == said      # the default: the tasks whose files exist


def zipped(**members):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return content.getvalue()


def test_a_zip_is_read_in_parts_and_labels_are_joined(server, tmp_path, monkeypatch):
    rows = [{key: value for key, value in PUBLIC["piqa"].items() if key != "label"}] * 3
    server.files["it.zip"] = zipped(**{
        "corpus": bytes(1 << 22), "d/dev.jsonl": "\n".join(map(json.dumps, rows)), "d/dev-labels.lst": "0\n1\n1\n"})
    monkeypatch.setitem(benchmarks.TASKS, "piqa", benchmarks.TASKS["piqa"]._replace(
        rows=3, url=server.url + "/it.zip", members=("d/dev.jsonl", "d/dev-labels.lst")))
    benchmarks.fetch("piqa", tmp_path)
    assert [row.gold for row in benchmarks.read("piqa", tmp_path)] == [0, 1, 1]
    assert sum(sent for _, _, sent in server.asked) < 1 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["piqa_valid.jsonl"]


def test_a_plain_file_is_fetched_and_compared(server, tmp_path, monkeypatch):
    content = json.dumps(PUBLIC["lambada"]).encode() + b"\n"
    server.files["lambada"] = content
    monkeypatch.setitem(benchmarks.TASKS, "lambada", benchmarks.TASKS["lambada"]._replace(
        rows=1, url=server.url + "/lambada"))
    with pytest.raises(ValueError, match="lambada: the fetched file is not the public one"):
        monkeypatch.setitem(benchmarks.KNOWN, "lambada", (len(content), "0" * 64))
        benchmarks.fetch("lambada", tmp_path)
    (tmp_path / "right").write_bytes(content)
    monkeypatch.setitem(benchmarks.KNOWN, "lambada", (len(content), files.sha256(tmp_path / "right")))
    (tmp_path / "right").unlink()
    benchmarks.fetch("lambada", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lambada_openai_test.jsonl"]


def test_a_file_with_missing_rows_or_a_missing_file_is_refused(server, tmp_path, monkeypatch):
    server.files["it.zip"] = zipped(**{"BoolQ/val.jsonl": json.dumps(PUBLIC["boolq"]) + "\n"})
    monkeypatch.setitem(benchmarks.TASKS, "boolq", benchmarks.TASKS["boolq"]._replace(url=server.url + "/it.zip"))
    with pytest.raises(ValueError, match="boolq: the fetched file has 1 rows, the public one 3,270"):
        benchmarks.fetch("boolq", tmp_path)
    monkeypatch.setitem(benchmarks.TASKS, "boolq", benchmarks.TASKS["boolq"]._replace(url=server.url + "/gone.zip"))
    with pytest.raises(ValueError, match="boolq could not be fetched.*(404|Not Found).*--source"):
        benchmarks.fetch("boolq", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_the_help_of_the_script_lists_its_flags_and_tasks():
    done = run("data/benchmarks.py", "-h", cwd=ROOT.parent)
    assert "--source" in done.stdout and "winogrande" in done.stdout
