"""instrument"""
import contextlib
import dataclasses
from dataclasses import dataclass
from functools import partial

import attention
from common.flags import fields_of, knob, with_recipe
from common.machine import Machine
from common.runs import load_weights, read_checkpoint, read_run
from data import files, tokens
from model import GPT, GPTConfig


@dataclass
class Common:
    """Flags of every command that looks at a run"""
    out_dir: str = knob("", "the run to look at")
    dataset: str = knob("", "data set to look at it on: a name in data/ or a folder's path; empty: the one it was trained on")
    device: str = knob("auto", "cuda, cuda:1, mps, cpu; auto: the best there is")
    dtype: str = knob("float32", "precision of the products", ("auto", "float32", "bfloat16", "float16"))
    json: bool = knob(False, "print JSON instead of a table")


OVERRIDES = dataclasses.make_dataclass("Overrides", [  # the choices of a run that can be looked at otherwise
    (f.name, f.type, dataclasses.field(default=f.default, metadata=f.metadata)) for f in dataclasses.fields(GPTConfig)
    if f.name in ("attn", "attn_args", "kernel", *attention.DEFAULTS)])
OVERRIDES.__doc__ = "Overrides of the run's own choices"


class Loaded:
    """A run as the commands see it: its model on this machine, and the data to look at it on."""

    def __init__(self, common, given):
        self.machine = Machine(common.device, common.dtype)
        self.model, meta = load_run(common.out_dir, self.machine.device, given)
        self.folder = tokens.data_folder(common.dataset or meta["knobs"]["dataset"])
        self.data = tokens.read_meta(self.folder)
        self.stride = self.data.get("stride", 1)
        tokens.check_vocabulary(self.model.config, self.data, self.folder)

    def split(self, name):
        return tokens.Tokens(self.folder, name)


def load_run(out_dir, device, given=None):
    """A run's model on a device, in eval mode, and its meta.json. `given` holds config fields that override the run's own."""
    meta, path = read_run(out_dir)
    model = GPT(model_config(meta["knobs"], given or {}))
    load_weights(model, read_checkpoint(path)["model"], path)
    return model.to(device).eval(), meta


def model_config(stored, given):
    """A GPTConfig from stored knobs and the flags given now: flag, then the recipe of a given --attn, then what is stored."""
    return GPTConfig(**fields_of(GPTConfig, with_recipe(stored, given, attention.ATTENTIONS, attention.DEFAULTS)))


@contextlib.contextmanager
def instead(model, look):
    """Inside this context every attention layer of a forward pass calls look(attend, layer, module, q, k, v, x, table) in place of
    its own attend(q, k, v, x, table): to watch what goes in, or to change it."""
    modules = [block.attn for block in model.transformer.h]
    for layer, module in enumerate(modules):
        module.attend = partial(look, module.attend, layer, module)
    try:
        yield
    finally:
        for module in modules:
            del module.attend


def table(rows, header):
    """Right-aligned columns as text."""
    cells = [header] + [[c if isinstance(c, str) else "-" if c is None else f"{c:.4f}" for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells)


def numbers(text):
    if not text or not all(number.isdigit() for number in text.split(",")):
        raise ValueError(f"{text!r} must be whole numbers separated by commas")
    return [int(number) for number in text.split(",")]


def recipe_names(text):
    """The recipes in "all" or in a list with commas. Raises ValueError on one that does not exist."""
    names = list(attention.ATTENTIONS) if text == "all" else text.split(",")
    for name in names:
        attention.recipe(name)
    return names


def save_result(args, result):
    if args.out:
        files.write_json(args.out, result)
