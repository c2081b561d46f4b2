"""The house as docs/add-your-own.md draws it: who imports whom."""
import ast

from conftest import ROOT

FOLDERS = ("evals", "training", "mixers", "axes", "common", "data", "pretrained")
FILES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]


def imported(path):
    """What a file imports, as dotted names of at most two parts: common.files, model, ..."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (".".join(f"{start}{name.name}".split(".")[:2]) for name in node.names)


def test_nothing_imports_train_or_eval_only_kernels_triton_and_data_only_files_and_flags():
    """data/ and common/ are below the model: a data set is made, and a file written, without it. data/weights.py is the
    command of pretrained/."""
    allowed = {"common": set(), "data": {"common.files", "common.flags"}}       # {folder: what it may import}
    for path in FILES:
        targets, room = set(imported(path)), path.relative_to(ROOT).parts[0]
        rooms = {target.split(".")[0] for target in targets}
        assert not rooms & {"train", "eval"} and "data.weights" not in targets, path
        assert ("triton" in rooms) == (path == ROOT / "kernels.py"), path
        if room in allowed and path != ROOT / "data/weights.py":
            ours = {*FOLDERS, *(file.stem for file in ROOT.glob("*.py"))} - {room}
            assert {target for target in targets if target.split(".")[0] in ours} <= allowed[room], path
