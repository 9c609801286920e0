"""Your data: targets from labels, and which examples train, validate and test.

    a a a b b b, of one group each    ->    train a b, val a b, test a b

Classes keep their shares; no group lies in two splits; what a split lacks, or has from another, is
said."""

import re

import numpy as np

from files import UserError
from tasks import IGNORE, SPLITS
from tasks.making import stratified
from tasks.table import MISSING, value

SPLIT_NAMES = dict(
    train="train",
    training="train",
    val="val",
    validation="val",
    valid="val",
    dev="val",
    test="test",
    testing="test",
)


def check_each(place, right, problem):
    """Raise UserError with `problem` for the first example that is not `right` (n,), if there is
    one."""
    if not np.all(right):
        raise UserError(f"{place}, example {np.argmin(right)} (counted from 0): {problem}")


def targets_own(request, place, labels, known, column):
    """Convert labels (n,) to targets (n,), ignoring those that are not known. Return targets and
    the names of the classes, or () for regression. column: of a table, where labels were read, or
    "none". Several labels (n, k), 0 or 1, stay as they are; labels of positions, texts (n, l),
    become classes or IGNORE."""
    y = np.zeros(len(labels))
    if labels.dtype.kind not in "biufUMm":
        raise UserError(f"{place}: labels are {labels.dtype}; they must be numbers or names")
    if labels.ndim == 1 and labels.dtype.kind == "f":
        check_each(place, ~known | np.isfinite(labels), "its label is infinite")
    if labels.ndim == 2 and request.regression:
        raise UserError(
            f"{place}: --regression predicts one number per sequence, but y has the shape "
            f"{labels.shape}"
        )
    if request.regression:
        try:
            y[known] = as_numbers(labels[known])
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{place}: not every label is a number ({error}); if the label is another column, "
                "give "
                "--label COLUMN; if labels are classes, leave --regression out"
            ) from None
        check_each(place, np.abs(y) < 1e300, "its label is infinite")
        return y, ()
    if labels.ndim == 2 and labels.dtype.kind != "U":
        several = [*map(str, range(labels.shape[1]))] if column == "none" else column.split(",")
        return np.nan_to_num(labels).astype(int), several
    if labels.ndim == 2:
        names = np.unique(labels[labels != ""])
        if not 1 < len(names) <= 256:
            raise UserError(
                f"{place}: {len(names)} different labels of positions, but there must be 2 to 256 "
                "classes "
                "(numbers below 0 mean: no label)"
            )
        return np.where(labels == "", IGNORE, np.searchsorted(names, labels)), names.tolist()
    if labels.dtype.kind == "f" and not (labels[known] % 1).any():
        labels = np.where(known, labels, 0).astype(int)  # 1.0 is class 1
    if labels.dtype.kind == "U":  # likewise
        labels = np.array([re.sub(r"^([+-]?\d+)\.0+$", r"\1", name) for name in labels.tolist()])
    names, y[known], sizes = np.unique(labels[known], return_inverse=True, return_counts=True)
    for name, size in zip(names.astype(str).tolist(), sizes):
        if name.lower() in MISSING | {"-1", "unknown"} and [*names.astype(str)] != ["-1", "1"]:
            print(
                f"note: {size:,} examples are of the class {name!r}; if they have no label, leave "
                "it empty (in an "
                f".npz: missing={name!r})"
            )
    hint = (
        ""
        if column == "none"
        else (
            f"labels are those of column {column}; --label COLUMN names another, --label -1 the "
            "last, --label none: there "
            "is none; "
        )
    )
    hint = (
        f" ({hint}if labels are numbers to predict, use --regression of data.py or run_all.sh own)"
    )
    if not 1 < len(names) <= 256:
        raise UserError(
            f"{place}: {len(names)} different labels, but there must be 2 to 256 classes{hint}"
        )
    single = names[np.argmin(sizes)]
    check_each(
        place,
        ~known | (labels != single) | (sizes.min() > 1),
        f"class {single} has only one example{hint}",
    )
    return y.astype(int), names.astype(str).tolist()


def as_numbers(labels):
    """Convert labels (n,) to float64; texts may have a decimal comma."""
    return (
        np.array([*map(value, labels.tolist())])
        if labels.dtype.kind == "U"
        else labels.astype(np.float64)
    )


def draw(classes, group, seed, shares):
    """Split examples into disjoint parts with about these shares of all examples and of every class
    (n,). No two parts have examples of one group (n,); None: every example is a group."""
    order = stratified(classes, seed)
    if group is None:
        where, group = np.empty(len(classes), int), np.arange(len(classes))
        for k, part in enumerate(
            np.split(order, [round(share * len(classes)) for share in np.cumsum(shares[:-1])])
        ):
            where[part] = k
    else:
        names, group = np.unique(group, return_inverse=True)
        has = np.stack(
            [
                np.bincount(classes[group == g], minlength=classes.max() + 1)
                for g in range(len(names))
            ]
        )
        lacking, where = np.outer(shares, has.sum(0)), np.full(len(names), -1)  # (parts, classes)
        shuffled = np.random.default_rng([4242, seed]).permutation(len(names))
        # the largest first
        for i, g in enumerate(shuffled[np.argsort(-has[shuffled].sum(1), kind="stable")]):
            empty = [k not in where for k in range(len(shares))]  # the last go to these
            may = empty if len(names) - i <= sum(empty) else True
            where[g] = np.argmax(np.where(may, lacking @ has[g], -np.inf))
            lacking[where[g]] -= has[g]
    fill(where, group, classes, len(shares))
    return [order[where[group[order]] == k] for k in range(len(shares))]


def fill(where, group, classes, parts):
    """Move groups until every part has an example of each class that three groups have, if no part
    loses a class by it. where (groups,): the part of each group, changed in place; group, classes
    (n,): of each example."""
    counts = np.zeros((parts, classes.max() + 1), int)
    np.add.at(counts, (where[group], classes), 1)
    for c in np.flatnonzero((counts == 0).any(0)):
        mine = np.unique(group[classes == c])
        for k in np.flatnonzero(counts[:, c] == 0) if len(mine) >= 3 else ():
            for g in mine[::-1]:
                has = np.bincount(classes[group == g], minlength=counts.shape[1])
                if (counts[where[g]] > has)[has > 0].all():
                    counts[where[g]] -= has
                    counts[k] += has
                    where[g] = k
                    break


def split_own(request, place, own):
    """Return targets (n,), the examples of train, val and test, and the fields that `open_task`
    fills in. Without `split`, parts are 70, 15 and 15 %; without "val" in it, 15 % of "train"
    become val. Classes keep their shares. Unlabelled training examples come after the labelled
    ones; val and test leave unlabelled ones out."""
    n, split, group = (
        len(own.series),
        *(part if part is None else np.asarray(part) for part in own[3:5]),
    )
    if split is not None:
        split = np.array(
            [SPLIT_NAMES.get(name, name) for name in np.char.lower(split.astype(str)).tolist()]
        )
    known, y, names = own.known, np.zeros(n), ()
    if known.any():
        column = own.layout.label_column if own.layout else "none"
        y, names = targets_own(request, place, own.labels, known, column)
    classes = y if names and y.ndim == 1 else np.zeros(n, int)
    rows = np.flatnonzero(known | ~known.any())

    def parts_of(some, shares):
        theirs = group if group is None else group[some]
        return [some[part] for part in draw(classes[some], theirs, request.seed, shares)]

    if split is None:
        parts = parts_of(rows, (0.7, 0.15, 0.15))
    else:
        check_each(place, np.isin(split, SPLITS), "its split is none of train, val and test")
        parts = [rows[split[rows] == name] for name in SPLITS]
        if len(parts[0]) and not (split == "val").any():  # every class stays in training
            kept = max(round(0.85 * len(parts[0])), len(np.unique(classes[parts[0]]))) / len(
                parts[0]
            )
            parts[:2] = parts_of(parts[0], (kept, 1 - kept))
            parts[2] = parts[2][stratified(classes[parts[2]], request.seed)]
        else:
            parts = [part[stratified(classes[part], request.seed)] for part in parts]
    check_each(
        place, ~known | np.isin(classes, classes[parts[0]]), "no training example has its label"
    )
    if not all(map(len, parts)) or known.any() and len(np.unique(y[parts[0]])) < 2:
        groups = "" if group is None else f", of {len(np.unique(group))} groups"
        hint = (
            "; no class has an example to spare for validation"
            if len(parts[0]) and not len(parts[1])
            else ""
        )
        raise UserError(
            f"{place}: {' / '.join(str(len(part)) for part in parts)} examples to train, validate "
            "and test"
            f"{groups}; every split needs an example with a label, and training two different "
            f"labels{hint}"
        )
    for name, part in [*zip(SPLITS, parts)][y.ndim == 1 :]:  # training has every class
        there = (
            classes[part]
            if y.ndim == 1
            else np.unique(y[part])
            if own.labels.dtype.kind == "U"
            else (np.flatnonzero(y[part].any(0)))
        )
        if lacking := sorted({*range(len(names))} - {*there}):
            print(
                f"note: {name} has no example of {len(lacking)} of {len(names)} classes: "
                f"{', '.join(names[c] for c in lacking[:5])}{', ...' if len(lacking) > 5 else ''}"
            )
    more = np.setdiff1d(np.arange(n), rows)
    more = more if split is None else more[split[more] == "train"]
    if group is not None:
        for one, two in (0, 1), (0, 2), (1, 2):
            if len(both := np.intersect1d(group[parts[one]], group[parts[two]])):
                raise UserError(
                    f"{place}: group {both[0]} has examples in {SPLITS[one]} and in {SPLITS[two]}"
                )
        more = more[~np.isin(group[more], group[np.concatenate(parts[1:])])]
    found = dict(classes=len(names), names=names)
    if y.ndim == 2:
        found["target"] = "positions" if own.labels.dtype.kind == "U" else "labels"
    if known.any() and not names:
        low, high = found["ends"] = [y[parts[0]].min(), y[parts[0]].max()]
        y = (y - low) / (high - low) * 2 - 1
    if not known.all():
        found["labelled"] = len(parts[0]) if known.any() else 0
        parts[0] = np.append(parts[0], more)
    return y, parts, found


def leaks(series, parts):
    """Print how many examples of val and test are in another split, too, or overlap the row before
    or after them, which is in another split, as windows of one recording do."""
    split, where = {i: name for name, part in zip(SPLITS, parts) for i in part.tolist()}, {}
    keys = [hash(one if isinstance(one, str) else one.tobytes()) for one in series]
    for i, name in split.items():
        where.setdefault(keys[i], set()).add(name)
    held = [i for i, name in split.items() if name != "train"]
    same = {i for i in held if len(where[keys[i]]) > 1}
    pairs = [
        (i, i + 1)
        for i in range(len(series) - 1)
        if {i, i + 1} <= split.keys() and split[i] != split[i + 1]
    ]
    beside = {
        *np.ravel([pair for pair in pairs if overlap(*(series[i] for i in pair))]).tolist()
    } & {*held} - same
    words = "overlap the row beside them, which is in another split (give --group, one group per recording)"
    for some, words in (same, "are in another split, too"), (beside, words):
        if some:
            print(
                f"note: {len(some):,} of {len(held):,} sequences of val and test {words}; scores "
                "may be too good"
            )


def overlap(one, two):
    """Return whether a series ends as another begins, in a quarter of it or more and with more than
    four values."""
    if isinstance(one, str) or min(len(one), len(two)) < 8:
        return False
    first, second = (one[1 + i : len(one) - 1 + i] == two[i] for i in (0, 1))
    same = (first & second).reshape(len(one) - 2, -1).all(1)
    starts = np.flatnonzero(same)[:20] + 1  # two positions agree; many such places are repetition
    ends = [one[start : start + len(two)] for start in starts if 4 * (len(one) - start) >= len(two)]
    return any(
        np.array_equal(end, two[: len(end)], equal_nan=True) and len(np.unique(end)) > 4
        for end in ends
    )
