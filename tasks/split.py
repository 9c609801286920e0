"""Your data: targets from labels, and which examples train, validate and test.

    a a a b b b, of one group each    ->    train a b, val a b, test a b

Classes keep their shares; no group lies in two splits; notes say what a split lacks or shares."""

import re

import numpy as np

from files import UserError
from tasks import IGNORE, SPLITS
from tasks.making import stratified
from tasks.table import as_number

SPLIT_NAMES = dict.fromkeys(("train", "training"), "train")  # {what a file may call it: split}
SPLIT_NAMES |= dict.fromkeys(("val", "validation", "valid", "dev"), "val")
SPLIT_NAMES |= dict.fromkeys(("test", "testing"), "test")


def split_names(split):
    """Return the splits of examples (n,) as SPLITS calls them."""
    names = [str(name).lower() for name in np.asarray(split).tolist()]
    return np.array([SPLIT_NAMES.get(name, name) for name in names])


def check_each(place, right, problem):
    """Raise UserError with `problem` for the first example that is not `right` (n,)."""
    if not np.all(right):
        raise UserError(f"{place}, example {np.argmin(right)} (counted from 0): {problem}")


# ---- targets -------------------------------------------------------------------------------------


def make_targets(request, place, labels, has_label, column):
    """Convert labels to targets. Return targets and the names of the classes, or () for regression.

    labels: (n,) -> classes or numbers (n,), 0 for an example without a label; several of 0 and 1
    (n, k) stay as they are; labels of positions, texts (n, l), become classes or IGNORE. has_label:
    bool (n,). column: of a table, where labels were read, or "none"."""
    if labels.dtype.kind not in "biufUMm":
        raise UserError(f"{place}: labels are {labels.dtype}; they must be numbers or names")
    if labels.ndim == 1 and labels.dtype.kind == "f":
        check_each(place, ~has_label | np.isfinite(labels), "its label is infinite")
    if request.regression:
        return number_targets(place, labels, has_label), ()
    if labels.ndim == 2 and labels.dtype.kind == "U":
        return position_targets(place, labels)
    if labels.ndim == 2:
        names = [*map(str, range(labels.shape[1]))] if column == "none" else column.split(",")
        return np.nan_to_num(labels).astype(int), names
    return class_targets(place, labels, has_label, column)


def number_targets(place, labels, has_label):
    """Convert labels (n,) to float64 (n,), 0 for an example without a label."""
    if labels.ndim == 2:
        problem = f"{place}: --regression predicts one number per sequence"
        raise UserError(f"{problem}, but y has the shape {labels.shape}")
    y = np.zeros(len(labels))
    try:
        y[has_label] = as_numbers(labels[has_label])
    except (ValueError, TypeError) as error:
        advice = "if labels are classes, leave --regression out; --label COLUMN names their column"
        raise UserError(f"{place}: not every label is a number ({error}); {advice}") from None
    check_each(place, np.abs(y) < 1e300, "its label is infinite")
    return y


def as_numbers(labels):
    """Convert labels (n,) to float64; texts may have a decimal comma."""
    if labels.dtype.kind == "U":
        return np.array([as_number(label) for label in labels.tolist()])
    return labels.astype(np.float64)


def position_targets(place, labels):
    """Convert labels of positions, texts (n, l), "" for none -> classes (n, l), names."""
    names = np.unique(labels[labels != ""])
    if not 1 < len(names) <= 256:
        problem = f"{place}: {len(names)} different labels of positions"
        raise UserError(f"{problem}, but there must be 2 to 256 classes (below 0 means: no label)")
    return np.where(labels == "", IGNORE, np.searchsorted(names, labels)), names.tolist()


def class_name(label):
    """Return the name of the class of a label: 1.0 is 1."""
    return re.sub(r"^([+-]?\d+)\.0+$", r"\1", str(label).strip())


def class_targets(place, labels, has_label, column):
    """Convert labels (n,) -> classes (n,), 0 for an example without a label, and names. UserError
    if there are not 2 to 256 classes of at least two examples."""
    if labels.dtype.kind == "f" and not (labels[has_label] % 1).any():
        labels = np.where(has_label, labels, 0).astype(int)  # 1.0 is class 1
    if labels.dtype.kind == "U":  # likewise
        labels = np.array([class_name(label) for label in labels.tolist()])
    names, classes, sizes = np.unique(labels[has_label], return_inverse=True, return_counts=True)
    y = np.zeros(len(labels), int)
    y[has_label] = classes

    hint = "if labels are numbers to predict, use --regression of data.py or run_all.sh own"
    if column != "none":
        flags = "--label COLUMN names another, --label -1 the last, --label none: there is none"
        hint = f"labels are those of column {column}; {flags}; {hint}"
    if not 1 < len(names) <= 256:
        problem = f"{place}: {len(names)} different labels"
        raise UserError(f"{problem}, but there must be 2 to 256 classes ({hint})")
    rarest = names[np.argmin(sizes)]
    problem = f"class {rarest} has only one example ({hint})"
    check_each(place, ~has_label | (labels != rarest) | (sizes.min() > 1), problem)
    return y, names.astype(str).tolist()


# ---- parts ---------------------------------------------------------------------------------------


def draw_parts(classes, group, seed, shares):
    """Split examples into disjoint parts with about these shares of all examples and of every class
    (n,). No two parts have examples of one group (n,); None: every example is a group."""
    order = stratified(classes, seed)
    if group is None:
        group = np.arange(len(classes))
        part_of_group = np.empty(len(classes), int)
        ends = [round(share * len(classes)) for share in np.cumsum(shares[:-1])]
        for part, examples in enumerate(np.split(order, ends)):
            part_of_group[examples] = part
    else:
        _, group = np.unique(group, return_inverse=True)
        part_of_group = place_groups(classes, group, seed, shares)
    fill(part_of_group, group, classes, len(shares))
    part_of_example = part_of_group[group[order]]
    return [order[part_of_example == part] for part in range(len(shares))]


def place_groups(classes, group, seed, shares):
    """Assign groups to parts, the largest first: each to the part that lacks most of what it has.
    group (n,): of each example, from 0. Return the part of each group (groups,)."""
    groups = group.max() + 1
    sizes = np.stack(
        [np.bincount(classes[group == g], minlength=classes.max() + 1) for g in range(groups)]
    )  # (groups, classes)
    lacking = np.outer(shares, sizes.sum(0))  # (parts, classes)
    part_of_group = np.full(groups, -1)
    shuffled = np.random.default_rng([4242, seed]).permutation(groups)
    largest_first = shuffled[np.argsort(-sizes[shuffled].sum(1), kind="stable")]
    for i, g in enumerate(largest_first):
        empty = np.array([part not in part_of_group for part in range(len(shares))])
        gain = lacking @ sizes[g]  # (parts,)
        if groups - i <= empty.sum():  # the last groups go to empty parts
            gain = np.where(empty, gain, -np.inf)
        part_of_group[g] = np.argmax(gain)
        lacking[part_of_group[g]] -= sizes[g]
    return part_of_group


def fill(part_of_group, group, classes, parts):
    """Move groups until every part has an example of each class that three groups have, if no part
    loses a class by it. part_of_group (groups,) is changed; group, classes (n,): of examples."""
    counts = np.zeros((parts, classes.max() + 1), int)
    np.add.at(counts, (part_of_group[group], classes), 1)
    for label in np.flatnonzero((counts == 0).any(0)):
        groups = np.unique(group[classes == label])
        if len(groups) < 3:
            continue
        for part in np.flatnonzero(counts[:, label] == 0):
            for g in groups[::-1]:
                has = np.bincount(classes[group == g], minlength=counts.shape[1])
                if (counts[part_of_group[g]] > has)[has > 0].all():
                    counts[part_of_group[g]] -= has
                    counts[part] += has
                    part_of_group[g] = part
                    break


def split_examples(request, place, examples):
    """Return targets (n,), the indices of train, val and test, and the fields that `open_task`
    fills in. Without `split`, parts are 70, 15 and 15 %; without "val" in it, 15 % of "train"
    become val. Classes keep their shares. Unlabelled training examples come after the labelled
    ones; val and test leave unlabelled ones out."""
    n = len(examples.series)
    has_label = examples.known
    group = None if examples.group is None else np.asarray(examples.group)
    split = examples.split
    if split is not None:
        split = split_names(split)
        check_each(place, np.isin(split, SPLITS), "its split is none of train, val and test")
    y = np.zeros(n)
    names = ()
    target = ""  # as Task.target
    if has_label.any():
        column = examples.layout.label_column if examples.layout else "none"
        y, names = make_targets(request, place, examples.labels, has_label, column)
    if y.ndim == 2:
        target = "positions" if examples.labels.dtype.kind == "U" else "labels"
    classes = y if names and not target else np.zeros(n, int)  # of which parts have equal shares
    usable = np.flatnonzero(has_label | ~has_label.any())
    parts = divide(usable, classes, group, split, request.seed)
    trained = np.isin(classes, classes[parts[0]])
    check_each(place, ~has_label | trained, "no training example has its label")
    refuse_empty(place, parts, y if has_label.any() else None, group)
    point_out_lacking(y, target, parts, names)
    if group is not None:
        refuse_shared_groups(place, parts, group)
    fields = dict(classes=len(names), names=names)
    if target:
        fields["target"] = target
    if has_label.any() and not names:
        low, high = fields["ends"] = [y[parts[0]].min(), y[parts[0]].max()]
        y = (y - low) / (high - low) * 2 - 1
    if not has_label.all():
        fields["labelled"] = len(parts[0]) if has_label.any() else 0
        unlabelled = np.setdiff1d(np.arange(n), usable)
        parts[0] = np.append(parts[0], for_pretraining(unlabelled, parts, group, split))
    return y, parts, fields


def for_pretraining(unlabelled, parts, group, split):
    """Return those unlabelled examples that are not of another split, nor of a group there."""
    if split is not None:
        unlabelled = unlabelled[split[unlabelled] == "train"]
    if group is not None:
        held_out = group[np.concatenate(parts[1:])]
        unlabelled = unlabelled[~np.isin(group[unlabelled], held_out)]
    return unlabelled


def divide(usable, classes, group, split, seed):
    """Return the indices of train, val and test among the usable examples."""

    def draw_from(examples, shares):
        groups = None if group is None else group[examples]
        return [examples[part] for part in draw_parts(classes[examples], groups, seed, shares)]

    if split is None:
        return draw_from(usable, (0.7, 0.15, 0.15))
    parts = [usable[split[usable] == name] for name in SPLITS]
    if len(parts[0]) and not (split == "val").any():
        size = len(parts[0])
        # every class stays in training
        share = max(round(0.85 * size), len(np.unique(classes[parts[0]]))) / size
        parts[:2] = draw_from(parts[0], (share, 1 - share))
        parts[2] = parts[2][stratified(classes[parts[2]], seed)]
        return parts
    return [part[stratified(classes[part], seed)] for part in parts]


def refuse_empty(place, parts, y, group):
    """Raise UserError if a part has no example, or training has less than two different labels. y:
    targets, or None if there is no label."""
    if all(map(len, parts)) and (y is None or len(np.unique(y[parts[0]])) > 1):
        return
    sizes = " / ".join(str(len(part)) for part in parts)
    groups = "" if group is None else f", of {len(np.unique(group))} groups"
    advice = "every split needs an example with a label, and training two different labels"
    if len(parts[0]) and not len(parts[1]):
        advice += "; no class has an example to spare for validation"
    raise UserError(f"{place}: {sizes} examples to train, validate and test{groups}; {advice}")


def refuse_shared_groups(place, parts, group):
    """Raise UserError if a group has examples in two parts."""
    for first, second in (0, 1), (0, 2), (1, 2):
        shared = np.intersect1d(group[parts[first]], group[parts[second]])
        if len(shared):
            splits = f"in {SPLITS[first]} and in {SPLITS[second]}"
            raise UserError(f"{place}: group {shared[0]} has examples {splits}")


def point_out_lacking(y, target, parts, names):
    """Print which classes a part has no example of. y: targets, of the kind `target`."""
    for split, part in zip(SPLITS, parts):
        if split == "train" and not target:  # it has every class
            continue
        present = np.flatnonzero(y[part].any(0)) if target == "labels" else np.unique(y[part])
        lacking = [name for label, name in enumerate(names) if label not in present]
        if lacking:
            classes = f"{len(lacking)} of {len(names)} classes: {', '.join(lacking[:5])}"
            print(f"note: {split} has no example of {classes}{', ...' if lacking[5:] else ''}")


# ---- leaks ---------------------------------------------------------------------------------------


def point_out_leaks(series, parts):
    """Print how many examples of val and test are in another split, too, or overlap the row before
    or after them, which is in another split, as windows of one recording do."""
    split = {i: name for name, part in zip(SPLITS, parts) for i in part.tolist()}
    keys = [hash(item if isinstance(item, str) else item.tobytes()) for item in series]
    where = {}  # {key: splits that have such a series}
    for i, name in split.items():
        where.setdefault(keys[i], set()).add(name)
    held_out = {i for i, name in split.items() if name != "train"}
    copies = {i for i in held_out if len(where[keys[i]]) > 1}
    overlapping = set()
    for i in range(len(series) - 1):
        apart = {i, i + 1} <= split.keys() and split[i] != split[i + 1]
        if apart and overlap(series[i], series[i + 1]):
            overlapping |= {i, i + 1}
    overlapping = overlapping & held_out - copies
    of = f"of {len(held_out):,} sequences of val and test"
    if copies:
        print(f"note: {len(copies):,} {of} are in another split, too; scores may be too good")
    if overlapping:
        problem = "overlap the row beside them, which is in another split"
        print(f"note: {len(overlapping):,} {of} {problem} (give --group); scores may be too good")


def overlap(first, second):
    """Return whether a series ends as another begins, in a quarter of it and with five values."""
    if isinstance(first, str) or min(len(first), len(second)) < 8:
        return False
    # (l - 2,): where two positions in a row are those with which the second begins
    pair = (first[1:-1] == second[0]) & (first[2:] == second[1])
    starts = np.flatnonzero(pair.reshape(len(first) - 2, -1).all(1))[:20] + 1  # more: repetition
    ends = [first[start : start + len(second)] for start in starts]
    return any(
        np.array_equal(end, second[: len(end)], equal_nan=True) and len(np.unique(end)) > 4
        for start, end in zip(starts, ends)
        if 4 * (len(first) - start) >= len(second)
    )
