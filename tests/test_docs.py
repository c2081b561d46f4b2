"""README and docs/: every command passes the real parsers, every link leads somewhere, quoted code is the file's, and
tables have the numbers of results/."""
import argparse
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, needs_triton

import attention
import mixers
from common.flags import fields_of, given_flags, with_recipe
from evals.ledger.book import CLAIMS, verdicts_of
from evals.ledger.claim import VERDICTS
from model import GPTConfig

PAGES = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
         for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
_spec = importlib.util.spec_from_file_location("tables", ROOT / "docs/tables.py")
_spec.loader.exec_module(tables := importlib.util.module_from_spec(_spec))
READERS_OWN = ("squared", "--attn=average", "--pos=log")               # what a reader adds, which does not exist


def unrolled(line):
    """What a shell's loop in one line runs: its body with each of the words."""
    loop = re.fullmatch(r"for (\w+) in (.*?); do (.*); done", line)
    return [loop[3].replace(f"${loop[1]}", word) for word in loop[2].split()] if loop else [line]


def lines_of(page):
    """The shell lines of a page: of its sh blocks, and of code in its text that starts python or torchrun."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", page, re.S)).replace("\\\n", " ").splitlines()
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    quoted = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)
              if re.match(r"([A-Z_]+=\S+ )*(python|torchrun) ", code)]
    return [line for loop in blocks for line in unrolled(loop)] + quoted


def commands_of(page):
    """(script, arguments) of every command that starts a script of ours. Placeholders such as ... and FILE stay out."""
    for line in lines_of(page):
        words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
        for command in " ".join(map(shlex.quote, words)).replace("'&&'", "&&").split(" && "):
            words = [word.rstrip(";") for word in shlex.split(command)]
            scripts = [i for i, word in enumerate(words) if word.endswith(".py") and "=" not in word]
            if "-m" in words or not scripts or "..." in command:
                continue
            arguments = [word for word in words[scripts[0] + 1:] if word not in ("done", "")]
            for variable, value in (("$attn", "elastic"), ("$seed", "1")):      # what a shell loop puts there
                arguments = [word.replace(variable, value) for word in arguments]
            if "-h" not in arguments and not any(name in " ".join(arguments) for name in READERS_OWN):
                yield words[scripts[0]], arguments


COMMANDS = sorted({(script, *arguments) for page in PAGES.values() for script, arguments in commands_of(page)})


class Parsed(Exception):
    """Raised in place of what a command would do next."""


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_passes_its_parser(command, monkeypatch, capsys):
    script, *arguments = command
    parse = argparse.ArgumentParser.parse_known_args

    def parse_only(parser, args=None, namespace=None):
        found, unknown = parse(parser, args, namespace)
        if unknown:
            parser.error(f"unknown: {unknown}")
        raise Parsed(found)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_only)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    try:
        with pytest.raises(Parsed) as stop:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit:
        pytest.fail(capsys.readouterr().err)
    found = stop.value.args[0]
    for name in getattr(found, "attn", None) and found.attn.split(",") or ():
        assert name == "all" or name in attention.ATTENTIONS
    if script == "train.py":                        # the recipe and its axes go together
        GPTConfig(**fields_of(GPTConfig, with_recipe({"vocab_size": 1}, given_flags(found, GPTConfig),
                                                     attention.ATTENTIONS, mixers.DEFAULTS)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in PAGES if re.match(r"docs/\d", page)])
def test_the_commands_of_a_chapter_run_one_after_another(page, tmp_path, monkeypatch):
    """As a reader would type them, with few steps. Left out: those that need public weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    few = {"train.py": ["--max_iters=4", "--eval_interval=2", "--eval_iters=1", "--log_interval=1", "--warmup_iters=1"]}
    blocks = "".join(re.findall(r"```sh\n.*?```\n", PAGES[page], re.S))
    for script, arguments in commands_of(blocks):
        if "smollm2" not in " ".join(arguments):
            arguments = [re.sub(r"--windows=\d+", "--windows=8", word) for word in arguments]
            monkeypatch.setattr(sys, "argv", [script, *arguments, *few.get(script, [])])
            try:
                runpy.run_path(str(ROOT / script), run_name="__main__")
            except SystemExit as stop:
                assert not stop.code, arguments


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_picture_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            place = (ROOT / page).parent / path if path else ROOT / page
            assert place.exists(), target
            headings = re.findall(r"^#+ (.*)", place.read_text(encoding="utf-8"), re.M) if anchor else []
            anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("page", PAGES)
def test_quoted_code_is_the_files_own(page):
    """A block that names its file, ```python FILE, is a part of it. Docstrings may be left out."""
    for file, code in re.findall(r"```python (\S+)\n(.*?)```", PAGES[page], re.S):
        source = (ROOT / file).read_text(encoding="utf-8")
        without_docstrings = re.sub(r' *"""(?:.|\n)*?"""\n', "", source)
        assert code in source or code in without_docstrings, code


@needs_triton
def test_the_readers_own_rule_works(tmp_path):
    """README's card of a rule, with its kernel of docs/add-your-own.md, put among the others: the recipe trains, and
    its kernel equals the block loop."""
    card, = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.S)
    kernel = re.findall(r"```python\n(.*?)```", PAGES["docs/add-your-own.md"], re.S)[0]
    card, _, entry = card.partition("ATTENTIONS = {..., ")
    source = (ROOT / "attention.py").read_text(encoding="utf-8")
    above = re.search("# -+ the recipes\n", source)[0]
    source = source.replace(above, card + kernel + "\n" + above, 1)
    source = source.replace("ATTENTIONS = {\n", f"ATTENTIONS = {{\n    {entry.strip()[:-1]},\n", 1)
    (tmp_path / "attention.py").write_text(source, encoding="utf-8")
    program = f"""
import sys, torch
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
import attention, model
found = []
for kernel in ("torch", "triton"):
    config = model.GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=9, attn="squared", kernel=kernel)
    gpt, idx = model.GPT(config), torch.arange(17)[None] % 9
    gpt(idx[:, :-1], idx[:, 1:])[1].backward()
    found.append(gpt.transformer.h[0].attn.c_attn.weight.grad)
assert found[0].abs().sum() > 0 and torch.allclose(found[0], found[-1], rtol=1e-4, atol=1e-7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
def test_the_readers_own_position_instrument_and_mixer_work(tmp_path, data):
    """Those of docs/add-your-own.md, in a copy of the repository, as the page says where they belong."""
    for folder in ("", "axes", "common", "data", "evals", "evals/ledger", "mixers", "pretrained", "training"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for file in (ROOT / folder).glob("*.py"):
            shutil.copy(file, tmp_path / folder)
    *_, position, instrument, row, mixer, entry, recipe = re.findall(
        r"```python\n(.*?)```", PAGES["docs/add-your-own.md"], re.S)
    (tmp_path / "evals/ends.py").write_text(instrument, encoding="utf-8")
    (tmp_path / "mixers/average.py").write_text(mixer, encoding="utf-8")
    for file, old, new in (
            ("axes/positions.py", "WITHOUT_BIAS = ", f"{position}\nWITHOUT_BIAS = "),
            ("eval.py", "    curve,\n", "    curve,\n    ends,\n"),
            ("eval.py", "OF_A_RUN = {", f"OF_A_RUN = {{\n{row}"),
            ("mixers/__init__.py", "from mixers.focus", "from mixers.average import Average\nfrom mixers.focus"),
            ("mixers/__init__.py", "Selection}", f"Selection,\n{entry}}}"),
            ("attention.py", "    # fewer keys", f"{recipe}    # fewer keys")):
        source = (tmp_path / file).read_text(encoding="utf-8")
        (tmp_path / file).write_text(source.replace(old, new, 1), encoding="utf-8")
    small = (f"--dataset={data} --n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=2 --max_iters=2 "
             "--eval_interval=2 --eval_iters=1 --device=cpu")
    commands = (f"train.py {small} --attn=elastic --pos=log --out_dir=out/log", "eval.py ends --out_dir=out/log",
                f"train.py {small} --attn=average --out_dir=out/average",
                "eval.py probe --out_dir=out/average --windows=4", "eval.py sample --out_dir=out/average --tokens=4")
    for command in commands:
        done = subprocess.run([sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_no_reference_page_is_left_out():
    written = "docs/gpu.md"                         # by `eval.py speed --everything`, on a machine with a GPU
    assert all(page in ("README.md", written) or f"({page})" in PAGES["README.md"] for page in PAGES)


def test_variants_has_a_row_for_every_recipe():
    """In docs/variants.md, each name in ATTENTIONS is the first cell of exactly one row, as `name`."""
    names = re.findall(r"^\| `(\w+)` \|", PAGES["docs/variants.md"], re.M)
    assert sorted(names) == sorted(attention.ATTENTIONS)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_have_the_numbers_of_their_results(page):
    """If not, run python docs/tables.py."""
    text = page.read_text(encoding="utf-8")
    assert tables.rewritten(text) == text


@pytest.mark.parametrize("page", PAGES)
def test_verdicts_are_those_of_the_ledger(page):
    """Where a page says that a claim agrees, contradicts or is mixed, the ledger does, as written or in a set-up."""
    found = json.loads((ROOT / "results/claims.json").read_text(encoding="utf-8"))["claims"]
    text = " ".join(PAGES[page].split())
    said = re.findall(r"`([\w-]+)`,? (?:is )?(agrees|contradicts|mixed|not testable)\b", text)
    for name, verdict in [pair for pair in said if pair[0] in CLAIMS]:
        assert verdict in verdicts_of(CLAIMS[name], found.get(name, {})).values(), name
    verdicts = [verdicts_of(claim, found.get(name, {}))[""] for name, claim in CLAIMS.items()]
    count = {verdict: verdicts.count(verdict) for verdict in VERDICTS}
    header = re.escape(f"| {' | '.join(VERDICTS)} |")
    for counts in re.findall(header + r" [-|]+ \|((?: \d+ \|)+)", text):
        assert [int(n) for n in re.findall(r"\d+", counts)] == [*count.values()]
    for counts in re.findall(r"We tested (\d+): (\d+) hold, (\d+) fail, (\d+) are mixed, and (\d+) could not be", text):
        assert [int(n) for n in counts] == [len(CLAIMS) - count["not run here"], *(
            count[verdict] for verdict in ("agrees", "contradicts", "mixed", "not testable"))]
