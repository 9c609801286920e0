"""Associative recall with several queries (MQAR, Arora et al. 2023, Zoology): look up the value of
a key seen before.

    d 7 b 3 ... b 9 d ...    ->    at the second b: 3, at the second d: 7; no label elsewhere

An example is `pairs` of a key and its value, then as many queries: the same keys in another order,
at random distances and with random symbols between them. Every key has another value in every
example, so nothing can be learned by heart. A label stands at each query. Values are not repeated
after queries, so no position shows an answer."""

from dataclasses import dataclass

import numpy as np

from tasks import EOS, IGNORE, SPECIAL, SPLITS, TASKS, Task
from tasks.making import GENERATED, save_split


@dataclass(frozen=True)
class Pairs:
    """Parameters of the generator, with the defaults of Zoology where it has any."""

    pairs: int  # pairs per example; also the number of queries
    symbols: int = 32  # number of different keys, and of different values
    power: float = 0.01  # a query comes g places after the pairs with probability ~ g^(power - 1)


def draw(task, rng):
    """Draw an example -> ids uint8 (length,), EOS at the end; values int16 (length,) or IGNORE."""
    make = task.make
    n = make.pairs
    first_key = len(SPECIAL)
    first_value = first_key + make.symbols
    keys, values = (rng.choice(make.symbols, n, replace=False) for _ in range(2))
    x = rng.integers(first_key, first_value + make.symbols, task.length).astype(np.uint8)
    x[: 2 * n : 2] = first_key + keys
    x[1 : 2 * n : 2] = first_value + values
    # places between the pairs and EOS
    after = np.arange(1, task.length - 2 * n) ** (make.power - 1)
    places = 2 * n + rng.choice(len(after), n, replace=False, p=after / after.sum())
    y = np.full(task.length, IGNORE, np.int16)
    x[places] = first_key + keys
    y[places] = values
    x[-1] = EOS
    return x, y


def prepare(task, request):
    for split, size in zip(SPLITS, request.sizes):
        rng = np.random.default_rng([request.seed, SPLITS.index(split)])
        x, y = zip(*(draw(task, rng) for _ in range(size)))
        save_split(request, split, x, y, "the generator")


MODELS = """
model              layers  d heads  ff state n_ssm norm  place dt_min dt_max dt_lr ssm_lr
transformer|rotary      2 64     2 128     -     - -     -          -      -     -      -
s4                      2 64     -   -    64     2 layer pre    0.001    0.1 0.001  0.001
dlr                     2 64     -   -   128     - layer pre    0.001    0.1     -  0.001
mamba                   2 64     -   -    16     - layer pre    0.001    0.1     -      -
"""
RECIPES = """
model              objective     loss pool head   lr   wd batch length         warmup schedule eval
transformer|rotary causal|masked ce   none linear 3e-3 0  64    1000/1000/2000 100    cos      250
s4|dlr             causal|masked ce   none linear 4e-3 0  64    1000/1000/2000 100    cos      250
"""
KEYS, VALUES = ([f"{kind}{i}" for i in range(Pairs.symbols)] for kind in "kv")
TASKS |= {
    "recall": Task(
        "recall",
        length=49,
        classes=Pairs.symbols,
        sizes=(20_000, 1_000, 2_000),
        mask=0.15,
        source=GENERATED,
        vocab=len(SPECIAL) + 2 * Pairs.symbols,
        make=Pairs(8),
        target="positions",
        symbols=(*SPECIAL, *KEYS, *VALUES),
        names=(*VALUES,),
        prepare=prepare,
        draw=draw,
        models=MODELS,
        recipes=RECIPES,
    )
}
