"""Shared by all tests: small data sets and runs, functions that run scripts in this process or a
new one, --all."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be set before triton is imported

import bounds  # noqa: E402

import attention  # noqa: E402
import kernels  # noqa: E402
import mixers  # noqa: E402
from common import files  # noqa: E402
from data import tokens  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_start():
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(bounds.SEED)
    np.random.seed(bounds.SEED)


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="run every case of every recipe, kernel and choice, and draw "
        "ten times as many cases of each property, as .ci/run does",
    )
    parser.addoption(
        "--threads",
        type=int,
        default=1,
        help="of each process; the models here are too small for more",
    )
    parser.addoption(
        "--margins", action="store_true", help="print the twenty comparisons closest to their bound"
    )


def examples(count):
    """How many cases a property draws: count, or ten times as many with --all."""
    return count * hypothesis.settings.default.max_examples // 20


def pytest_configure(config):
    # --hypothesis-seed draws other cases, and other random inputs in all tests. Without it, every
    # run draws the same
    seed = config.getoption("--hypothesis-seed")
    bounds.SEED = int(seed or 0)
    hypothesis.settings.register_profile(
        "nano",
        max_examples=200 if config.getoption("--all") else 20,
        derandomize=seed is None,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("nano")
    torch.set_num_threads(config.getoption("--threads"))
    # Processes that tests start get the same number of threads. In this process, set_num_threads
    # also stops MKL from using fewer threads than asked for. With fewer, MKL splits products
    # differently, and sums differ in the last bit
    os.environ |= {"OMP_NUM_THREADS": str(config.getoption("--threads")), "MKL_DYNAMIC": "FALSE"}
    config.addinivalue_line(
        "markers", "exhaustive: a case that the default cases represent; run with --all"
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture
def poison():
    """Fill every torch.empty with NaN: an element that a kernel forgets to write stays NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.randn(3).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch):
    """The block loop takes 16 rows at a time. 45 rows are three blocks, which the backward pass
    computes again."""
    monkeypatch.setattr(kernels, "BLOCK", 16)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Attach the largest share of a bound that a test used to its report."""
    bounds.shares.clear()
    try:
        return (yield)
    finally:
        item.user_properties += [("share", max(bounds.shares))] if bounds.shares else []


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--margins"):
        return
    stats = terminalreporter.stats
    found = []
    for report in stats.get("passed", []) + stats.get("failed", []):
        if share := dict(report.user_properties).get("share"):
            found.append((*share, report.nodeid))
    terminalreporter.section(f"the largest errors of {len(found)} tests, as shares of their bounds")
    for share, line, test in sorted(found, reverse=True)[:20]:
        terminalreporter.write_line(f"{share:.3f}  {line:<28} {test}")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(not kernels.AVAILABLE, reason="no triton here")


def by_default(chosen, *values):
    """A test parameter of one or several values. If it is not chosen, it runs only with --all."""
    return pytest.param(*values, marks=() if chosen else pytest.mark.exhaustive)


# the default recipes of tests with many cases. They cover every rule of scores and every axis
FEW = """
    softmax ssmax kv_bias sink_token v_bias gated streaming gpt_oss diff dex elastic lazy
    asentmax sparsemax lssar softpick rela_gated diff_rela tra sigmoid_norm elu_norm linear
    mlp_norm focus sparq magicpig retnet gated_deltanet ttt
""".split()


def some_recipes(*names, among=tuple(attention.ATTENTIONS)):
    """All recipes as test parameters. Those not named here run only with --all."""
    return [by_default(name in names, name) for name in among]


RECIPES = some_recipes(*FEW, among=mixers.trained_recipes())
# one recipe for each kind of cache, for tests of whole models
CACHES = some_recipes(
    "softmax", "sink_token", "streaming", "focus", "gated_deltanet", "sparq", "quest", "magicpig"
)

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. "
WORDS = np.frombuffer((TEXT * 300).encode(), np.uint8)  # the same 300 times, as byte ids


def write_data(folder, train, val):
    """A data set from two arrays of bytes."""
    shards = {}
    for name, ids in (("train.bin", train), ("val.bin", val)):
        shard = tokens.write_shard(folder / name, [np.asarray(ids)])
        shards[name] = shard | {"bytes": len(ids)}
    meta = {"dataset": folder.name, "tokenizer": "bytes", "vocab_size": 257, "shards": shards}
    files.write_json(folder / "meta.json", meta)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """One sentence repeated: 20,000 bytes to train on, 4,000 held out."""
    return write_data(tmp_path_factory.mktemp("data") / "fox", WORDS[:20000], WORDS[20000:24000])


def data_script(name, *flags):
    """Run a script of data/ in this process. Returns what it prints to stdout."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [str(ROOT / "data" / f"{name}.py"), *map(str, flags)])
        runpy.run_path(sys.argv[0], run_name="__main__")
    return out.getvalue()


@pytest.fixture(scope="session")
def backcopy(tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / "backcopy"
    data_script("backcopy", f"--out_dir={out}", "--sequences=2000", "--val_sequences=200")
    return out


SPECIAL = ("<|end|>", "<|im_end|>")  # ids 0 and 1


def byte_pairs(sentence=TEXT, first=0, specials=SPECIAL):
    """A small BPE tokenizer of the package tokenizers, trained on a sentence. With first > 0 it has
    no merges, and its ids for bytes begin at first."""
    lib = pytest.importorskip("tokenizers", reason="needs the package tokenizers")
    alphabet = sorted(lib.pre_tokenizers.ByteLevel.alphabet())
    model = lib.models.BPE()
    if first:
        model = lib.models.BPE({letter: first + i for i, letter in enumerate(alphabet)}, [])
    coder = lib.Tokenizer(model)
    coder.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = lib.decoders.ByteLevel()
    if not first:
        trainer = lib.trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=list(specials),
            initial_alphabet=alphabet,
            show_progress=False,
        )
        coder.train_from_iterator([sentence], trainer)
    return coder


def write_tokenizer(folder, coder=None, **meta):
    """A folder with a tokenizer.json. With entries in `meta` it also has a meta.json, as a run
    does."""
    folder.mkdir(parents=True, exist_ok=True)
    (coder or byte_pairs()).save(str(folder / "tokenizer.json"))
    if meta:
        files.write_json(folder / "meta.json", meta)
    return folder


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "toy"
    return write_tokenizer(folder, tokenizer="toy", separator=0)


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory, toy):
    """A data set of 30 documents in the tokenizer "toy"."""
    out = tmp_path_factory.mktemp("data") / "foxes"
    coder = tokens.tokenizer(str(toy))
    ids = {
        "train": tokens.encode_all(coder, [TEXT * 9] * 20),
        "val": tokens.encode_all(coder, [TEXT * 9] * 10),
    }
    tokens.write_data_set(out, coder, ids, dataset="foxes")
    return out


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory, toy_data):
    """A finished run on that data set."""
    out = tmp_path_factory.mktemp("toy_run")
    train_here(f"--dataset={toy_data}", f"--out_dir={out}")
    return out


@torch.no_grad()
def enliven(gpt):
    """Make weights larger than their initial values, so that attention matters."""
    for p in gpt.parameters():
        p.mul_(4.0 if p.dim() > 1 else 0.7)


TINY = tuple(
    """
    --n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --max_iters=8
    --eval_interval=4 --log_interval=1 --eval_iters=1 --warmup_iters=2
    --device=cpu --dtype=float32
    """.split()
)


def train_here(*flags):
    """Train in this process, which is cheaper than a new one. A new run gets the flags of TINY,
    then these."""
    import train

    new = () if any(str(flag).startswith("--init_from") for flag in flags) else TINY
    with pytest.raises(SystemExit) as stop:
        train.main([*new, *map(str, flags)])
    assert stop.value.code == 0


@pytest.fixture
def trainings(monkeypatch):
    """The flags of each process of train.py that the code under test started. It trains silently in
    this process."""
    process = subprocess.run
    asked = []

    def run_here(argv, **how):
        if Path(argv[1]).name != "train.py":
            return process(argv, **how)
        asked.append(argv[2:])
        with contextlib.redirect_stdout(io.StringIO()):
            train_here(*argv[2:])
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(subprocess, "run", run_here)
    return asked


def command(*args, ranks=1):
    """The argv of a script of this repository: command("train.py", "--attn=elastic")."""
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [sys.executable, *launcher, str(ROOT / args[0]), *map(str, args[1:])]


def run(*args, ranks=1, ok=True, **kwargs):
    """Run a script as a real process to its end. With `ok` a failure fails the test and shows what
    was printed."""
    kwargs |= {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command(*args, ranks=ranks), **kwargs)
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done


def train(out_dir, data, *flags, **kwargs):
    """Train a tiny model on a data set, as a real process. Flags given here override those of
    TINY."""
    return run("train.py", *TINY, f"--dataset={data}", f"--out_dir={out_dir}", *flags, **kwargs)


@pytest.fixture
def evaluate(capsys):
    """Run an instrument of eval.py in this process: evaluate("loss", "--windows=4") returns what
    --json prints."""

    def call(instrument, *flags):
        import eval

        capsys.readouterr()
        eval.main([instrument, "--json", "--device=cpu", *map(str, flags)])
        return json.loads(capsys.readouterr().out)

    return call


def complain(main, capsys, *argv):
    """Call a script's main with arguments that it must refuse. Returns its exit code and its one
    line on stderr."""
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in argv])
    err = capsys.readouterr().err
    assert isinstance(stop.value.code, int) and stop.value.code != 0
    assert err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err, err
    return stop.value.code, err


def assert_says(pattern, line):
    assert re.search(pattern, line), line


FILES = ("ckpt.pt", "log.csv", "meta.json")  # of a run


@pytest.fixture(scope="session")
def elastic_run(tmp_path_factory, data):
    """A finished run of 8 steps with --attn=elastic, for tests that only read it."""
    out = tmp_path_factory.mktemp("elastic_run")
    train_here(f"--dataset={data}", f"--out_dir={out}", "--attn=elastic", "--dropout=0.1")
    return out


@pytest.fixture
def copy(elastic_run, tmp_path):
    """A copy of the finished elastic run, which a test may change."""
    return shutil.copytree(elastic_run, tmp_path / "copy")


def log_rows(out_dir):
    """The log's columns that do not depend on the clock, as text."""
    return [line.split(",")[:5] for line in (out_dir / "log.csv").read_text().splitlines()]


def losses(out_dir):
    return np.array([float(row[1]) for row in log_rows(out_dir)[1:]])


def weights(out_dir):
    return torch.load(out_dir / "ckpt.pt", weights_only=True)["model"]


def assert_same_run(found, expected):
    """Two runs have the same log, except for times, and the same weights, bit for bit."""
    assert log_rows(found) == log_rows(expected)
    bounds.same(weights(found), weights(expected))


def assert_close_runs(found, expected):
    """Two runs that sum the same gradients in another order have the same losses and weights up to
    rounding."""
    bounds.close(losses(found), losses(expected), terms=16, dtype=torch.float32)
    bounds.close(weights(found), weights(expected), terms=16, size=1.0)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def meta(out_dir):
    return json.loads((out_dir / "meta.json").read_text())


def tiny_config(**choices):
    from model import GPTConfig

    sizes = {"block_size": 16, "vocab_size": 31, "n_layer": 1, "n_head": 2, "n_embd": 16}
    return GPTConfig(**sizes | choices)
