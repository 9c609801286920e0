"""ListOps: evaluate a nested expression of digits and operators (Nangia and Bowman 2018; Long Range
Arena).

    [MAX 4 [MIN 2 3 ] 0 ]    ->    ids 15 8 14 6 7 18 4 18 3 (3: <eos>),    label 4

The grammar is a branching process: a node is a digit with probability `leaf`, else an operator with
a uniform number of arguments. Trees are drawn level by level, thousands at once; those of the wrong
length are dropped before they are evaluated or written. Start to read at `prepare`, at the end.

[1] github.com/google-research/long-range-arena, lra_benchmarks/data/listops.py
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from files import UserError
from tasks import EOS, SPECIAL, SPLITS, TASKS, Task
from tasks.making import CHUNK, DEMO, GENERATED, LRA, find, run_chunks, save_split

DIGIT, MIN, MAX, MED, SM, CLOSE = 4, 14, 15, 16, 17, 18


@dataclass(frozen=True)
class Grammar:
    """Parameters of the ListOps generator [1]."""

    depth: int = 10  # nodes at this depth are digits
    arguments: tuple = (2, 10)  # fewest and most arguments of an operator, inclusive
    leaf: float = 0.75  # probability that a node above the last depth is a digit
    symbols: tuple = (500, 2000)  # expressions strictly between these lengths are kept


def draw_trees(grammar, rng, count):
    """Draw `count` trees and keep those of the right length -> levels, lengths (kept,).

    A level holds the nodes of one depth, siblings adjacent: tree, parent (index in the level
    above), arity (0 for a digit), what (the digit, or the operator's id)."""
    low, high = grammar.symbols
    fewest, most = grammar.arguments
    lengths = np.zeros(count, np.int64)
    levels = []
    tree = np.arange(count)
    parent = np.zeros(count, np.int64)
    for depth in range(1, grammar.depth + 1):
        n = len(tree)
        operator = (rng.random(n) >= grammar.leaf) & (depth < grammar.depth)
        arity = np.where(operator, rng.integers(fewest, most + 1, n), 0)
        what = np.where(operator, rng.integers(MIN, SM + 1, n), rng.integers(0, 10, n))
        levels.append(SimpleNamespace(tree=tree, parent=parent, arity=arity, what=what))
        lengths += np.bincount(tree, np.where(operator, 2, 1), count).astype(np.int64)
        # Stop growing trees that will be too long: every pending argument adds at least one symbol.
        growing = lengths + np.bincount(tree, arity, count) < high
        lengths[~growing] = high
        parent = np.repeat(np.arange(n), arity * growing[tree])
        tree = tree[parent]
    keep = (low < lengths) & (lengths < high)
    renumber = np.cumsum(keep) - 1  # {tree: its number among those that are kept}
    above = np.zeros(count, np.int64)  # likewise of the nodes of the level above
    for level in levels:
        kept = keep[level.tree]
        level.tree = renumber[level.tree[kept]]
        level.parent = above[level.parent[kept]]
        level.arity = level.arity[kept]
        level.what = level.what[kept]
        above = np.cumsum(kept) - 1
    return levels, lengths[keep]


def evaluate(levels):
    """Evaluate bottom-up: give every level `value` and `size`, the symbols of each subtree."""
    for level, below in zip(levels[::-1], [None] + levels[:0:-1]):
        level.value = level.what.copy()
        level.size = np.ones(len(level.what), np.int64)
        operators = np.flatnonzero(level.arity)
        if not len(operators):
            continue
        arity = level.arity[operators]
        what = level.what[operators]
        first = np.cumsum(arity) - arity  # an operator's arguments are below[first:first + arity]
        rising = below.value[np.lexsort((below.value, below.parent))]
        # int(median), see [1]
        middle = (rising[first + (arity - 1) // 2] + rising[first + arity // 2]) // 2
        level.value[operators] = np.select(
            [what == MIN, what == MAX, what == MED],
            [rising[first], rising[first + arity - 1], middle],
            np.add.reduceat(below.value, first) % 10,
        )
        level.size[operators] = 2 + np.add.reduceat(below.size, first)


def write_tokens(levels, lengths):
    """Write top-down: return the ids of all trees in reading order, uint8, EOS after each."""
    tokens = np.full(int((lengths + 1).sum()), EOS, np.uint8)
    start = np.cumsum(lengths + 1) - (lengths + 1)
    for above, level in zip([None] + levels[:-1], levels):
        if above is not None:
            before = np.cumsum(level.size) - level.size  # symbols of all nodes to the left
            first = np.cumsum(above.arity) - above.arity
            start = above.start[level.parent] + 1 + before - before[first[level.parent]]
        level.start = start
        operator = level.arity > 0
        tokens[start] = np.where(operator, level.what, DIGIT + level.what)
        tokens[(start + level.size - 1)[operator]] = CLOSE
    return tokens


def make_listops(task, rng, count):
    """Generate `count` expressions by the official grammar [1] -> dict of arrays: tokens uint8
    (total,), EOS after each expression; lengths (n,), EOS counted; labels uint8 (n,)."""
    batches = []
    have = 0
    while have < count:
        levels, lengths = draw_trees(task.make, rng, 4096)
        evaluate(levels)
        labels = levels[0].value.astype(np.uint8)
        batches.append((write_tokens(levels, lengths), lengths + 1, labels))
        have += len(lengths)
    tokens, lengths, labels = map(np.concatenate, zip(*batches))
    lengths = lengths[:count]
    return dict(tokens=tokens[: lengths.sum()], lengths=lengths, labels=labels[:count])


def read_listops(path, task):
    """Read an official file, header "Source<TAB>Target" -> list of ids uint8 (l,), labels.

    As in [1]: `]` becomes X, parentheses are dropped, the rest is split at white space; cut to
    length - 1, then EOS."""
    number_of = {symbol: number for number, symbol in enumerate(task.symbols)}
    letters = str.maketrans({"]": "X", "(": None, ")": None})
    expressions = []
    labels = []
    with open(path, encoding="utf-8") as file:
        next(file)
        for line, text in enumerate(file, 2):
            try:
                source, target = text.split("\t")
                ids = [number_of[symbol] for symbol in source.translate(letters).split()]
                labels.append(int(target))
            except (ValueError, KeyError):
                problem = f"{path}, line {line}: not an expression, a tab, a value"
                raise UserError(f"{problem}; restore the file") from None
            expressions.append(np.array(ids[: task.length - 1] + [EOS], np.uint8))
    return expressions, labels


def prepare(task, request):
    """Generate until there are enough distinct expressions, or read the official files."""
    if request.raw is not None:
        for split in SPLITS:
            path = find(request, f"listops-1000/basic_{split}.tsv", f"basic_{split}.tsv")
            save_split(request, split, *read_listops(path, task), path)
        return
    total = sum(request.sizes)
    distinct = {}  # expression -> label, in the order drawn
    chunks = 1 + (total - 1) // CHUNK
    while len(distinct) < total:  # no expression twice, as in the official set
        for path in run_chunks(make_listops, [CHUNK] * chunks, request):
            with np.load(path) as chunk:
                expressions = np.split(chunk["tokens"], np.cumsum(chunk["lengths"])[:-1])
                for tokens, label in zip(expressions, chunk["labels"]):
                    distinct.setdefault(tokens.tobytes(), label)
        chunks += 1
    expressions = (np.frombuffer(ids, np.uint8) for ids in distinct)
    labels = list(distinct.values())
    for split, start in zip(SPLITS, np.cumsum([0] + request.sizes)):
        save_split(request, split, expressions, labels[start:], request.folder)


LISTOPS = Task(
    "listops",
    length=2048,
    classes=10,
    sizes=(96_000, 2_000, 2_000),
    mask=0.10,
    source=LRA,
    vocab=19,
    make=Grammar(),
    symbols=(*SPECIAL, *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X"),
    prepare=prepare,
)
SMALL = Grammar(depth=4, arguments=(2, 4), symbols=(15, 80))
SHORT = replace(LISTOPS, length=80, sizes=DEMO, mask=0.15, source=GENERATED, make=SMALL)
# _demo and _mini are not the paper's
TASKS |= {"listops": LISTOPS, "listops_demo": SHORT, "listops_mini": SHORT}
