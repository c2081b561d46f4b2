"""The house as docs/add-your-own.md draws it: who imports whom."""

import ast
import io
import re
import sys
import tokenize

import pytest
from conftest import ROOT

FOLDERS = ("evals", "mixers", "axes", "common", "data", "pretrained")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (
        *ROOT.glob("*.py"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")),
    )
}


def imported(path):
    """The modules that a file imports, as dotted names: data.files, model, ..."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def module_of(wanted):  # mixers.recurrent rather than mixers, which holds it
    return max(
        (name for name in FILES if f"{wanted}.".startswith(f"{name}.")), key=len, default=None
    )


# {module: the modules of this repository that it imports}; evals.probe is a module, and so is model
IMPORTS = {
    module: {module_of(wanted) for wanted in imported(path)} - {module, None}
    for module, path in FILES.items()
}


def room(module):  # its file or folder
    return module.split(".")[0]


def test_the_diagram_shows_all_imports():
    page = (ROOT / "docs/add-your-own.md").read_text(encoding="utf-8")
    arrows = re.findall(
        r"^ *(\w+)(?:\[.*?\])? --> (.*)$", re.search(r"```mermaid\n(.*?)```", page, re.S)[1], re.M
    )
    drawn = {
        (start, re.match(r"\w+", end)[0]) for start, ends in arrows for end in ends.split(" & ")
    }
    assert drawn == {
        (room(a), room(b)) for a, targets in IMPORTS.items() for b in targets if room(a) != room(b)
    }


def test_no_module_imports_itself_through_others():
    left = IMPORTS
    while left:
        free = [module for module, targets in left.items() if not targets & left.keys()]
        assert free, f"these import each other: {sorted(left)}"
        left = {module: targets for module, targets in left.items() if module not in free}


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
def test_common_comes_before_torch_as_it_sets_how_threads_wait(script):
    installed = (
        name
        for name in imported(ROOT / script)
        if name.split(".")[0] not in sys.stdlib_module_names
    )
    assert next(installed).split(".")[0] == "common"


def test_nothing_imports_train_or_eval_only_kernels_triton_and_data_only_files_and_flags():
    """data/ and a part of common/ are below the model: a data set is made, and a file written,
    without it. kernels.py needs no more than common/cpp.py."""
    # {module: what it may import of other rooms}
    below = {f"common.{name}": set() for name in ("cpp", "files", "flags", "machine", "runs")}
    below |= {"kernels": {"common.cpp"}, "data": {"common.files", "common.flags"}}
    for module, targets in IMPORTS.items():
        assert not targets & {"train", "eval"}, module
        assert ("triton" in map(room, imported(FILES[module]))) == (module == "kernels"), module
        others = {target for target in targets if room(target) != room(module)}
        assert others <= below.get(module, below.get(room(module), others)), module


# tokens that the Python of each room may have, without comments, docstrings and blank lines. Longer
# lines save none. The five files are the room without a name. A change that needs more says so here
CEILINGS = {
    "": 32_950,
    "axes": 8_200,
    "mixers": 22_800,
    "common": 11_900,
    "data": 8_350,
    "docs": 1_100,
    "pretrained": 5_300,
    "evals": 44_850,
    "tests": 99_200,
}
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.COMMENT,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def tokens_of(path):
    """The line of each token of a file. A string is one token."""
    text = path.read_text(encoding="utf-8")
    docstrings = set()  # their lines
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines, inside = [], 0  # an f-string, of which Python 3.12 and later also return the parts
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if not inside and token.type not in LAYOUT and token.start[0] not in docstrings:
            lines.append(token.start[0])
        name = tokenize.tok_name[token.type]
        inside += (name == "FSTRING_START") - (name == "FSTRING_END")
    return lines


@pytest.mark.parametrize("room", CEILINGS)
def test_no_room_grows_beyond_its_ceiling_or_becomes_dense(room):
    """At most 11 tokens a line of code. docs/sink.py is set by hand, in 80 lines."""
    files = ROOT.glob("*.py") if room == "" else (ROOT / room).rglob("*.py")
    found = list(map(tokens_of, files))
    count = sum(map(len, found))
    assert count <= CEILINGS[room]
    assert room == "docs" or count <= 11 * sum(len(set(lines)) for lines in found)


def test_the_walk_in_cpp_stays_short():
    """At most 350 lines of code, without comments and blank lines, of 100 characters."""
    lines = (ROOT / "kernels.cpp").read_text(encoding="utf-8").splitlines()
    assert sum(bool(line.split("//")[0].strip()) for line in lines) <= 350
    assert max(map(len, lines)) <= 100
