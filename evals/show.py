"""A recipe on one page: its choices, the rule in PyTorch and in Triton, its learned parameters, and where the code is.

    python eval.py show elastic                     the page
    python eval.py show elastic --diff=softmax      differences from another recipe: + marks elastic's line, - softmax's
    python eval.py show --out_dir=out/smollm2       the recipe of a run, with its sizes and the origin of its weights
    python eval.py show elastic --out_dir=out/smollm2   another recipe with the sizes of that run

The page is assembled from the code itself, so it is never out of date. Read a formula, its PyTorch line and its Triton
line one below the other, then open the files at the lines it names.
"""
import dataclasses
import difflib
import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch.nn as nn

import attention
import mixers
import kernels
from axes import rows
from axes.positions import Distance
from axes.sight import visible
from common.flags import Knobs, knob
from common.runs import ROOT, read_run
from evals.instrument import model_config

WIDTH = 110
# a pass through a layer: (axis, the field of its row that holds a function). AROUND: the code that calls the function
PASS = [("conv", "convolved"), ("qk_norm", "normed"), ("feature", "mapped"), ("scale", "factor"), ("pos", "bias"),
        ("forget", "log_forget"), ("write", "write_factor"), ("rule", "inputs"), ("rule", "row_input"),
        ("rule", "start"), ("rule", "weights"), ("rule", "chunk"), ("rule", "after"), ("normalize", "divisor"),
        ("sink", "score"), ("sink", "value"), ("diff", "mix"), ("value_bias", "corrected"), ("dex", "corrected"),
        ("exclude", "corrected"), ("out_norm", "normed"), ("diff", "after"), ("gate", "gated")]
AROUND = {("normalize", "divisor"): rows.share_of_keys, ("sink", "score"): rows.share_of_keys,
          ("sink", "value"): rows.normalised_output, ("diff", "mix"): attention.Attention.attend,
          ("pos", "bias"): Distance}
SHOWN = ("layers", "n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "block_size", "vocab_size", "rope_base",
         "rope_scaling")
SIZES = {"n_layer": 1, "n_head": 4, "n_embd": 128, "block_size": 256, "vocab_size": 257}


@dataclass
class Show(Knobs):
    """Flags of show"""
    recipe: str = knob("", "the recipe; default: elastic, or with --out_dir the run's own",
                       ("", *attention.ATTENTIONS), positional=True)
    diff: str = knob("", "mark the differences from this recipe", ("", *attention.ATTENTIONS))
    out_dir: str = knob("", "use the sizes of this run")
    json: bool = knob(False, "print JSON instead of a page")


def command(args, run):
    """A recipe as one page: its axes, PyTorch, Triton, learned parameters, and where the code is."""
    meta = read_run(args.out_dir)[0] if args.out_dir else None
    period = 1 if args.recipe or not meta else len(model_config(meta["knobs"], {}).kinds)
    pages = [page_of(args.recipe, meta, layer) for layer in range(period)]
    numbers = {"layers": [numbers for numbers, _ in pages]} if period > 1 else pages[0][0]
    text = "\n\n".join(dict.fromkeys(text for _, text in pages))
    if args.diff:
        changes = difflib.ndiff(page_of(args.diff, meta)[1].splitlines(), text.splitlines())
        text = "\n".join(line.rstrip() for line in changes if not line.startswith("?"))
    return numbers, text


def page_of(name, meta=None, number=0):
    """The page of a recipe as numbers for JSON and as text, built as layer `number` of a model. meta: the meta.json of
    a run. Then the page has the run's sizes, and its layer's recipe if the name is empty."""
    whole = model_config(meta["knobs"] if meta else SIZES | {"attn": "elastic"}, {"attn": name} if name else {})
    config, sections = whole.kinds[number], {}
    layer = mixers.layer_of(config, number)
    code = Path(attention.__file__).read_text(encoding="utf-8")         # the recipe's row, and its line
    row = re.search(rf'^ *"{config.attn}": {{.*?}},( *#[^\n]*)?$', code, re.M | re.S)
    where = f"attention.py:{code.count(chr(10), 0, row.start()) + 1}    {' '.join(map(str.strip, row[0].splitlines()))}"
    axes = {axis: getattr(config, axis) for axis in mixers.DEFAULTS}
    functions = {(axis, part): f for axis, part in PASS for choice in [layer.choices.get(axis)]
                 if (f := getattr(choice, part, None)) is not getattr(type(choice), part, None)}
    called, fused = pytorch_of(layer, functions), triton_of(layer)
    numbers = {"recipe": config.attn, "where": where, "axes": axes, "args": layer.args,
               "learns": {name: list(p.shape) for name, p in layer.named_parameters()},
               "pytorch": {f.__name__: place(f) for f in called}, "triton": {f.__name__: place(f) for _, f in fused}}
    if meta:
        sizes = {name: getattr(whole, name) for name in SHOWN} | {"head_dim": config.head_width}
        numbers |= {"sizes": sizes, "source": meta.get("source")}
        meanings = {field.name: re.split("[;:] ", field.metadata["help"])[0] for field in dataclasses.fields(config)}
        sections["the run"] = [entry(name, f"{value:.10g}" if isinstance(value, float) else str(value) or "none",
                                     meanings[name]) for name, value in sizes.items()]
        knobs, given = meta["knobs"], numbers["source"]
        weights = f"trained on {knobs.get('dataset')}, from {knobs.get('init_from', 'scratch')}"
        if given:                               # public weights
            weights = (f"{given['name']}, from {given['from']}, in {given['precision']}"
                       f"{', instruction-tuned' * given['instruction_tuned']}; "
                       f"licence: {given['licence'] or 'not stated'}")
        sections["the run"].append(entry("weights", weights))
    sections |= {"its choices": choices(layer, axes, functions),
                 "in PyTorch": "\n\n".join(map(source, called)).splitlines(),
                 "in Triton": "\n\n".join(source(function, role) for role, function in fused).splitlines()
                              or ["this rule has no kernel: PyTorch computes it everywhere"],
                 "what a layer learns": learned(layer)}
    lines = [f"{config.attn}    {where}"]
    for title, part in sections.items():
        lines += ["", f"---- {title} ".ljust(WIDTH, "-"), *part]
    return numbers, "\n".join(lines)


def entry(name, *parts):
    """A line of three columns, or of two. A long text continues below its own column."""
    line = f"{name:12} " + " ".join(f"{part!s:10}" for part in parts)
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * (2 + 11 * len(parts)))


def choices(layer, axes, functions):
    """A line for the rule, the positions, each axis that the recipe names, and each that differs from its default: the
    value and the first sentence of its function's docstring. The mixer's other axes share the last line."""
    lines, usual, own = [], [], ("rule", "pos", *attention.ATTENTIONS[layer.config.attn])
    for axis, value in axes.items():
        if value == mixers.DEFAULTS[axis] and axis not in own:
            usual += [f"{axis} {value}"] * (axis in layer.axes or axis in layer.numbers)
            continue
        function = next((f for (of, part), f in functions.items()
                         if of == axis and part not in ("inputs", "row_input", "start")), None)
        text = function and inspect.getdoc(getattr(function, "func", function)) or ""
        lines.append(entry(axis, value, re.split(r"\n\n|(?<=[a-z\])])\. ", text)[0].replace("\n", " ")))
    if layer.args:
        lines.append(f"{'attn_args':12} " + ",".join(f"{key}={value}" for key, value in layer.args.items()))
    return [*lines, entry("as usual", ", ".join(usual))]


def pytorch_of(layer, functions):
    """The functions of every choice, in the order of a pass through the layer."""
    found, plain = [], type(layer).attend is attention.Attention.attend
    for choice, function in functions.items():
        found += [function, *called_by(function), *([AROUND[choice]] if plain and choice in AROUND else [])]
    found += [visible, attention.Attention.projected] if layer.config.window else []
    return list(dict.fromkeys(found))


def called_by(function):
    """The functions of its own file that a mixer's function calls, directly or not. (attention.py has too many.)"""
    if not inspect.isfunction(function) or not function.__module__.startswith("mixers."):
        return []
    names = (function.__globals__.get(name) for name in function.__code__.co_names)
    others = [other for other in names if inspect.isfunction(other) and other.__module__ == function.__module__]
    return [deeper for other in others if other is not function for deeper in (other, *called_by(other))]


def triton_of(layer):
    """[(role, function)] of the kernel's rule; first those of a kernel whose result it needs."""
    found = [("a state", getattr(function, "fn", function)) for function in layer.fused_by]
    for name in filter(None, (getattr(layer.rule, "threshold_of", None), layer.config.rule)):
        rule = kernels.KERNELS.get(name)
        parts = rule._asdict() if rule else {}
        functions = [(f"{name}, {role}", getattr(part, "fn", part)) for role, part in parts.items()]    # below jit
        found += [(role, function) for role, function in functions if inspect.isfunction(function)]
    return found


def learned(layer):
    """A line for each of a layer's parameters and buffers outside its projections: name, shape and initial value."""
    lines, config = [], layer.config
    for name, p in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.startswith(("c_attn", "c_proj")):
            continue
        std, (inside, _, last) = layer.init_std.get(name), name.rpartition(".")
        if std is None and isinstance(layer.get_submodule(inside), nn.Linear):
            std = 0.02 if last == "weight" else 0                       # every linear layer's, see GPT.init_weights
        ends = dict.fromkeys(f"{end.item():.4g}" for end in (p.min(), p.max()))
        start = " to ".join(ends) if std is None else f"N(0, {std:.3g})" if std else "0"
        kept = "" if isinstance(p, nn.Parameter) else ", kept and not learned"
        lines.append(f"{name:18} {str(tuple(p.shape)):14} {start} at first{kept}")
    return [*(lines or ["nothing besides its projections"]),
            f"(with {config.n_head} heads of width {layer.width} and block_size {config.block_size})"]


def source(function, title=""):
    """A function's place and source."""
    code = textwrap.dedent(inspect.getsource(getattr(function, "fn", function))).rstrip()
    return f"# {place(function)}{title and f'    ({title})'}\n{code}"


def place(function):
    """The file and line of a function, as attention.py:59."""
    lines, number = inspect.getsourcelines(function)
    return f"{Path(inspect.getsourcefile(function)).relative_to(ROOT).as_posix()}:{number}"
