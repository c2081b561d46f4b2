"""Small changes of source code that a test should notice: other operators, numbers, conditions, missing statements."""
import ast
import collections
import contextlib
import itertools
import random

PAIRS = ("< <=", "> >=", "== !=", "+ -", "* /", "+= -=", "*= /=", "& |", "<< >>", "and or", "min max", "any all",
         "minimum maximum", "amin amax", "argmin argmax", "sin cos", "floor ceil", "zeros ones", "zeros_like ones_like")
SWAPS = dict(words for pair in PAIRS for words in (pair.split(), pair.split()[::-1]))
SWAPS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in", "//": "*", "%": "//", "**": "*", "^": "|"}
NO_CODE = ("annotation", "returns", "decorator_list", "exc", "msg")        # parts of the tree that stay as they are


class Source:
    """A source file and its small changes: (start, end, replacement, ranges of lines whose tests judge the change)."""

    def __init__(self, root, path):
        self.file, self.source, self.changes = str(path.relative_to(root)), path.read_bytes(), []
        self.starts = [0, *itertools.accumulate(map(len, self.source.splitlines(keepends=True)))]
        tree = ast.parse(self.source)
        self.meaning = ast.dump(tree)
        self.visit(tree, [(1, len(self.starts))], False)

    def span(self, node):
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def lines(self, *span):
        return [self.source.count(b"\n", 0, end) + 1 for end in span]

    def text(self, start, end):
        return self.source[start:end].decode()

    def visit(self, node, places, inside):
        """Collect changes. One inside a function is judged by the tests that execute its lines, or else its statement.
        A default value is judged by the tests of its function, and what runs on import by all tests of the file."""
        match node:                             # no texts, no decorators, nothing that only prints
            case (ast.JoinedStr() | ast.Expr(value=ast.Call(func=ast.Name(id="print")))
                  | ast.If(test=ast.Compare(left=ast.Name(id="__name__")))):
                return
            case ast.FunctionDef() | ast.Lambda():
                places, inside = [(node.lineno, node.end_lineno)], False
            case ast.stmt() if inside:
                last = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
                places = [(node.lineno, max(node.lineno, last))]
        self.changes += [(start, end, new, [self.lines(start, end), *places] if inside else places)
                         for start, end, new in self.changes_of(node)]
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in NO_CODE:
                    body = field == "body" and isinstance(node, ast.FunctionDef | ast.Lambda)
                    self.visit(child, places, inside or body)

    def operators(self, *operands):
        for (_, start), (end, _) in itertools.pairwise(map(self.span, operands)):
            old = self.text(start, end).strip(" ()\\\n")
            if old in SWAPS:
                start = self.source.index(old.encode(), start)
                yield start, start + len(old), SWAPS[old]

    def changes_of(self, node):
        """(start, end, replacement) for each change of a node, without those of its children."""
        start, end = self.span(node) if hasattr(node, "lineno") else (0, 0)
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from self.operators(left, *others)
            case ast.BoolOp(values=values):
                yield from self.operators(*values)
            case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                yield from self.operators(left, right)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield start, start + (3 if isinstance(node.op, ast.Not) else 1), ""
            case ast.Constant(value=bool() as value):
                yield start, end, str(not value)
            case ast.Constant(value=int() as value):
                yield from ((start, end, str(value + step)) for step in (1, -1))
            case ast.Constant(value=float() as value):
                yield start, end, str(2 * value or 1.0)
            case ast.arguments(defaults=some, kw_defaults=others):
                yield from ((*self.span(value), "0") for value in some + others
                            if isinstance(value, ast.Constant) and value.value is None)
            case ast.Slice():
                yield from ((self.span(bound)[1], self.span(bound)[1], " + 1") for bound in (node.lower, node.upper)
                            if bound and not isinstance(bound, ast.Constant))
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in SWAPS:
                yield end - len(name), end, SWAPS[name]
            case ast.keyword(arg="min" | "max" as name):
                yield start, start + 3, SWAPS[name]
            case ast.Call(func=ast.Attribute(value=value, attr="detach" | "clone" | "abs")):
                yield self.span(value)[1], end, ""
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[a, b, *_]) if (
                    type(a) is type(b) and not isinstance(a, ast.Constant | ast.Starred) and name not in SWAPS):
                (a, b), (c, d) = self.span(a), self.span(b)
                yield a, d, self.text(c, d) + self.text(b, c) + self.text(a, b)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) | ast.comprehension(ifs=[test]):
                yield *self.span(test), f"not ({self.text(*self.span(test))})"
            case ast.Break() | ast.Continue():
                yield start, end, "continue" if isinstance(node, ast.Break) else "break"
        match node:
            case (ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign()
                  | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_])):
                yield start, end, "pass"

    def mutant(self, start, end, new, places):
        """The mutant with one change, or None where it is no other program."""
        changed = self.source[:start] + new.encode() + self.source[end:]
        with contextlib.suppress(SyntaxError):
            if ast.dump(ast.parse(changed)) != self.meaning:
                first, last = self.lines(start, end)
                start, end, grown = self.starts[first - 1], self.starts[last], len(changed) - len(self.source)
                now = changed[start:end + grown].decode()
                return {"file": self.file, "line": first, "was": self.text(start, end), "now": now}, changed, places


def draw(root, patterns, seed, count):
    """Draw lines of the files, and for each line one of its changes. Returns [(row, changed source, places)]."""
    lines = collections.defaultdict(list)
    for path in sorted(path for pattern in patterns.split() for path in root.glob(pattern)):
        source = Source(root, path)
        for change in source.changes:
            lines[source.file, source.lines(*change[:2])[0]].append((source, change))
    dice, order = random.Random(seed), sorted(lines)
    dice.shuffle(order)
    mutants = ((source.mutant(*change) for source, change in dice.sample(lines[at], len(lines[at]))) for at in order)
    return list(itertools.islice((found for one in mutants for found in list(filter(None, one))[:1]), count))
