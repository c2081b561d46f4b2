"""Flags made from dataclasses. common/resolve.py decides which value of a knob wins.

A knob is a dataclass field; a dataclass of knobs is a group of flags. --n_layer=4 and --n_layer 4
both work, -h lists every knob with its meaning, and a wrong flag or value ends with one line that
names the valid ones.
"""

import argparse
import dataclasses
import difflib
import inspect
from functools import partial

from common import files


def knob(default, meaning, choices=None, least=None, below=None, positional=False):
    """A dataclass field that is also a flag: its default, its help text, and its valid values:
    `choices` if they are few, or from `least` to `below`. A whole number is at least 0. positional:
    it is given without its name."""
    return dataclasses.field(
        default=default,
        metadata={
            "help": meaning,
            "choices": choices,
            "least": least,
            "below": below,
            "positional": positional,
        },
    )


class Knobs:
    """The base of dataclasses of knobs. It raises ValueError if a value is not among the valid
    ones, or if a number has another type than its knob."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            flag, value = f"--{field.name}", getattr(self, field.name)
            choices = field.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(
                    f"{flag}={value} is not among {', '.join(choices)}{nearest(value, choices)}"
                )
            if field.type not in (int, float, int | None):
                continue
            whole = field.type is not float
            if isinstance(value, bool) or not isinstance(value, field.type | int):
                raise ValueError(f"{flag}={value!r} must be a {'whole ' * whole}number")
            least, below = field.metadata["least"], field.metadata["below"]
            if whole and not value < 1 << 31:
                raise ValueError(f"{flag}={value} must be below 2**31")
            if whole and least is None:
                least = 0
            if least is not None and not value >= least:
                raise ValueError(f"{flag}={value} must be at least {least}")
            if below is not None and not value < below:
                raise ValueError(f"{flag}={value} must be below {below}")


def add_flags(parser, *groups, preset=None, only=None):
    """Add a flag for every knob of these dataclasses. A flag that is not given is None, so that
    presets and recipes can decide. preset: {name: value} that replace defaults in the help, since a
    call without flags uses them. only: the names of the knobs to add; None: all."""
    for group in groups:
        title = (inspect.getdoc(group) or "").split(". ")[0]
        section = parser.add_argument_group(title)
        for field in dataclasses.fields(group):
            if only and field.name not in only:
                continue
            # the default of an axis is None: the recipe decides
            kind = {int | None: int, str | None: str}.get(field.type, field.type)
            reads = {"type": kind, "metavar": METAVARS.get(kind, "S")}
            if kind is bool:
                reads |= {"type": as_bool, "nargs": "?", "const": True}
            name = f"--{field.name}"
            if field.metadata["positional"]:
                name, reads = field.name, {"nargs": "?", "metavar": field.name}
            meaning = field.metadata["help"].replace("%", "%%")  # for argparse
            choices = field.metadata["choices"]
            if choices and len(choices) <= 8:
                reads["metavar"] = None  # argparse lists them
            elif choices:
                meaning += f"; one of {', '.join(filter(None, choices))}"
            default = (preset or {}).get(field.name, field.default)
            if default not in (None, ""):
                meaning += f" ({shown(default)})"
            section.add_argument(name, default=None, **reads, choices=choices, help=meaning)


METAVARS = {int: "N", float: "X", bool: "0|1"}  # a value in -h, by the type of its knob


def shown(value):
    """A value as it is written on the command line: 0 and 1 for False and True."""
    return int(value) if isinstance(value, bool) else value


def as_bool(text):
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or 1")
    return words[text.lower()]


class Help(argparse.Action):
    """-h shows the flags in parser.usual, and -h all shows every flag and the epilog. Without
    `usual`, -h is -h all."""

    def __call__(self, parser, namespace, what, option=None):
        if what != "all" and parser.usual:
            for action in parser._actions:
                action.help = action.help if action.dest in parser.usual else argparse.SUPPRESS
            count = len(parser._actions) - 1
            parser.epilog = f"{count} flags in all, and what each preset and recipe sets: -h all"
        parser.print_help()
        parser.exit()


def nearest(word, names):
    """ ", did you mean NAME?" if a name is similar to the word, else ""."""
    near = difflib.get_close_matches(str(word), [str(name) for name in names], n=1)
    return f", did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that names the valid flags. usual: flags of -h;
    empty: all."""

    def __init__(self, usual=(), **kwargs):
        wide = partial(argparse.RawDescriptionHelpFormatter, max_help_position=36, width=150)
        super().__init__(
            allow_abbrev=False,
            usage="%(prog)s [--flag=value ...]",
            formatter_class=wide,
            add_help=False,
            **kwargs,
        )
        self.usual = usual
        self.add_argument(
            "-h", "--help", nargs="?", choices=("all",), action=Help, help=argparse.SUPPRESS
        )

    def parse_args(self, args=None, namespace=None):
        namespace, unknown = self.parse_known_args(args, namespace)
        if unknown:
            valid = [name for name in self._option_string_actions if name.startswith("--")]
            self.error(
                f"unknown flag {unknown[0]}{nearest(unknown[0].split('=')[0], valid)}; "
                f"valid flags: {' '.join(valid)}"
            )
        return namespace

    def _check_value(self, action, value):
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as e:
            message = e.message + nearest(value, action.choices)
            raise argparse.ArgumentError(action, message) from None

    def error(self, message):
        files.fail(self.prog, f"error: {message}", 2)


def given_flags(args, *groups):
    """{name: value} of the knobs of these dataclasses that were given on the command line."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    return {name: value for group in groups for name, value in fields_of(group, given).items()}


def fields_of(group, values):
    """The entries of a dict that are fields of a dataclass. Raises ValueError if one has another
    type than its field, as in a damaged meta.json."""
    types = {field.name: field.type for field in dataclasses.fields(group)}
    found = {name: value for name, value in values.items() if name in types}
    for name, value in found.items():
        if not isinstance(value, types[name] | int if types[name] is float else types[name]):
            kind = getattr(types[name], "__name__", types[name])
            raise ValueError(
                f"{name}={value!r} must be of type {kind}: restore the run's "
                "meta.json, or train it again"
            )
    return found
