"""What a table does not say is asked: each function raises UserError with a question and its
answers, or returns because nothing is uncertain.

    subject,label,t0, ...    ->    is column subject a sample? --group subject ..."""

import re

import numpy as np

from files import UserError
from own.cells import MISSING, PAGE, as_number, is_number, number_or_none, refuse_thousands
from own.table import COUNTS, FOLDS, GROUPS, SPLIT_NAMES, TIMES, words_of

FEW = 12  # a sequence in a row usually has more positions than a recording has channels


def ask_if_long(table, layout):
    """Ask about a table that looks like a row per position: the first column has runs of equal
    names, within which the second rises."""
    path, frame, _ = table
    first, second = [*frame.columns, None][:2]
    asked = layout.id is not None or layout.label in ("0", str(first))
    if asked or not 2 < frame.shape[1] <= 9 or not frame[second].map(is_number).all():
        return
    names = table.texts(first)
    order = frame[second].map(as_number).to_numpy()
    same = names[1:] == names[:-1]
    runs = len({*names})
    if 1 < runs < len(names) / 2 and (~same).sum() == runs - 1 and (np.diff(order)[same] > 0).all():
        problem = f"{path} looks like a long table, a row per position"
        flags = f"--id {first} --time {second} and --label COLUMN, or --label none"
        raise UserError(f"{problem}; give {flags}; if {first} is the label: --label {first}")


def ask_about_names(table, layout, columns, kind):
    """Ask about a column whose name, or content, says that it is no sample."""
    if layout.text is not None:
        return
    for name in columns:
        texts = table.texts(name)
        words = words_of(name) if table.header else set()
        drop = f"--drop {name} leaves it out"
        advice = f"--group {name} keeps its rows in one split"
        asked = f"is column {name} a sample?"
        if layout.id is None and (words & TIMES or kind != "samples" and look_like_times(texts)):
            asked = f"column {name} holds times: is a row a time of a recording?"
            advice = f"Windows of recordings: {PAGE}; if a column names the sequence of a row: "
            advice += f"--id COLUMN --time {name}"
        elif words & FOLDS or {text.lower() for text in texts} <= SPLIT_NAMES.keys():
            advice = f"--split {name}: train, val, test or the number of a fold"
        elif words & COUNTS and not words & GROUPS and not any(map(is_fraction, texts)):
            advice += f"; if a row is a position: --id {name} --time COLUMN"
        elif not words & GROUPS:
            continue
        rename = "; rename it if it is a sample" if words else ""
        raise UserError(f"{table.path}: {asked} {drop}; {advice}{rename}")


def is_fraction(text):
    """Return whether a text is a number, and not a whole one, as those of a heat_index."""
    number = number_or_none(text)
    return number is not None and number % 1 > 0


def look_like_times(texts):
    """Return whether texts are dates, or whole numbers that rise as the seconds since 1970 do."""
    if re.match(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}\b", texts[0].strip()):
        return True
    if len(texts) < 10 or not re.fullmatch(r"\s*\d{9,}\s*", texts[0]):
        return False
    numbers = [number_or_none(text) for text in texts]
    return None not in numbers and bool((np.diff(numbers) > 0).mean() > 0.9)


def ask_about_values(table, label_columns, columns, values):
    """Ask about a column of values (n, columns) that counts the rows, or that holds one whole
    number for many rows beside other columns; and about rows as those of a recording."""
    n = len(values)
    whole = (np.nan_to_num(values) % 1 == 0).all(0)
    steps = np.diff(values, axis=0)
    for j, name in enumerate(columns if n > 9 else ()):
        if (steps[:, j] == 1).all():
            problem = f"column {name} counts the rows"
        else:
            runs = 1 + np.count_nonzero(steps[:, j])
            few = 1 < len(np.unique(values[:, j])) <= n / 3 and runs <= n / 3
            if not few or not whole[j] or whole.mean() > 0.5:
                continue
            problem = f"column {name} holds one whole number for many rows"
        advice = f"--drop {name} leaves it out; --group {name}: its rows belong together"
        raise UserError(f"{table.path}: {problem}; {advice}; if it is a sample: --samples")
    if len(columns) > FEW or n < 10 * len(columns) or n < 50:
        return
    labels = table.texts(label_columns[0]) if label_columns else np.zeros(n)
    same = labels[1:] == labels[:-1]
    if same.mean() <= 0.5:
        return
    # von Neumann's ratio: 1 if rows are independent, near 0 if each is much like the one above it
    within = [
        np.nanvar(values[labels == label], 0) * (labels == label).mean() for label in {*labels}
    ]
    ratio = np.nanmean(steps[same] ** 2, 0) / np.maximum(2 * np.sum(within, 0), 1e-300)
    if np.nanmedian(ratio) < 0.5:
        problem = "each row is much like the one above it, as in a recording with a row per time"
        advice = (
            f"Windows of recordings: {PAGE}; if a row is a sequence of {len(columns)} positions"
        )
        raise UserError(f"{table.path}: {problem}; {advice}: --samples")


def ask_about_texts(table, name):
    """Ask about a column of texts that are numbers, or lists of numbers or names."""
    texts = [text.strip() for text in table.texts(name)]
    if all(map(is_number, texts)):
        problem = "holds one number a row"
        advice = f"rows of a recording: {PAGE}: Windows of recordings"
    elif all(re.fullmatch(r"[\[(].*[\])]", text, re.DOTALL) for text in texts):
        problem = "holds lists"
        advice = f"{PAGE}: Lists in cells"
    elif all(len(text.split()) > 4 and all(map(is_number, text.split())) for text in texts):
        problem = "holds several numbers a row"
        advice = f"{PAGE}: Lists in cells"
    else:
        return
    raise UserError(
        f"{table.path}: column {name} {problem}; {advice}; if it is a text: --text {name}"
    )


def ask_about_label(table, documents, regression):
    """Ask unless the first column of a table without a header looks like the label, and the last
    does not."""
    columns = table.frame.columns
    first, last = table.texts(columns[0]), table.texts(columns[-1])
    advice = "give --label 0, --label -1 or --label none"
    shown = f"({first[0][:40]!r}) or the last ({last[0][:40]!r})"
    if regression:
        problem = f"is the number to predict in the first column {shown}?"
        raise UserError(f"{table.path}: {problem} {advice}")
    if documents > 1:
        return
    first_fits, last_fits = looks_like_classes(first), looks_like_classes(last)
    texts = len(columns) == 2 and not all(map(is_number, last))
    if not first_fits and (all(map(is_number, first)) or last_fits):
        problem = "the first column does not look like the label"
        if last_fits:
            problem = f"the last column looks like the label ({last[0]!r}), the first does not"
        advice += "; if labels are numbers to predict: --regression"
        raise UserError(f"{table.path}: {problem} ({first[0][:40]!r}); {advice}")
    names = not any(map(is_number, first))
    usual = names and looks_like_classes(table.texts(columns[-2]))  # small whole numbers
    if first_fits and last_fits and not texts and not usual:
        raise UserError(f"{table.path}: is the label in the first column {shown}? {advice}")


def looks_like_classes(texts):
    """Return whether texts (n,) are names or whole numbers, most of them more than once."""
    texts = [text.strip() for text in texts if text.strip().lower() not in MISSING]
    numbers = [number for number in map(number_or_none, texts) if number is not None]
    whole = not numbers or len(numbers) == len(texts) and not any(x % 1 for x in numbers)
    return whole and 1 < len({*texts}) <= max(2, len(texts) / 3)


def ask_about_labels(place, labels):
    """Ask if labels, texts, may have commas between thousands, say that a label is missing, or hold
    several each."""
    refuse_thousands(place, labels)
    missing = [label for label in labels if label.lower() in MISSING]
    if missing:
        problem = f"{len(missing):,} of {len(labels):,} labels are {missing[0]!r}: is it a class?"
        raise UserError(f"{place}: {problem} Rename it; where there is no label, leave it empty")
    for sign in ";|":
        several = {label for label in labels if sign in label}
        names = [name.strip() for label in several for name in label.split(sign)]
        if len(names) > len({*names}) or {*names} & {*labels}:
            problem = f"are labels such as {min(several)!r} several? {PAGE}: Several labels"
            raise UserError(f"{place}: {problem}; if they are one, write it without {sign!r}")


def ask_about_merged(path, ending, examples):
    """Ask about a label of a workbook that is empty below a filled one."""
    labels = examples.labels
    if ending == ".xlsx" and labels is not None and np.ndim(labels) == 1 and "" in [*labels[1:]]:
        problem = f"{path}: {[*labels].count('')} labels are empty; are their cells merged?"
        raise UserError(f"{problem} {PAGE}: Merged cells; if there is no label, save it as .csv")
