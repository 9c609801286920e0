"""Single cells of your data: numbers, missing values, names of classes.

    "1.0e+00"    ->    the number 1.0, or the class "1"
    "5_3"        ->    no number

Labels and samples are read by the same functions."""

import re

from files import UserError, refuse_rows

PAGE = "results/own.md"  # a section for every answer
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"}  # in lower case
NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?"
COMMA = r"[+-]?\d*,\d+(e[+-]?\d+)?"  # a number with a decimal comma
THOUSANDS = r"[+-]?[1-9]\d{0,2}(,\d{3})+"  # whose commas may be between thousands


def check_each(place, right, problem, rows=None):
    """Raise BadRows with `problem` for the examples that are not `right` (n,). rows: of the file
    (n,); None: those of the examples."""
    rows = range(len(right)) if rows is None else rows
    bad = [int(row) for row, fits in zip(rows, right) if not fits]
    refuse_rows(place, {row: (f"example {row}", problem) for row in bad}, "counted from 0")


def as_number(cell):
    """Return a cell as a float, NaN if it is missing. ValueError if it is no number."""
    text = str(cell).strip().lower()
    if text in MISSING:
        return float("nan")
    if re.fullmatch(COMMA, text):
        return float(text.replace(",", "."))
    if not re.fullmatch(NUMBER, text):
        raise ValueError(f"{text[:40]!r} is no number")
    return float(text)


def number_or_none(cell):
    try:
        return as_number(cell)
    except ValueError:
        return None


def is_number(cell):
    """Return whether a cell is a number or says that one is missing."""
    return number_or_none(cell) is not None


def class_name(label):
    """Return the name of the class of a label: a whole number in whatever form is that number. A
    code as 01 stays."""
    text = str(label).strip()
    number = None if re.match(r"[+-]?(0\d|\d+$|$)", text) else number_or_none(text)
    whole = number is not None and number % 1 == 0
    return str(int(number)) if whole else text


def refuse_thousands(place, cells):
    """Raise UserError if commas in the numbers among texts may be between thousands."""
    commas = [cell for cell in cells if "," in cell and is_number(cell)]
    commas += [cell for cell in cells if re.fullmatch(THOUSANDS, cell.strip())]
    if not commas:
        return
    thousands = all(re.fullmatch(THOUSANDS, cell.strip()) for cell in commas)
    if thousands or any("." in cell and is_number(cell) for cell in cells):
        problem = f"{place}: does the comma in {commas[0]!r} mark thousands or decimals?"
        raise UserError(f"{problem} Write 1234 for thousands, 1.234 for decimals")
