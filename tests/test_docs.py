"""README, docs/ and the pages of results/: every command passes the real parsers, every link leads
somewhere, quoted code is the file's."""

import argparse
import ast
import importlib.util
import json
import math
import re
import runpy
import shlex
import shutil
import sys

import pytest
import torch
from bounds import below
from conftest import ROOT, TINY, by_default, needs_triton, run
from layers import normal

import attention
from common.flags import fields_of, given_flags
from common.resolve import resolve
from evals.board import RECIPES
from model import GPTConfig

PAGES = {
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "results").glob("*.md")),
        ROOT / "results/claims/README.md",
    )
}
OF_CLAIMS = {  # their commands are those of commit 55b941e
    str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
    for page in sorted((ROOT / "results/claims").glob("*.md"))
}
READERS_OWN = ("squared", "--attn=average", "--pos=log")  # what a reader adds, which does not exist


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


sink = script("sink")


def commands_of(page):
    """(script, arguments) of every command in a page that starts a script of ours: in its sh
    blocks, and in code of its text that starts python or torchrun. Placeholders such as ... and
    FILE stay out."""

    def unrolled(loop):
        name, words, body = loop.groups()
        return "\n".join(body.replace(f"${name}", word) for word in words.split())

    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.S)).replace("\\\n", " ")
    blocks = re.sub(r"^for (\w+) in (.*?); do (.*); done$", unrolled, blocks, flags=re.M)
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    quoted = re.findall(r"`((?:[A-Z_]+=\S+ )*(?:python|torchrun) [^`]+)`", text)
    lines = blocks.splitlines() + [" ".join(code.split()) for code in quoted]
    for command in (command.split(" > ")[0] for line in lines for command in line.split(" && ")):
        if ".py" not in command:
            continue
        words = shlex.split(command, comments=True)
        words = [word.rstrip(";") for word in words if not re.match(r"[A-Z_]+=|(done)?;?$", word)]
        scripts = [i for i, word in enumerate(words) if word.endswith(".py") and "=" not in word]
        if "-m" in words or "-h" in words or not scripts or "..." in command:
            continue
        script, *arguments = words[scripts[0] :]
        # what a shell loop of several lines puts there
        arguments = [a.replace("$attn", "elastic").replace("$seed", "1") for a in arguments]
        arguments = [a.replace("$resume", "--init_from=resume") for a in arguments]
        if not any(name in " ".join(arguments) for name in READERS_OWN):
            yield script, *arguments


SCRIPT = f"```sh\n{(ROOT / 'evals/everything.sh').read_text(encoding='utf-8')}```"
PAPERS = {*commands_of(PAGES["docs/papers.md"])}  # test_papers.py runs them
COMMANDS = {command for page in (*PAGES.values(), SCRIPT) for command in commands_of(page)}


@pytest.mark.parametrize(
    "command", [by_default(c not in PAPERS, c) for c in sorted(COMMANDS)], ids=" ".join
)
def test_every_command_passes_its_parser_and_writes_over_no_tracked_file(
    command, monkeypatch, capsys
):
    """Whoever types the commands of these pages still has a clean clone: they write to out/."""
    script, *arguments = command
    flags = dict(re.findall(r"--(\w+)=(\S+)", " ".join(command)))
    for name in {"png", "html", "out", "out_dir", "results"} & flags.keys():
        assert flags[name].strip("'").startswith(("out/", "data/")), name
    if "lab" in command and "attn" not in flags:  # otherwise it writes to results/
        assert "results" in flags
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(parser, args=None, namespace=None):
        found, unknown = parse(parser, args, namespace)
        if unknown:
            parser.error(f"unknown: {unknown}")
        raise StopIteration(found)  # in place of what the command would do next

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except StopIteration as stop:
        found = stop.value
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    for name in getattr(found, "attn", None) and found.attn.split(",") or ():
        assert name == "all" or name in attention.ATTENTIONS or name in RECIPES
    if script == "train.py":  # the recipe and its axes go together
        given = given_flags(found, GPTConfig)
        knobs, _ = resolve({}, given)
        GPTConfig(**fields_of(GPTConfig, {"vocab_size": 1} | knobs))


@pytest.mark.parametrize("page", PAGES | OF_CLAIMS)
def test_every_link_and_picture_leads_somewhere(page):
    """README links every page of docs/."""
    assert not page.startswith("docs/") or f"({page})" in PAGES["README.md"]
    text = re.sub(r"```.*?```", "", (PAGES | OF_CLAIMS)[page], flags=re.S)
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        place = (ROOT / page).parent / path if path else ROOT / page
        assert place.exists(), path
        if anchor:
            target = place.read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.*)", target, re.M)
            words = [re.sub(r"[^\w -]", "", line).lower() for line in headings]
            named = re.findall(r'<a id="(.*?)"></a>', target)
            assert anchor in [*named, *(line.replace(" ", "-") for line in words)]


@pytest.mark.parametrize("page", PAGES)
def test_quoted_code_is_the_files_own(page):
    """A block that names its file, ```python FILE, is a part of it. Docstrings may be left out."""
    for file, code in re.findall(r"```python (\S+)\n(.*?)```", PAGES[page], re.S):
        source = (ROOT / file).read_text(encoding="utf-8")
        without_docstrings = re.sub(r' *"""(?:.|\n)*?"""\n', "", source)
        assert code in source or code in without_docstrings, code


def with_additions(folder, *additions):
    """Copy the repository's code to a folder. additions: (file, pattern, the text to insert where
    it matches)."""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), ROOT / "kernels.cpp"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(path, copy)
    for file, where, new in additions:
        source = (folder / file).read_text(encoding="utf-8")
        source, count = re.subn(where, lambda place, new=new: new + place[0], source)
        assert count == 1, where
        (folder / file).write_text(source, encoding="utf-8")


OWN_PAGE = re.findall(r"```python\n(.*?)```", PAGES["docs/add-your-own.md"], re.S)


@needs_triton
def test_the_readers_own_rule_works(tmp_path):
    """README's card, with its kernel of docs/add-your-own.md: the recipe trains, and the kernel
    equals the loop, in Triton and in C++."""
    (card,) = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.S)
    card, _, entry = card.partition("ATTENTIONS = {..., ")
    with_additions(
        tmp_path,
        ("attention.py", "# -+ the recipes\n", f"{card}{OWN_PAGE[0]}\n"),
        ("attention.py", r"(?<=\nATTENTIONS = {\n)", f"    {entry.strip()[:-1]},\n"),
    )
    (tmp_path / "program.py").write_text("""
import torch, model
found = []
for kernel in ("torch", "triton", "cpp"):
    sizes = dict(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=9)
    gpt = model.GPT(model.GPTConfig(**sizes, attn="squared", kernel=kernel))
    idx = torch.arange(17)[None] % 9
    gpt(idx[:, :-1], idx[:, 1:])[1].backward()
    found.append(gpt.transformer.h[0].attn.c_attn.weight.grad)
assert found[0].abs().sum() > 0
for other in found[1:]:
    torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-7)
""")
    run(tmp_path / "program.py")


@pytest.mark.exhaustive
def test_the_readers_own_position_instrument_and_mixer_work(tmp_path, data):
    """Those of docs/add-your-own.md, in a copy of the repository, as the page says where they
    belong."""
    *_, position, instrument, row, mixer, entry, recipe = OWN_PAGE
    with_additions(
        tmp_path,
        ("axes/positions.py", "WITHOUT_BIAS = ", f"{position}\n"),
        ("eval.py", "    curve,\n", "    ends,\n"),
        ("eval.py", "(?<=\nOF_A_RUN = {)", f"\n{row}"),
        ("attention.py", "    # fewer visible keys", recipe),
        ("mixers/__init__.py", "from mixers.focus", "from mixers.average import Average\n"),
        ("mixers/__init__.py", "(?<=Selection,\n)}", entry),
    )
    (tmp_path / "evals/ends.py").write_text(instrument, encoding="utf-8")
    (tmp_path / "mixers/average.py").write_text(mixer, encoding="utf-8")
    new = (*TINY, f"--dataset={data}")
    for command in (
        ("train.py", *new, "--attn=elastic", "--pos=log"),
        ("eval.py", "ends"),
        ("train.py", *new, "--attn=average"),
        ("eval.py", "probe", "--windows=4"),
        ("eval.py", "sample", "--tokens=4"),
    ):
        run(tmp_path / command[0], *command[1:], "--out_dir=out/own", cwd=tmp_path)


SNIPPETS = {  # blocks that a reader pastes into python; tests run those of another page
    f"{page} {number}": block
    for page, text in PAGES.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.S))
    if block.startswith(("import ", "from ")) and "own" not in page
}


@pytest.mark.parametrize("snippet", [by_default("smollm2" not in name, name) for name in SNIPPETS])
def test_snippets_run_or_if_they_need_a_run_or_a_download_import_what_exists(
    snippet, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    tree = ast.parse(SNIPPETS[snippet])
    if re.search(r"OpenedRun|load_run|from_pretrained|torch.load", SNIPPETS[snippet]):
        tree.body = [line for line in tree.body if isinstance(line, ast.Import | ast.ImportFrom)]
    exec(compile(tree, snippet, "exec"), {})


def test_the_gradients_of_chapter_2_are_those_of_autograd(capsys):
    page = PAGES["docs/2-spending-less.md"]
    (block,) = re.findall(r"```python\n([^`]*autograd.*?)```", page, re.S)
    exec(block, {})
    assert capsys.readouterr().out == "True True\n"


def test_variants_has_a_row_for_every_recipe():
    names = re.findall(r"^\| `(\w+)` \|", PAGES["docs/variants.md"], re.M)
    assert sorted(names) == sorted(attention.ATTENTIONS)


VERDICTS = {}
for claims in (ROOT / "results/claims").glob("*.md"):
    text = claims.read_text(encoding="utf-8")
    VERDICTS |= re.findall(r"^## ([\w-]+)\n\n\*\*([\w ]+)\*\*", text, re.M)


def test_the_list_of_verdicts_is_that_of_the_claims_own_pages():
    page = (ROOT / "results/claims/README.md").read_text(encoding="utf-8")
    lists = re.findall(r"^\*\*([\w ]+)\*\* \(\d+\): ((?:.+\n)+)", page, re.M)
    found = {name: verdict for verdict, names in lists for name in re.findall(r"\[(.+?)\]", names)}
    assert found == VERDICTS


@pytest.mark.parametrize("page", PAGES)
def test_verdicts_are_those_of_the_claims_own_pages(page):
    """Where a page says that a claim agrees, contradicts or is mixed, its section in results/claims
    does."""
    verdict = r"`([\w-]+)`,? (?:is )?(agrees|contradicts|mixed|not testable)\b"
    assert len(VERDICTS) == 76
    for name, said in re.findall(verdict, " ".join(PAGES[page].split())):
        assert said == VERDICTS.get(name, said), name


@pytest.mark.parametrize(
    "rule, least, most",
    [by_default(True, "softmax", 0.8, 1.0), by_default(False, "elastic", 0.0, 0.05)],
)
def test_the_essence_grows_a_sink_with_softmax_and_none_with_elastic(rule, least, most, capsys):
    """Both models solve the task. The whole file has 80 lines at most."""
    sink.main(rule, 0)
    said = capsys.readouterr().out
    found = re.findall(r"idle rows: ([\d.]+) on the first token, ([\d.]+) in all", said)
    first, spent = map(float, found[0])
    assert least <= first <= most and first <= spent <= 1
    assert float(re.findall(r"loss of copy rows: ([\d.]+)", said)[0]) < 0.2
    dark = [line[5] in "#@" for line in said.splitlines() if line.startswith("idle ")]
    share = sum(dark) / len(dark)  # of the first column
    assert share > 0.8 if rule == "softmax" else share < 0.1
    assert len((ROOT / "docs/sink.py").read_text(encoding="utf-8").splitlines()) <= 80


def test_the_essences_rules_are_those_of_attention():
    s = normal(2, sink.T, sink.T)
    seen = torch.ones(sink.T, sink.T, dtype=torch.bool).tril()
    n = sink.COUNT[:, None].double()
    row_inputs = {"elastic": 0.7 / n, "sigmoid": torch.full_like(n, math.log(sink.T))}
    for name, rule in sink.RULES.items():
        expected = attention.RULES[name].weights(s, seen, row_inputs.get(name))
        found = rule(s.masked_fill(~seen, -1e9), seen, 0.7 / n)
        # attention.py adds 1e-8 to softpick's divisor, which is above 0.1 here
        below((found - expected).abs(), 1e-7 if name == "softpick" else 1e-14)


@pytest.mark.exhaustive
def test_the_notebook_runs_the_essence_and_its_outputs_are_those_it_shows(capsys):
    """Its code is that of sink.py. Torch versions round differently."""
    cells = json.loads((ROOT / "docs/sink.ipynb").read_text(encoding="utf-8"))["cells"]
    source = (ROOT / "docs/sink.py").read_text(encoding="utf-8")
    names, known = {}, 0
    for cell in cells:
        code, shown = "".join(cell["source"]), cell.get("outputs")
        if cell["cell_type"] != "code":
            continue
        known += sum(part in source for part in code.split("\n\n\n"))
        exec(code, names)
        found = re.findall(r"rows: ([\d.]+) on", capsys.readouterr().out)
        if shown:  # exercises show no output
            expected = re.findall(r"rows: ([\d.]+) on", "".join(shown[0]["text"]))
            assert [*map(float, found)] == pytest.approx([*map(float, expected)], abs=0.03)
    assert known >= 5  # imports, sizes and rules, the task, the model, training
