"""A recipe on one page: its choices, the rule in PyTorch and in Triton, its learned parameters, and where the code is.

    python eval.py show elastic                     the page
    python eval.py show elastic --diff=softmax      differences from another recipe: + marks elastic's line, - softmax's
    python eval.py show --out_dir=out/smollm2       the recipe of a run, with its sizes and the origin of its weights
    python eval.py show elastic --out_dir=out/smollm2   another recipe with the sizes of that run

The page is assembled from the code itself, so it is never out of date. It is the index of the tutorial: read a formula,
its PyTorch line and its Triton line one below the other, then open the files at the lines it names.
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
from axes.base import unchanged
from axes.positions import Distance
from axes.sight import visible
from common.flags import knob
from common.runs import ROOT, read_run
from evals.instrument import model_config

WIDTH = 110
# a pass through a layer: (axis, the field of its row that holds a function). AROUND: the code that calls the function
PASS = [("conv", "convolved"), ("qk_norm", "normed"), ("feature", "mapped"), ("scale", "factor"), ("pos", "bias"),
        ("forget", "log_kept"), ("write", "amount"), ("rule", "inputs"), ("rule", "row_input"), ("rule", "start"),
        ("rule", "weights"), ("rule", "chunk"), ("rule", "after"), ("normalize", "divisor"), ("sink", "score"),
        ("sink", "value"), ("diff", "mix"), ("value_bias", "corrected"), ("dex", "corrected"), ("out_norm", "normed"),
        ("diff", "after"), ("gate", "gated")]
AROUND = {("normalize", "divisor"): rows.share_of_keys, ("sink", "score"): rows.share_of_keys,
          ("sink", "value"): rows.normalised_output, ("diff", "mix"): attention.Attention.attend,
          ("pos", "bias"): Distance}
SHOWN = ("n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "block_size", "vocab_size", "rope_base",
         "rope_scaling")
SIZES = {"n_layer": 1, "n_head": 4, "n_embd": 128, "block_size": 256, "vocab_size": 257}


@dataclass
class Show:
    """Flags of show"""
    recipe: str = knob("", "the recipe; default: elastic, or with --out_dir the run's own",
                       ("", *attention.ATTENTIONS), positional=True)
    diff: str = knob("", "mark the differences from this recipe", ("", *attention.ATTENTIONS))
    out_dir: str = knob("", "use the sizes of this run")
    json: bool = knob(False, "print JSON instead of a page")


def command(args, run):
    """A recipe as one page: axes, PyTorch, Triton, learned parameters, and where the code is."""
    meta = read_run(args.out_dir)[0] if args.out_dir else None
    page = page_of(args.recipe, meta)
    if not args.diff:
        return page.numbers(), str(page)
    marked = difflib.ndiff(str(page_of(args.diff, meta)).splitlines(), str(page).splitlines())
    return page.numbers(), "\n".join(line.rstrip() for line in marked if not line.startswith("?"))


def page_of(name, meta=None):
    """The page of a recipe. meta: the meta.json of a run; the page has its sizes, and its recipe if the name is empty.
    """
    knobs = meta["knobs"] if meta else SIZES | {"attn": "elastic"}
    return Page(model_config(knobs, {"attn": name} if name else {}), meta)


class Page:
    """One recipe, built as the first layer of a model, and its code. meta: see page_of."""

    def __init__(self, config, meta=None):
        self.name, self.config, self.meta = config.attn, config, meta
        self.layer = mixers.layer_of(self.config, 0)
        # {axis: value} without defaults, but always with the rule, the positions, and what the recipe names
        self.axes = {axis: getattr(self.config, axis) for axis in mixers.DEFAULTS}
        self.chosen = {axis: value for axis, value in self.axes.items()
                       if axis in ("rule", "pos", *attention.ATTENTIONS.get(self.name, ()))
                       or value != mixers.DEFAULTS[axis]}
        self.sizes = {name: getattr(self.config, name) for name in SHOWN} | {"head_dim": self.config.head_width}

    def __str__(self):
        sections = {"the run": [self.about()]} if self.meta else {}
        sections |= {"its choices": [self.choices()], "in PyTorch": [source(f) for f in self.pytorch()],
                     "in Triton": [source(function, role) for role, function in self.triton()]
                     or ["this rule has no kernel: PyTorch computes it everywhere"],
                     "what a layer learns": [self.learned()]}
        lines = [f"{self.name}    {recipe_place(self.name)}"]
        for title, parts in sections.items():
            lines += ["", f"---- {title} " + "-" * (WIDTH - 6 - len(title)), *"\n\n".join(parts).splitlines()]
        return "\n".join(lines)

    def numbers(self):
        run = {"sizes": self.sizes, "source": self.meta.get("source")} if self.meta else {}
        return {"recipe": self.name, **run, "where": recipe_place(self.name), "axes": self.axes,
                "args": self.layer.args,
                "learns": {name: list(p.shape) for name, p in self.layer.named_parameters()},
                "pytorch": {f.__name__: place(f) for f in self.pytorch()},
                "triton": {f.__name__: place(f) for _, f in self.triton()}}

    def about(self):
        """The sizes of the model around this layer, and the origin of its weights."""
        meanings = {field.name: field.metadata["help"] for field in dataclasses.fields(self.config)}
        lines = []
        for name, value in self.sizes.items():
            value = f"{value:.10g}" if isinstance(value, float) else str(value) or "none"
            lines.append(f"{name:12} {value:10} {re.split('[;:] ', meanings[name])[0]}")
        knobs, given = self.meta["knobs"], self.meta.get("source")
        origin = f"trained on {knobs.get('dataset')}, from {knobs.get('init_from', 'scratch')}"
        if given:
            origin = (f"{given['name']}, from {given['from']}, in {given['precision']}"
                      f"{', instruction-tuned' if given['instruction_tuned'] else ''}; "
                      f"licence: {given['licence'] or 'not stated'}")
        return "\n".join([*lines, textwrap.fill(f"{'weights':12} {origin}", WIDTH, subsequent_indent=" " * 13)])

    def choices(self):
        """A line for each axis that differs from its default: the value and its effect, which is the first sentence of
        the docstring of the choice's function."""
        lines = []
        for axis, value in self.chosen.items():
            parts = (part for of, part in PASS if of == axis and part not in ("inputs", "row_input", "start"))
            function = next(filter(None, (self.function(axis, part) for part in parts)), None)
            text = inspect.getdoc(getattr(function, "func", function)) or "" if function else ""
            meaning = re.split(r"\n\n|(?<=[a-z\])])\. ", text)[0].replace("\n", " ")
            lines.append(textwrap.fill(f"{axis:12} {value!s:10} {meaning}", WIDTH, subsequent_indent=" " * 24))
        if self.layer.args:
            lines.append(f"{'attn_args':12} " + ",".join(f"{key}={value}" for key, value in self.layer.args.items()))
        rest = ", ".join(f"{axis} {value}" for axis, value in self.axes.items() if axis not in self.chosen)
        return "\n".join([*lines, textwrap.fill(f"{'as usual':12} {rest}", WIDTH, subsequent_indent=" " * 13)])

    def function(self, axis, part):
        """The function in this field of the chosen row, or None."""
        function = getattr(self.layer.choices.get(axis), part, None)
        return None if function is unchanged else function

    def pytorch(self):
        """The functions of every choice, in the order of a pass through the layer."""
        found = []
        for axis, part in PASS:
            found.append(self.function(axis, part))
            found += called(found[-1])
            if found[-1] and (axis, part) in AROUND and type(self.layer).attend is attention.Attention.attend:
                found.append(AROUND[axis, part])
        if self.config.window:
            found += [visible, attention.Attention.rotated]
        return list(dict.fromkeys(filter(None, found)))

    def triton(self):
        """[(role, function)] of the kernel's rule; first those of a kernel whose result it needs."""
        found = [("a state", getattr(function, "fn", function)) for function in self.layer.fused_by]
        for name in filter(None, (getattr(self.layer.rule, "threshold_of", None), self.config.rule)):
            rule = kernels.KERNELS.get(name)
            for role, part in zip(getattr(rule, "_fields", ()), rule or (), strict=True):
                function = getattr(part, "fn", part)                    # below triton.jit
                found += [(f"{name}, {role}", function)] if inspect.isfunction(function) else []
        return found

    def learned(self):
        """Names, shapes and initial values of a layer's parameters outside its projections."""
        lines = []
        for name, p in [*self.layer.named_parameters(), *self.layer.named_buffers()]:
            if name.startswith(("c_attn", "c_proj")):
                continue
            std, (inside, _, last) = self.layer.init_std.get(name), name.rpartition(".")
            if std is None and isinstance(self.layer.get_submodule(inside), nn.Linear):
                std = 0.02 if last == "weight" else 0                   # every linear layer's, see GPT.init_weights
            low, high = p.min().item(), p.max().item()
            if std is not None:
                start = f"N(0, {std:.3g})" if std else "0"
            else:
                start = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
            kept = "" if isinstance(p, nn.Parameter) else ", kept and not learned"
            lines.append(f"{name:18} {str(tuple(p.shape)):14} {start} at first{kept}")
        sizes = f"(with {self.config.n_head} heads of width {self.layer.width} and block_size {self.config.block_size})"
        return "\n".join([*(lines or ["nothing besides its projections"]), sizes])


def called(function):
    """The functions of its own file that a mixer's function calls, directly or not. (attention.py has too many.)"""
    if not inspect.isfunction(function) or not function.__module__.startswith("mixers."):
        return []
    names = (function.__globals__.get(name) for name in function.__code__.co_names)
    others = [other for other in names if inspect.isfunction(other) and other.__module__ == function.__module__]
    return [deeper for other in others if other is not function for deeper in (other, *called(other))]


def source(function, title=""):
    """A function's place and source."""
    code = textwrap.dedent(inspect.getsource(getattr(function, "fn", function))).rstrip()
    return f"# {place(function)}{title and f'    ({title})'}\n{code}"


def place(function):
    """The file and line of a function, as attention.py:59."""
    lines, number = inspect.getsourcelines(function)
    return f"{Path(inspect.getsourcefile(function)).relative_to(ROOT).as_posix()}:{number}"


def recipe_place(name):
    """The line of a recipe's row in attention.py, and the row."""
    lines = Path(attention.__file__).read_text(encoding="utf-8").splitlines()
    table = lines.index("ATTENTIONS = {")
    row = next(n for n, line in enumerate(lines[table:], table) if line.strip().startswith(f'"{name}":'))
    end = next(n for n, line in enumerate(lines[row:], row) if line.split("#")[0].rstrip().endswith("},"))
    return f"attention.py:{row + 1}    {' '.join(line.strip() for line in lines[row:end + 1])}"
