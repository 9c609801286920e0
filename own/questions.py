"""What your data do not say is asked: the functions called ask_... raise UserError with a question
and its answers, or return because nothing is uncertain.

    subject,label,t0, ...    ->    is column subject a sample? --group subject ..."""

import re
import warnings
from collections import Counter
from itertools import permutations

import numpy as np

from files import UserError
from own.cells import MISSING, PAGE, as_number, is_number, number_or_none, refuse_thousands
from own.table import COUNTS, FOLDS, GROUPS, SPLIT_NAMES, TIMES, listed, stem_of, words_of

FEW = 64  # a recording has fewer channels
# A text that is a date or a time of the day begins so.
TIME = r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?!\d)|\d{1,2}-[A-Za-z]{3}-\d{2,4}|\d{1,2}:\d\d"


def ask_if_long(table, layout, kind):
    """Ask about a table that looks like a row per position."""
    names = [*table.frame.columns]
    answered = layout.id is not None or layout.label in ("0", str(names[0])) or kind == "samples"
    if answered or len(names) < 3:
        return
    if pair := pair_in_runs(table) or pair_of_grid(table):
        first, second = pair
        flags = f"--id {first} --time {second} and --label COLUMN, or --label none"
        looks = f"{table.path} looks like a long table, a row per position; give {flags}"
        others = f"if {first} is the label: --label {first}; if a row is a sequence: --samples"
        raise UserError(f"{looks}; {others}")


def pair_in_runs(table):
    """Return the first two columns if the first has runs of equal names, within which the second
    rises, in a wide table by one. Else None."""
    first, second = table.frame.columns[:2]
    if not table.frame[second].map(is_number).all():
        return None
    names = table.texts(first)
    same = names[1:] == names[:-1]
    steps = np.diff(table.frame[second].map(as_number).to_numpy())[same]
    runs = len({*names})
    in_runs = 1 < runs < len(names) / 2 and (~same).sum() == runs - 1
    rises = (steps > 0).all() if table.frame.shape[1] <= 9 else (steps == 1).all()
    return (first, second) if in_runs and rises else None


def pair_of_grid(table):
    """Return two columns of a narrow table, each of few values, in which no two rows agree: names
    of sequences, and times. Else None."""
    frame = table.frame.astype(str)
    counts = frame.nunique()
    few = [name for name in frame.columns if counts[name] <= len(frame) / 2]
    if frame.shape[1] > 9 or len(frame) <= 20:
        return None
    for first, second in permutations(few, 2):
        texts = frame[second].tolist()
        times = look_like_times(texts) or all(map(is_number, texts))
        is_time = words_of(first) & TIMES or look_like_times(frame[first].tolist())
        full = counts[first] * counts[second] <= 2 * len(frame)
        if full and times and not is_time and not frame[[first, second]].duplicated().any():
            return first, second
    return None


def ask_about_names(table, layout, columns, kind):
    """Ask about a column whose name, or content, says that it is no sample. Not about one of many
    that differ by a number, as time_0, time_1, nor about fractions, as of a set_temp."""
    stems = Counter(stem_of(name) for name in columns)
    for name in columns if layout.text is None else ():
        words = words_of(name) if table.header and stems[stem_of(name)] < 4 else set()
        first = table.frame[name].iloc[0]
        if not words and (isinstance(first, (list, np.ndarray)) or is_number(first)):
            continue
        texts = table.texts(name)
        if any(map(is_fraction, texts)):
            words = words if words <= TIMES else set()
        drop = f"--drop {name} leaves it out"
        advice = f"--group {name} keeps its rows in one split"
        asked = f"is column {name} a sample?"
        if words & TIMES or kind != "samples" and look_like_times(texts):
            asked = f"column {name} holds times: is a row a time of a recording?"
            advice = f"Windows of recordings: {PAGE}; if a column names the sequence of a row: "
            advice += f"--id COLUMN --time {name}"
        elif words & FOLDS or {text.lower() for text in texts} <= SPLIT_NAMES.keys():
            advice = f"--split {name}: train, val, test or the number of a fold"
        elif words & COUNTS and not words & GROUPS:
            advice += f"; if a row is a position: --id {name} --time COLUMN"
        elif not words & GROUPS:
            continue
        rename = "; rename it if it is a sample" if words else ""
        raise UserError(f"{table.path}: {asked} {drop}; {advice}{rename}")


def is_fraction(text):
    """Return whether a text is a number, and not a whole one."""
    number = number_or_none(text)
    return number is not None and number % 1 > 0


def look_like_times(texts):
    """Return whether texts are dates, or times of a day."""
    return bool(texts[0].strip() and all(re.match(TIME, text.strip()) for text in texts if text))


def ask_about_values(table, label_columns, columns, values):
    """Ask about a column of values (n, columns) that is empty, rises or falls with the rows, or
    holds whole numbers or repetitions beside columns that do not; and about rows as those of a
    recording."""
    n = len(values)
    if n < 10:
        return
    steps = np.diff(values, axis=0)
    whole = (np.nan_to_num(values) % 1 == 0).all(0)
    runs = 1 + np.count_nonzero(steps, 0)
    different = np.array([len(np.unique(column)) for column in values.T])
    repeats = (runs <= n / 3) & (different > 1) & (np.median(runs) > n / 2)
    recording = f"; if a row is a time: {PAGE}: Windows of recordings"
    problems = (
        (np.isnan(values).all(0), "is empty", ""),
        ((steps > 0).all(0) | (steps < 0).all(0), "rises or falls with the rows", recording),
        (whole & (different > 1) & (whole.mean() <= 0.5), "holds whole numbers, others not", ""),
        (repeats, "repeats its values over many rows", ""),
    )
    for suspects, problem, more in problems:
        for name in np.array(columns, object)[suspects]:
            advice = f"--drop {name} leaves it out; --group {name}: its rows belong together"
            asked = f"{table.path}: column {name} {problem}: is it a sample? {advice}{more}"
            raise UserError(f"{asked}; --label {name}; if all columns are samples: --samples")
    stems = Counter(map(stem_of, columns))
    if len(stems) > 1 and len({*stems.values()}) == 1 and min(stems.values()) > 3:
        problem = f"are {listed(columns)} channels side by side? {PAGE}: Channels side by side"
        raise UserError(f"{table.path}: {problem}; if a row is one series: --samples")
    labels = table.texts(label_columns[0]) if label_columns else np.zeros(n)
    same = labels[1:] == labels[:-1]
    if len(columns) > FEW or n < max(50, 10 * len(columns)) or same.mean() <= 0.5:
        return
    # von Neumann's ratio: 1 if rows are independent, near 0 if each is much like the one above it
    with warnings.catch_warnings(action="ignore"):  # of columns without a value
        members = [labels == name for name in {*labels}]
        within = [np.nanvar(values[rows], 0) * rows.mean() for rows in members]
        ratio = np.nanmean(steps[same] ** 2, 0) / np.maximum(2 * np.sum(within, 0), 1e-300)
        smooth = np.nanmedian(ratio) < 0.5
    if smooth:
        problem = "each row is much like the one above it, as in a recording with a row per time"
        advice = f"Windows of recordings: {PAGE}; if a row is a sequence"
        raise UserError(f"{table.path}: {problem}; {advice} of {len(columns)} positions: --samples")


def ask_about_channels(table, roles, columns, values, indices):
    """Ask about a column of a long table that is the same at all positions of each sequence: it is
    no channel; and about a group or split that differs within one. indices: indices of the rows of
    each sequence."""
    for role in {"group", "split"} & roles.keys():
        texts = table.texts(roles[role])
        if any(len({*texts[rows]}) > 1 for rows in indices):
            problem = f"{roles['id']} has several values of {roles[role]}"
            raise UserError(
                f"{table.path}: {problem}; if both name a sequence: {PAGE}: Wide to long"
            )
    constant = np.all([np.ptp(values[rows], 0) == 0 for rows in indices], 0)
    different = np.array([len(np.unique(column)) > 1 for column in values.T])
    if len(indices) < len(values):
        for name in np.array(columns, object)[constant & different]:
            problem = f"column {name} is the same at all positions of a sequence"
            advice = f"--group {name} keeps its sequences in one split; --drop {name} leaves it out"
            raise UserError(f"{table.path}: {problem}: is it a channel? {advice}")


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
    if texts and not last_fits:
        return
    if not first_fits and (all(map(is_number, first)) or last_fits):
        problem = "the first column does not look like the label"
        if last_fits:
            problem = f"the last column looks like the label ({last[0]!r}), the first does not"
        advice += "; if labels are numbers to predict: --regression"
        raise UserError(f"{table.path}: {problem} ({first[0][:40]!r}); {advice}")
    names = not any(map(is_number, first))
    usual = names and looks_like_classes(table.texts(columns[-2]))  # small whole numbers
    if first_fits and last_fits and not usual:
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
    for sign in ";|,/":
        several = {label for label in labels if sign in label and not is_number(label)}
        names = [name.strip() for label in several for name in label.split(sign)]
        if {*names} & {*labels} or sign in ";|" and len(names) > len({*names}):
            problem = f"are labels such as {min(several)!r} several? {PAGE}: Several labels"
            raise UserError(f"{place}: {problem}; if they are one, write it without {sign!r}")


def ask_about_merged(path, labels):
    """Ask about a label of a workbook that is empty below a filled one."""
    if labels is not None and np.ndim(labels) == 1 and "" in [*labels[1:]]:
        problem = f"{path}: {[*labels].count('')} labels are empty; are their cells merged?"
        raise UserError(f"{problem} {PAGE}: Merged cells; if there is no label, save it as .csv")


def point_out_sentinels(values, of):
    """Print which of the values (n, channels) stands in many cells, and farther from all others
    than these lie apart. of: their noun."""
    for channel in values.T:
        numbers, counts = np.unique(channel[np.isfinite(channel)], return_counts=True)
        for edge, others in ((0, numbers[1:]), (-1, numbers[:-1])):
            if len(others) > 1 and counts[edge] > 2:
                gap = min(abs(numbers[edge] - others[[0, -1]]))
                if gap > others[-1] - others[0]:
                    stands = f"{numbers[edge]:g} stands in {counts[edge]:,} {of}"
                    print(f"note: {stands}, far from all others; is it missing? {PAGE}: Sentinels")
                    return
