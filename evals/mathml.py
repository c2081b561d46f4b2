"""Formulas as docstrings write them, "w_ij = relu(p_ij - t_i)^power", in MathML, which browsers draw by themselves.

A formula has names with or without an index (s_ij), numbers, = + - /, powers, ( ), |x|, sqrt(x) and sum_k x. Factors
are written side by side, and multiplied before / divides.
"""
import html
import re

GREEK = {"alpha": "α", "beta": "β", "eps": "ε", "kappa": "κ", "lambda": "λ", "sigma": "σ", "tau": "τ"}
FENCE = '<mo stretchy="false">'                  # parentheses of one size: an index would make them taller


def explained(text):
    """A paragraph "FORMULA, FORMULA: what they mean" as its formulas in MathML, a list, and the rest in HTML."""
    head, _, tail = text.partition(": ")
    parts = {part: "=" in part and mathml(part.rstrip(".")) for part in re.split(r",\s+(?![^(]*\))", head)}
    words = ": ".join(filter(None, (", ".join(part for part in parts if not parts[part]), tail)))
    words = re.sub(r"\b\w[_^]\w+", lambda found: mathml(found[0]) or found[0], html.escape(words, quote=False))
    return [*filter(None, parts.values())], words[:1].upper() + words[1:]


def mathml(text):
    """One formula in MathML, or None if the text is not a formula."""
    rest = re.findall(r"\w+|\S", text)[::-1]                            # its symbols, the next one last
    try:
        drawn = terms(rest)
    except (IndexError, ValueError):
        return None
    return None if rest else f"<math>{drawn}</math>"


def terms(rest):
    """Fractions, with = + - between them. Like the functions below, it takes what it draws from the end of `rest`."""
    drawn = fraction(rest)
    while rest and rest[-1] in "=+-":
        sign = rest.pop().replace("-", "−")
        drawn += f"<mo>{sign}</mo>{fraction(rest)}"
    return drawn


def fraction(rest):
    factors = product(rest)
    while rest and rest[-1] == "/":
        rest.pop()
        factors = [f"<mfrac>{alone(factors)}{alone(product(rest))}</mfrac>"]
    return "".join(factors)


def alone(factors):
    """Factors as one row. A fraction or a root needs no parentheses around all of it."""
    drawn, (before, after) = "".join(factors), (f"<mrow>{FENCE}(</mo>", f"{FENCE})</mo></mrow>")
    if len(factors) == 1 and drawn.startswith(before):
        drawn = drawn[len(before):-len(after)]
    return f"<mrow>{drawn}</mrow>"


def product(rest):
    """The factors, a list. Some have an exponent."""
    factors = [atom(rest)]
    while rest and rest[-1] not in "=+-/)|,":
        if rest[-1] == "^":
            rest.pop()
            factors[-1] = f"<msup>{factors[-1]}{atom(rest)}</msup>"
        else:
            factors.append(atom(rest))
    return factors


def atom(rest):
    """A number, a name, a sum, a root, or what is inside parentheses or bars."""
    symbol = rest.pop()
    if symbol in "(|":
        inside, end = terms(rest), rest.pop()
        if symbol + end not in ("()", "||"):
            raise ValueError(end)
        return f"<mrow>{FENCE}{symbol}</mo>{inside}{FENCE}{end}</mo></mrow>"
    name, _, index = symbol.partition("_")
    index = f"<mrow>{''.join(f'<mi>{letter}</mi>' for letter in index)}</mrow>"
    if name == "sum":
        return f"<munder><mo>∑</mo>{index}</munder>{''.join(product(rest))}"
    if name == "sqrt":
        return f"<msqrt>{alone([atom(rest)])}</msqrt>"
    # a longer name is that of a function, or a word of English
    if not name.isalnum() or len(name) > 1 and name not in (*GREEK, "power") and not (rest and rest[-1] == "("):
        raise ValueError(symbol)
    letter = f"<mn>{name}</mn>" if name.isdigit() else f"<mi>{GREEK.get(name, name)}</mi>"
    return f"<msub>{letter}{index}</msub>" if "_" in symbol else letter
