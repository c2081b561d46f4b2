"""A rule's Triton functions as C++, compiled into the walk of kernels.cpp.

A function of one tile, such as softmax_weigh, is called once with names in place of numbers. Each
operation on a name writes a line of C++, so the rule is written once. The compiler is g++ or
clang++. A library is built once for each rule, compiler and processor, in about two seconds, and
kept in a private folder.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import types
from functools import cache, partial
from pathlib import Path

# ------------------------------------------------------------------------------ a function in C++


# rows and keys of a tile, and keys of a task, of kernels.cpp
BM, BN, KEYS = 32, 64, 512


class Name:
    """A vector of floats (kind V) or a mask (M) in C++. Arithmetic with it writes a line into
    `lines`, and returns the name of the result. What is not defined here raises an error."""

    lines = []

    def __init__(self, code, kind="V"):
        self.code, self.kind = code, kind

    def __bool__(self):
        raise TypeError("Python's if, and, or, not, min and max cannot read a number of the tile")


def operation(text, kinds="VV", result="V"):
    """A function that writes a line: `text` of operands of these kinds."""

    def write(*operands):
        codes = [code_of(x, kind) for x, kind in zip(operands, kinds, strict=True)]
        name = f"x{len(Name.lines)}"
        Name.lines.append(f"const {result} {name} = {text.format(*codes)};")
        return Name(name, result)

    return write


def code_of(x, kind="V"):
    """A name of this kind, or a constant in every lane."""
    if getattr(x, "kind", "V") != kind:
        found = "number" if kind == "M" else "comparison"
        raise TypeError(f"a {found} cannot be used in this place")
    if isinstance(x, Name):
        return x.code
    number = float(getattr(x, "value", x))  # .value: of a tl.constexpr
    return f"splat({number!r}f)".replace("inff", "INFINITY").replace("nanf", "NAN")


for name, sign in {"add": "+", "sub": "-", "mul": "*", "truediv": "/"}.items():
    setattr(Name, f"__{name}__", operation(f"{{}} {sign} {{}}"))
    setattr(Name, f"__r{name}__", operation(f"{{1}} {sign} {{0}}"))
for name, sign in {"gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==", "ne": "!="}.items():
    setattr(Name, f"__{name}__", operation(f"{{}} {sign} {{}}", result="M"))
for name, sign in {"and": "&", "or": "|"}.items():
    setattr(Name, f"__{name}__", operation(f"{{}} {sign} {{}}", "MM", "M"))
Name.__neg__ = operation("-{}", "V")
Name.__invert__ = operation("~{}", "M", "M")


class tl:
    """What rules may use of triton.language."""

    exp2 = operation("exp2({})", "V")
    log2 = operation("log2({})", "V")
    exp = operation("exp2({} * 1.442695041f)", "V")
    log = operation("log2({}) * 0.693147181f", "V")
    sigmoid = operation("1 / (1 + exp2({} * -1.442695041f))", "V")
    abs = operation("abs({})", "V")
    where = operation("where({}, {}, {})", "MVV")
    maximum = operation("max({}, {})")
    minimum = operation("min({}, {})")
    constexpr = float


def first_line(said):
    """Of an error, or of what a compiler says."""
    return next((line.strip() for line in str(said).splitlines() if line.strip()), "")


def in_python(x, made):
    """A copy of a Triton function, and of those that it calls, as Python functions that use `tl`
    above. Anything else is returned as it is. made: {function: its copy}: some call themselves."""
    f = getattr(x, "fn", getattr(x, "value", x))  # .value: of a tl.constexpr
    if not isinstance(f, types.FunctionType):
        return f
    if f not in made:
        scope = {"__builtins__": __builtins__}
        made[f] = types.FunctionType(f.__code__, scope, f.__name__, f.__defaults__)
        for name in f.__code__.co_names:
            if name in f.__globals__:
                scope[name] = tl if name == "tl" else in_python(f.__globals__[name], made)
    return made[f]


def translated(head, f, names, outputs, **constants):
    """The C++ function `head`, which assigns f of the variables `names` to `outputs`. Raises
    ValueError where f does something that cannot be translated."""
    Name.lines = []
    try:
        results = in_python(f, {})(**{name: Name(name) for name in names.split()}, **constants)
        if not isinstance(results, tuple):
            results = (results,)
        lines = [f"{to} {code_of(x)};" for to, x in zip(outputs, results, strict=True)]
    except Exception as e:  # whatever Python raises there
        raise ValueError(f"{f.__name__} cannot be written in C++: {first_line(e)}") from e
    return "\n    ".join([f"{head} {{", *Name.lines, *lines]) + "\n}\n"


def rule_in_cpp(kernel, views):
    """The functions and constants of a Kernel."""
    floats = {"UNIT": kernel.unit, "FLOOR": kernel.floor}
    numbers = {
        "BM": BM,
        "BN": BN,
        "KEYS": KEYS,
        "VIEWS": views,
        "ONLINE": kernel.online,
        "PASSES": kernel.passes,
        "SETTLES": kernel.settle is not None,
        "PLAIN_SUM": kernel.plain_sum,
        "SAVE_U": kernel.save_u,
        "SKIP": kernel.skip,
    }
    parts = [f"constexpr float {name} = {value!r}f;\n" for name, value in floats.items()]
    parts += [f"constexpr int {name} = {int(value)};\n" for name, value in numbers.items()]
    one = partial(translated, power=kernel.power)
    lift = kernel.lift or (lambda s, t, power: s)
    settle = kernel.settle or (lambda r, t, power, sum_w, sum_z, FIRST: r)
    parts += [
        one("static inline V lift(V s, V t)", lift, "s t", ["return"]),
        one(
            "static inline void weigh(V s, V r, V t, V& w, V& z, V& u)",
            kernel.weigh,
            "s r t",
            ["w =", "z =", "u ="],
        ),
        one(
            "static inline void slope(V s, V r, V t, V g, V delta, V& ds, V& dt)",
            kernel.slope,
            "s r t g delta",
            ["ds =", "dt ="],
        ),
        "template <bool FIRST> V settle(V r, V t, V sum_w, V sum_z);\n",
    ]
    for first in (True, False):
        head = f"template <> inline V settle<{str(first).lower()}>(V r, V t, V sum_w, V sum_z)"
        parts.append(one(head, settle, "r t sum_w sum_z", ["return"], FIRST=first))
    return "".join(parts)


# ------------------------------------------------------------------------------------ the compiler

FLAGS = "-O3 -std=c++17 -fPIC -fno-math-errno -fno-trapping-math -w".split()
# With OpenMP the library uses the threads of torch, whose runtime is in the process already, so it
# is not linked. On Linux that is GCC's: what clang++ builds for another cannot be loaded there, and
# Apple's has none. Then the second attempt gives one thread
ATTEMPTS = (["-march=native", "-fopenmp"], ["-march=native"], ["-mcpu=native"])


def library(kernel, views=1):
    """The walk of a Kernel, for one or two views: a library with the functions forward(Call*) and
    backward(Call*). Raises ValueError that says in one line why there is none."""
    found = library_or_reason(kernel, views)
    if isinstance(found, str):
        raise ValueError(found)
    return found


@cache
def library_or_reason(kernel, views):
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
    if compiler is None:
        return "there is no compiler: install g++ or clang++"
    reasons = []
    try:
        walk = (Path(__file__).parent.parent / "kernels.cpp").read_text(encoding="utf-8")
        source = walk.replace("// RULE", rule_in_cpp(kernel, views))
        folder()  # raises its own error
        for flags in ATTEMPTS:
            try:
                return built(source, [compiler, *FLAGS, *flags])
            except (OSError, subprocess.CalledProcessError) as e:
                said = getattr(e, "stderr", None) or str(e)
                errors = [line for line in said.splitlines() if "error" in line]
                reasons.append(f"{compiler} failed: {first_line([*errors, said][0])}")
    except Exception as e:  # whatever it is, the block loop can train
        return first_line(e) or type(e).__name__
    return reasons[1]  # the first may only be that there is no OpenMP


def built(source, command):
    """The library that a compiler makes of the source: loaded, if an earlier process has built it.

    Several processes may build it at once: each has files of its own, and renames the result."""
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout
    name = digest("\n".join([source, *command, version, processor()]).encode())
    for file in folder().glob(f"{name}-*.so"):
        # a disk that was full or lost power may have cut the file. To load it would be a crash
        if file.stem == f"{name}-{digest(file.read_bytes())}":
            return ctypes.CDLL(str(file))
    with tempfile.TemporaryDirectory(dir=folder()) as own:
        text, part, whole = (Path(own) / name for name in ("a.cpp", "a.o", "a.so"))
        text.write_text(source, encoding="utf-8")
        for argv in [*command, "-c", text, "-o", part], [command[0], "-shared", part, "-o", whole]:
            subprocess.run(argv, check=True, capture_output=True, text=True)
        file = folder() / f"{name}-{digest(whole.read_bytes())}.so"
        os.replace(whole, file)
    return ctypes.CDLL(str(file))


def digest(content):
    return hashlib.sha256(content).hexdigest()[:24]


def processor():
    """What -march=native depends on: a home folder may serve several machines."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return f"{platform.machine()} {platform.processor()}"
    first = info.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in first if line.startswith(("model name", "flags", "Features")))


@cache
def folder():
    """The platform's cache folder for us, or if that cannot be used, one for temporary files. It
    must be ours alone: a library that others can write is not loaded. Raises OSError if there is
    none."""
    cache_home = "~/Library/Caches" if platform.system() == "Darwin" else "~/.cache"
    cache_home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or cache_home)
    usual = Path(cache_home) / "nanoattention"
    temporary = Path(tempfile.gettempdir()) / f"nanoattention-{os.getuid()}"
    for path in (usual, temporary):
        if not path.is_absolute():  # nobody's home
            continue
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = path.lstat()
        except OSError:
            continue
        private = stat.S_ISDIR(about.st_mode) and not about.st_mode & 0o077
        if private and about.st_uid == os.getuid() and os.access(path, os.W_OK):
            return path
    raise OSError(f"neither {usual} nor {temporary} is a folder that you alone can write")


# ---------------------------------------------------------------------------------------- a call


class Matrix(ctypes.Structure):
    """As in kernels.cpp."""

    _fields_ = [("at", ctypes.c_void_p)] + [
        (name, ctypes.c_long) for name in ("batch", "head", "row")
    ]


MATRICES = "q k v t mix r o u d_o dr dq dk dv dt dmix".split()
POINTERS = "table dtable ends sets alive".split()
NUMBERS = "B H heads GK GV G T D E ends_batch threads".split()


class Call(ctypes.Structure):
    """As in kernels.cpp."""

    _fields_ = [
        *((name, Matrix) for name in MATRICES),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_long) for name in NUMBERS),
        ("scale", ctypes.c_float),
    ]


def run(library, function, tensors, **numbers):
    """Call a function of a library. tensors: by name, float32, except `sets` (int64), `ends`
    (int32) and `alive` (int8); None or an empty one: absent."""
    call, kept = Call(**numbers), []
    for name, x in tensors.items():
        if x is None or not x.numel():
            continue
        if x.ndim == 4 and x.stride(3) != 1:
            x = x.contiguous()
        kept.append(x)  # until the call returns
        at = x.data_ptr()
        setattr(call, name, Matrix(at, *x.stride()[:3]) if name in MATRICES else at)
    getattr(library, function)(ctypes.byref(call))
