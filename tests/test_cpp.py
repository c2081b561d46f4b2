"""kernels.cpp against tests/reference.py in float64, how a rule is translated, and how it is
built."""

import copy
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial

import pytest
import torch
from bounds import close, same
from conftest import ROOT, assert_close_runs, assert_same_run, by_default, examples, train_here
from conftest import train as train_process
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import layer, normal, with_gradients
from torch.utils.checkpoint import checkpoint

import attention
import kernels
from common import cpp

pytest.importorskip("triton")
from test_kernels import CALLS, RULES, check, draw, outputs_and_gradients  # noqa: E402

pytestmark = pytest.mark.usefixtures("poison")
tl = cpp.tl
attend = partial(kernels.attend, cpp=True)


@st.composite
def calls(draw):
    """A call in float32, of any width, perhaps longer than a task of kernels.cpp, with any number
    of heads that share keys and values."""
    call = draw(CALLS)
    call["dtype"] = kernels.torch.float32
    lengths = (45, 1, 2, 31, 32, 33, 64, 65, 130, 530) + (1030,) * (examples(1) > 1)  # with --all
    call["T"] = draw(st.sampled_from(lengths), "T")
    for name in ("D", "E"):
        call[name] = draw(st.sampled_from((24, 1, 3, 16, 32, 33, 64, 256, 300)), name)
    call["heads"] = draw(st.sampled_from(((1, 4, 2, 1), (2, 2, 2, 2), (1, 6, 2, 3), (2, 4, 1, 2))))
    call["window"] = draw(st.sampled_from((0, 17, 1, 100)))
    call["first"] = draw(st.sampled_from((0, 3, 70)))
    return call


@pytest.mark.parametrize("rule", RULES)
@given(calls(), st.data())
@settings(max_examples=examples(2))
def test_every_rule_equals_the_reference_in_outputs_and_all_gradients(rule, call, draws):
    check(rule, call, draws, cpp=True)


# ------------------------------------------------------------------------------------- the numbers

PACKS = torch.tensor([[0] * 100 + [100] * 500 + [600] * 1500]).expand(2, -1)  # of 2,100 tokens
LONG = [  # several tasks of KEYS keys and of ROWS rows
    ("softmax", {}),
    ("elastic", dict(H=1, W=50, tail=True, slope=True, window=600, first=70)),
    ("entmax", dict(B=2, H=6, Hk=2, Hv=3, starts=PACKS)),
    ("tra", dict(H=4, W=20, mix=(1, 2, 1), window=1030)),
]


@pytest.mark.parametrize("rule, options", LONG)
def test_two_runs_and_any_number_of_threads_agree_bit_for_bit(rule, options):
    x, options = draw(rule, T=2100, D=8, **options)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(outputs_and_gradients(attend, rule, x, options))
            same(found[-1], found[0])
    finally:
        torch.set_num_threads(before)


def test_a_call_leaves_nothing_in_the_memory_that_the_next_one_takes_over():
    """Wide heads, and a width that no tile of the Triton kernels holds."""
    for rule, options in (("elastic", {}), ("entmax", {}), ("tra", dict(mix=(1,), Hv=1))):
        x, more = draw(rule, T=45, D=9, E=5, **options)
        before = outputs_and_gradients(attend, rule, x, more)
        large, wide = draw(rule, T=1100, D=300, E=70, **options)
        large = {name: part * math.nan for name, part in large.items()}
        outputs_and_gradients(attend, rule, large, wide)
        same(outputs_and_gradients(attend, rule, x, more), before)


@pytest.mark.parametrize(
    "part, rows", [("q", range(100, 101)), ("k", range(100, 140)), ("v", range(96, 192))]
)
def test_a_nan_reaches_the_rows_that_see_it_and_at_most_the_rest_of_their_blocks(part, rows):
    """One at place 100, with a window of 40 keys. A block has 32 rows, and its product with the
    values multiplies a hidden NaN by 0."""
    x, options = draw("softmax", T=200, window=40)
    expected, _ = attend("softmax", **x, **options)
    x[part][:, :, 100] = math.nan
    found, _ = attend("softmax", **x, **options)
    own = torch.isin(torch.arange(200), torch.tensor(rows))
    assert found[:, :, own].isnan().all()
    same(found[:, :, ~own], expected[:, :, ~own])


def test_the_gradients_of_elastic_are_0_where_all_weights_equal_the_threshold():
    x, options = draw("elastic", T=130, D=3, scores="equal")
    x["t"] = 1 / torch.arange(1.0, 131)
    upstream = [torch.ones(1, 2, 130, 3), torch.zeros(1, 2, 130)]
    found = outputs_and_gradients(attend, "elastic", x, options, upstream)
    assert not any(found[name].any() for name in ("dq", "dk", "dt"))


@pytest.mark.parametrize("attn", ["lazy", by_default(False, "tda")])
def test_a_layer_runs_in_checkpoints_copies_compiled_and_without_gradients(attn):
    module = layer(attn, torch.float32, kernel="cpp")
    x = normal(2, 40, 32, dtype=torch.float32)
    parameters = [*module.parameters()]
    expected = with_gradients(module, [x], parameters)
    again = with_gradients(partial(checkpoint, module, use_reentrant=False), [x], parameters)
    same(again, expected)
    with torch.no_grad():
        same([module(x), copy.deepcopy(module)(x)], expected[:1] * 2)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    close(with_gradients(compiled, [x], parameters), expected)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once: use --kernel=torch"):
        slope.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        low = module(x)
    assert low.dtype == torch.bfloat16
    close(low.float(), expected[0], dtype=torch.bfloat16)
    close(copy.deepcopy(module).double()(x.double()), expected[0])  # by the block loop


@pytest.mark.parametrize("attn", ["elastic", by_default(False, "tda")])
def test_a_run_resumes_bit_for_bit(attn, tmp_path, data, capsys):
    flags = f"--dataset={data} --attn={attn} --block_size=70 --lr_decay_iters=8".split()
    whole, part = f"--out_dir={tmp_path / 'whole'}", f"--out_dir={tmp_path / 'part'}"
    train_here(whole, *flags)
    train_here(part, *flags, "--max_iters=4")
    train_here(part, "--init_from=resume", "--max_iters=8")
    assert_same_run(tmp_path / "part", tmp_path / "whole")
    assert capsys.readouterr().out.count("computed by cpp\n") == 3


# ---------------------------------------------------------------------------------- the translation


def translated(function):
    """The C++ of a function of s."""
    return cpp.translated("void f(V s)", function, "s", ["w ="])


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda s: tl.erf(s), "'tl' has no attribute 'erf'"),
        (lambda s: s.to(tl.float32), "no attribute 'to'"),
        (lambda s: s if s > 0 else -s, "Python's if"),
        (lambda s: tl.where(0 < s < 1, s, 0.0), "and"),
        (lambda s: tl.where(not s > 0, s, 0.0), "not"),
        (lambda s: min(s, 0.0), "min"),
        (lambda s: abs(s), r"abs\(\)"),
        (lambda s: s**2, r"\*\*"),
        (lambda s: s // 2, "//"),
        (lambda s: s * (s > 0), "comparison cannot"),
        (lambda s: s == 0, "comparison cannot"),
        (lambda s: tl.where(s, s, 0.0), "number cannot"),
        (lambda s: s & 1, "number cannot"),
        (lambda s: (s, s), "argument"),
    ],
)
def test_what_cannot_be_translated_is_named_in_one_line(function, reason):
    with pytest.raises(ValueError, match=f"^<lambda> cannot be written in C\\+\\+: .*{reason}.*$"):
        translated(function)


LN2 = kernels.LN2


def formulas(s):
    return (
        tl.exp2(s) - tl.exp(-s / 9),
        tl.log(tl.abs(s)) + 2 * tl.log2(s * s + 1),
        tl.sigmoid(s),
        LN2 * tl.maximum(s, -s) + tl.minimum(s / 2, s) - 1 / s,
        tl.where(~(s > 0.5) & (s != -1) | (s == 3), 1 - s, s / 3),
        tl.where((s >= 3) | (s <= -1), 0.0, float("inf")),
    )


def formula_number_t(s, r, t, power):
    w = s
    for n, value in enumerate(formulas(s)):
        w = tl.where(t == n, value, w)
    return w, w, w


def test_translated_functions_equal_those_of_torch(monkeypatch):
    """Also at 0, infinity and NaN, and where exponentials overflow."""
    own = kernels.Kernel(formula_number_t, lambda s, r, t, power, g, delta: (g, g), takes_t=True)
    monkeypatch.setitem(kernels.KERNELS, "own", own)
    special = [0.0, 1, -1, 3, math.inf, -math.inf, math.nan, 1e30, -1e30, 127.7, -150]
    s = torch.cat([torch.tensor(special), 10 * torch.randn(100)])
    one = torch.ones(6 * len(s), 1, 1, 1)
    t = torch.arange(6).repeat_interleave(len(s)).view(-1, 1, 1)
    found, _ = attend("own", s.repeat(6).view_as(one), one, one, t)

    monkeypatch.setitem(globals(), "tl", torch)
    monkeypatch.setitem(globals(), "LN2", math.log(2))
    found, expected = found.flatten(), torch.cat(formulas(s))
    finite = expected.isfinite()
    same(found[~finite], expected[~finite])
    error = (found - expected) / (1 + expected.abs())
    close(error[finite], torch.zeros_like(error[finite]), size=1.0)


# ------------------------------------------------------------------------------------- the building

# as a process: build a library, or load it, and call its function
ANSWER = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from common import cpp
print(cpp.built('extern "C" int answer() {{ return 42; }}', ["g++", "-fPIC"]).answer())
"""


def test_a_library_is_built_once_by_any_number_of_processes_and_again_if_it_was_cut(tmp_path):
    how = {"env": os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, "stdout": subprocess.PIPE}

    def answers(count):
        """Those of this many processes at once, and then the only file."""
        running = [subprocess.Popen([sys.executable, "-c", ANSWER], **how) for _ in range(count)]
        assert [process.communicate()[0] for process in running] == [b"42\n"] * count
        (file,) = (tmp_path / "nanoattention").iterdir()
        return file

    file = answers(3)
    whole, built = file.read_bytes(), file.stat().st_mtime_ns
    assert answers(1).stat().st_mtime_ns == built
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert answers(1).read_bytes() == whole


def someone_elses(path):
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    "make, fits",
    [
        (lambda path: None, True),
        (lambda path: path.mkdir(mode=0o700), True),
        (lambda path: (path.mkdir(), path.chmod(0o770)), False),
        (lambda path: path.touch(), False),
        (lambda path: path.symlink_to(path.parent), False),
        pytest.param(
            someone_elses, False, marks=pytest.mark.skipif(os.getuid() > 0, reason="needs root")
        ),
    ],
)
def test_libraries_are_kept_in_a_folder_that_is_ours_alone_or_among_temporary_files(
    make, fits, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o700)
    usual, other = tmp_path / "nanoattention", tmp_path / f"nanoattention-{os.getuid()}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make(usual)
    assert cpp.folder.__wrapped__() == (usual if fits else other)
    assert (usual if fits else other).stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "here")  # a relative one is ignored, as its standard says
    assert cpp.folder.__wrapped__() == other


@pytest.mark.parametrize(
    "case, runs",
    [
        ("no compiler", r"torch \(not cpp: there is no compiler: install g\+\+ or clang\+\+\)"),
        by_default(False, "it fails", r"torch \(not cpp: \S+/g\+\+ failed: fatal error: broken\)"),
        by_default(False, "nothing writable", r"torch \(not cpp: neither \S+ nor .*\)"),
        by_default(False, "no home", "cpp"),
    ],
)
def test_a_run_names_what_computes_it_and_why_it_is_not_cpp(case, runs, tmp_path, data):
    env = os.environ | {"TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    compiler = tmp_path / "g++"
    if case == "it fails":
        compiler.write_text("#!/bin/sh\necho 'a note\nfatal error: broken\nmore' >&2\nexit 1\n")
        compiler.chmod(0o700)
    if case in ("no compiler", "it fails"):
        env["PATH"] = str(tmp_path)
    else:  # not even root can make a folder there
        env |= {"XDG_CACHE_HOME": "/dev/null", "HOME": "/dev/null"}
    temporary = tmp_path / f"nanoattention-{os.getuid()}"
    if case == "nothing writable":
        temporary.touch()
    said = train_process(tmp_path / "run", data, "--attn=elastic", env=env)
    assert re.search(rf"computed by {runs}\n", said.stdout), said.stdout
    assert "error" not in said.stderr.lower()
    assert runs != "cpp" or len([*temporary.iterdir()]) == 1


def test_a_rule_whose_pytorch_function_was_edited_differs_from_its_kernel(monkeypatch):
    def differ():
        with torch.autocast("cpu"):
            return [
                n for n in attention.RULES if attention.kernel_differs.__wrapped__(n, powers.get(n))
            ]

    powers = {"entmax": 2.0, "tra": 2.0, "lssar": 15.0}
    assert not differ()
    edited = {"weights": lambda s, seen, t: s.relu() * seen + 0.01 * seen}
    monkeypatch.setitem(attention.RULES, "relu", replace(attention.RULES["relu"], **edited))
    assert differ() == ["relu"]


@pytest.mark.exhaustive
def test_two_ranks_train_like_one(tmp_path, data):
    """They build the library at once."""
    flags = ["--attn=elastic", "--gradient_accumulation_steps=2", "--learning_rate=3e-5"]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    for ranks in (1, 2):
        train_process(tmp_path / str(ranks), data, *flags, ranks=ranks, env=env)
    assert_close_runs(tmp_path / "2", tmp_path / "1")
