"""Your data: targets from labels, and which examples train, validate and test.

    a a a b b b, of one group each    ->    train a b, val a b, test a b

Classes keep their shares; no group lies in two splits; notes say what a split lacks or shares."""

import warnings
from itertools import permutations

import numpy as np

from files import UserError
from own.cells import MISSING, PAGE, as_number, check_each, class_name, is_number
from own.questions import ask_about_labels, point_out_sentinels
from own.table import SPLIT_NAMES
from tasks import IGNORE, SPLITS
from tasks.making import stratified


def split_names(place, split):
    """Return the splits of examples (n,) as SPLITS calls them. Of folds, which are whole numbers,
    the lowest tests, the next validates, and all others train."""
    names = [class_name(name).lower() for name in np.asarray(split).tolist()]
    if all(is_number(name) for name in names):
        folds = sorted({*names}, key=as_number)
        if len(folds) < 3:
            raise UserError(
                f"{place}: {len(folds)} folds; three are needed, to train, val and test"
            )
        print(f"fold {folds[0]} tests, fold {folds[1]} validates, all others train")
        names = [{folds[0]: "test", folds[1]: "val"}.get(name, "train") for name in names]
    split = np.array([SPLIT_NAMES.get(name, name) for name in names])
    problem = f"its split is none of train, val and test, nor a fold; {PAGE}: Splits"
    check_each(place, np.isin(split, SPLITS), problem)
    return split


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
    if labels.ndim == 1 and labels.dtype.kind == "U":
        ask_about_labels(place, labels[has_label].tolist())
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
    point_out_sentinels(y[has_label, None], "labels")
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
    if str(rarest) == str(labels[0]) and column.lstrip("-").isdigit():
        hint = f"if line 1 is a header: --label {rarest}; {hint}"
    problem = f"class {rarest} has only one example ({hint})"
    check_each(place, ~has_label | (labels != rarest) | (sizes.min() > 1), problem)
    names = [class_name(name) for name in names.astype(str).tolist()]
    usual = {*map(str, range(len(names) + 1))}
    if len(names) > 7 and all(name.isdigit() for name in names) and not {*names} <= usual:
        print(f"note: {len(names)} classes, all whole numbers; numbers to predict: --regression")
    if names[0] == "-1" and len(names) > 2:
        print("note: the label -1 is a class; no label: an empty field, or missing=-1 in the .npz")
    return y, names


# ---- parts ---------------------------------------------------------------------------------------


def draw_parts(classes, group, seed, shares):
    """Split examples into disjoint parts with about these shares of all examples and of every class
    (n,). A class with three examples is in every part. group (n,): kept together, see
    `draw_groups`; None: no groups."""
    if group is not None:
        return draw_groups(classes, group, seed, len(shares))
    order = stratified(classes, seed)
    part_of = np.empty(len(classes), int)
    ends = [round(share * len(classes)) for share in np.cumsum(shares[:-1])]
    for part, examples in enumerate(np.split(order, ends)):
        part_of[examples] = part
    for label in np.unique(classes):
        examples = np.flatnonzero(classes == label)
        for part in np.setdiff1d(range(len(shares)), part_of[examples]):
            same = np.bincount(part_of[examples], minlength=len(shares))
            spare = examples[same[part_of[examples]] > 1]
            if len(examples) > 2 and len(spare):
                part_of[spare[-1]] = part
    return [order[part_of[order] == part] for part in range(len(shares))]


def draw_groups(classes, group, seed, parts):
    """Split groups into two or three parts by scikit-learn's folds. The last parts are a fold each.
    Of up to five draws of 7, of 6 and of 5 folds, the one is kept whose parts lack fewest classes;
    there are fewer folds if there are fewer groups."""
    from sklearn.model_selection import StratifiedGroupKFold

    groups = len(np.unique(group))
    pairs = np.unique(np.stack([classes, np.unique(group, return_inverse=True)[1]]), axis=1)
    # a class of one group is in one part, whatever is drawn
    least = np.maximum(parts - np.unique(pairs[0], return_counts=True)[1], 0).sum()
    most = min(groups, np.bincount(classes).max())  # folds that scikit-learn can draw
    if most < parts:  # refused by `refuse_empty`
        return [np.arange(len(classes)), *[np.arange(0)] * (parts - 1)]
    fewest = np.inf
    for draw in range(15):
        folds = min((7, 6, 5)[draw // 5], most)
        splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=15 * seed + draw)
        fold_of = np.empty(len(classes), int)
        with warnings.catch_warnings(action="ignore"):  # of rare classes
            for fold, (_, examples) in enumerate(splitter.split(classes, classes, group)):
                fold_of[examples] = fold
        has = np.zeros((folds, classes.max() + 1), bool)
        has[fold_of, classes] = True
        for held_out in permutations(range(folds), parts - 1):
            rest = np.delete(has, held_out, 0).any(0)
            lacking = np.count_nonzero(~rest) + np.count_nonzero(~has[[*held_out]])
            if lacking < fewest:
                fewest = lacking
                drawn = [~np.isin(fold_of, held_out), *(fold_of == fold for fold in held_out)]
        if fewest <= least:
            break
    order = stratified(classes, seed)
    return [order[part[order]] for part in drawn]


def split_examples(request, place, examples):
    """Return targets (n,), the indices of train, val and test, and the fields that `open_task`
    fills in. Without `split`, parts are 70, 15 and 15 %; without "val" in it, 15 % of "train"
    become val. Classes keep their shares. Unlabelled training examples come after the labelled
    ones; val and test leave unlabelled ones out."""
    n = len(examples.series)
    has_label = examples.has_label
    group = None
    if examples.group is not None:
        group = np.array([class_name(name) for name in np.asarray(examples.group).tolist()])
        check_each(place, ~np.isin(np.char.lower(group), [*MISSING]), "its group is missing")
    split = examples.split
    if split is not None:
        split = split_names(place, split)
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
    """Return the unlabelled examples of no other split, and of no group that validates or tests."""
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
