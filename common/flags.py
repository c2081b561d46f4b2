"""Flags made from dataclasses, and which of several values for a knob counts.

A knob is a dataclass field; a dataclass of knobs is a group of flags. --n_layer=4 and --n_layer 4 both work, -h lists
every knob with its meaning, and a wrong flag or value is one line that names the valid ones.

Which value counts: a flag beats the recipe (--attn), the recipe beats the preset or the stored run, that beats the
default. The first three are put together by `with_recipe`, the default comes from the dataclass.
"""
import argparse
import dataclasses
import difflib
import inspect
import math
from functools import partial

# ------------------------------------------------------------------------------------------------ from knobs to flags


def knob(default, meaning, choices=None, positional=False):
    """A dataclass field that is also a flag: its default, what -h says about it, its valid values if they are few.
    positional: it is given as a word by itself."""
    return dataclasses.field(default=default, metadata={"help": meaning, "choices": choices, "positional": positional})


def add_flags(parser, *groups):
    """Add a flag for every knob of these dataclasses. It is None until given, so that presets and recipes can come in
    between."""
    for group in groups:
        title = (inspect.getdoc(group) or "").split(". ")[0]            # the first sentence
        section = parser.add_argument_group(group.__name__, title)
        types = inspect.get_annotations(group, eval_str=True)
        for field in dataclasses.fields(group):
            kind = types[field.name]
            kind = {int | None: int, str | None: str}.get(kind, kind)   # an axis: None lets the recipe decide
            reads = {"type": as_bool, "nargs": "?", "const": True} if kind is bool else {"type": kind}
            name = f"--{field.name}"
            if field.metadata["positional"]:
                name, reads = field.name, {"nargs": "?"}                # left out, it has its default
            choices, default = field.metadata["choices"], field.default
            metavar = None if choices else {int: "N", float: "X", bool: "0|1"}.get(kind, "S")
            meaning = field.metadata["help"].replace("%", "%%")         # argparse would read % as its own
            meaning += "" if default in (None, "") else f" ({shown(default)})"
            section.add_argument(name, default=None, **reads, choices=choices, metavar=metavar, help=meaning)


def shown(value):
    """A value as it is written on the command line: 0 and 1 for False and True."""
    return int(value) if isinstance(value, bool) else value


def as_bool(text):
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or 1")
    return words[text.lower()]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that says what would have been right."""

    def __init__(self, **kwargs):
        wide = partial(argparse.RawDescriptionHelpFormatter, max_help_position=36, width=150)
        super().__init__(allow_abbrev=False, usage="%(prog)s [--flag=value ...]", formatter_class=wide, **kwargs)

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            valid = [o for action in self._actions for o in action.option_strings if o.startswith("--")]
            near = difflib.get_close_matches(unknown[0].split("=")[0], valid, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            self.error(f"unknown flag {unknown[0]}{hint}; valid flags: {' '.join(valid)}")
        return namespace

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


# ------------------------------------------------------------------------------------------------- which value counts


def given_flags(args, *groups):
    """The knobs of these dataclasses that were set on the command line, as {name: value}."""
    return {name: value for group in groups
            for name, value in fields_of(group, vars(args)).items() if value is not None}


def fields_of(group, values):
    """The entries of a dict that are fields of a dataclass."""
    names = {field.name for field in dataclasses.fields(group)}
    return {name: value for name, value in values.items() if name in names}


def with_recipe(base, given, recipes, axes):
    """All knobs: `given` flags over the recipe of a given --attn over `base`, a preset or the knobs of a stored run.

    A stored run knows every axis by value. So where --attn is given, the values that its old recipe had set are
    forgotten, its constants too; what the user had chosen beside that recipe stays.
    recipes: {name: {axis: value}}; axes: their names.
    """
    if "attn" in given:
        before = recipes.get(base.get("attn"), {})
        base = {name: value for name, value in base.items() if name not in axes or before.get(name) != value}
        base |= {"attn_args": ""} | recipes[given["attn"]]
    return base | given


def at_least(knobs, **bounds):
    """Raise ValueError where a knob is below its bound, or is no finite number."""
    for name, bound in bounds.items():
        if not bound <= getattr(knobs, name) < math.inf:
            raise ValueError(f"--{name}={getattr(knobs, name)} must be a number of at least {bound}")
