"""The choices of a recipe, and the file and line of the code that computes each.

python eval.py show elastic
python eval.py show --out_dir=out/a                 the recipe of a run, or those of its --layers
python eval.py show elastic --out_dir=out/smollm2   a recipe with the sizes of that run
"""

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path

import attention
import mixers
from axes.options import NUMBERS
from common.flags import Knobs, knob
from common.runs import ROOT, read_run
from evals.instrument import model_config
from kernels import visible

NOT_SHOWN = ("learns", "args", "refuse", "kernel")  # fields of a choice
SIZES = {"n_layer": 1, "n_head": 4, "n_embd": 128, "block_size": 256, "vocab_size": 257}


@dataclass
class Show(Knobs):
    """Flags of show"""

    recipe: str = knob("", "the recipe; with --out_dir the default is the run's", positional=True)
    out_dir: str = knob("", "use the sizes of this run")
    json: bool = knob(False, "print JSON instead of a table")

    def __post_init__(self):
        super().__post_init__()
        if self.recipe:
            attention.recipe(self.recipe)  # raises ValueError
        elif not self.out_dir:
            raise ValueError(
                "show needs a recipe or a run: python eval.py show elastic, or "
                "python eval.py show --out_dir=out/..."
            )


def command(args, run):
    """The choices of a recipe, with the file and line of the code of each, and what it learns."""
    stored = read_run(args.out_dir)[0]["knobs"] if args.out_dir else SIZES | {"attn": args.recipe}
    config = model_config(stored, {"attn": args.recipe} if args.recipe else {})
    layers = [mixers.layer_of(kind, number) for number, kind in enumerate(config.layer_configs)]
    numbers = [choices_of(layer) for layer in layers]
    text = "\n\n".join(dict.fromkeys(map(in_words, numbers)))
    return numbers[0] if len(numbers) == 1 else {"layers": numbers}, text


def choices_of(layer):
    """What a layer consists of. "code": [axis, its value, a part of this choice, file:line]; a part
    without a function, such as rotates=True, has no place. "usual": the axes with their default."""
    config = layer.config
    code = []
    usual = {}
    own = {"mixer", "rule", "pos", *attention.ATTENTIONS[config.attn]}
    for axis, default in mixers.DEFAULTS.items():
        value = getattr(config, axis)
        if value == default and axis not in own:
            if axis in layer.axes or axis in layer.numbers:
                usual[axis] = value
            continue
        for name, part in parts_of(layer, axis).items():
            if callable(part):
                code.append([axis, str(value), name, place(part)])
            else:
                code.append([axis, str(value), name and f"{name}={part}", ""])
    learns = {}
    for name, p in layer.named_parameters():
        if not name.startswith(("c_attn", "c_proj")):
            learns[name] = list(p.shape)
    found = {"recipe": config.attn, "code": code, "args": layer.args}
    return found | {"learns": learns, "usual": usual}


def parts_of(layer, axis):
    """{name: part} of a layer's choice: functions and flags of its row, and Triton functions."""
    if axis == "mixer":
        return {"": type(layer)}
    if axis not in layer.choices:  # a number, such as that of --window
        return {"": visible if axis in NUMBERS else None}
    choice = layer.choices[axis]
    found = {}
    for field in dataclasses.fields(choice):
        part = getattr(choice, field.name)
        if field.name not in NOT_SHOWN and part != field.default:
            found[field.name] = part
    kernel = getattr(choice, "kernel", None)
    triton = kernel._asdict() if kernel else {}
    if axis == "rule":
        triton |= {function.__name__: function for function in layer.fused_by}
    for name, part in triton.items():
        if inspect.isfunction(getattr(part, "fn", part)):  # below jit
            found[f"Triton {name}"] = getattr(part, "fn", part)
    return found or {"": None}


def place(part):
    """The file and line of a function or class, as attention.py:59."""
    part = getattr(part, "func", getattr(part, "__self__", part))  # a partial; Function.apply
    number = inspect.getsourcelines(part)[1]
    return f"{Path(inspect.getsourcefile(part)).relative_to(ROOT).as_posix()}:{number}"


def in_words(found):
    """A line for each part of each choice; then constants, learned tensors, axes with defaults."""
    lines = [found["recipe"], ""]
    last = None
    for axis, value, name, where in found["code"]:
        head = f"{axis:12} {value:10}" if axis != last else " " * 23
        lines.append(f"{head} {name:16} {where}".rstrip())
        last = axis
    rest = {
        "constants": [f"{name}={value}" for name, value in found["args"].items()],
        "learns": [f"{name} {tuple(shape)}" for name, shape in found["learns"].items()],
        "as usual": [f"{axis} {value}" for axis, value in found["usual"].items()],
    }
    lines += ["", *(f"{name:12} {', '.join(parts) or 'none'}" for name, parts in rest.items())]
    return "\n".join(lines)
