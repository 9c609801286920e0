"""Before and after: two commits side by side on one machine, in turn, one thread. Prints tables of results/speed.md.

    python tests/speed.py [--before 5d7a411] [--after HEAD] [kernels layers operations images steps compiled]

Both are checked out into temporary folders. A time is the least of several, because a busy machine only adds. `steps`
prepares data with either commit; --raw is the folder of IMDb's archive, which is downloaded otherwise. 20 minutes.
"""
import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

LAYERS = [(64, 16, 256, 16, "batch"), (256, 64, 1024, 4, "batch"), (512, 64, 1024, 4, "layer")]      # d, N, l, b, norm
STEPS = ["text_demo s4", "listops_demo s4", "pathfinder_demo s4", "text_demo rotary", "listops_demo transformer"]

# ---- in a checkout: one request a line, {"what": ..., "of": [...]}, one line of JSON in reply ------------------------


def seconds(f):
    """The least of several, for about a second."""
    took = []
    while len(took) < 3 or sum(took) < 1:
        start = time.perf_counter()
        f()
        took.append(time.perf_counter() - start)
    return min(took)


def kernel_seconds(name, d, n, l):
    import torch

    import kernels
    make = {"s4_kernel": kernels.random_s4, "diagonal_kernel": kernels.random_dlr}[name]
    arguments = [v.requires_grad_() for v in make(d, n, 2, l)]
    return seconds(lambda: torch.autograd.grad(getattr(kernels, name)(*arguments, l).square().sum(), arguments))


def make_layer(d, state, l, norm):
    """An S4 layer of either commit."""
    import models
    sizes = dict(models.arch("text", "s4"), d=d, state=state, n_ssm=d, norm=norm, layers=1, place="pre")
    if hasattr(models, "config"):
        c = models.config(sizes, SimpleNamespace(length=l, vocab=50, channels=None))
        return models.SSMBlock(c, models.MODELS["s4"].mixer(c))
    kernel = models.S4(d, state, d, 0.001, 0.1, l, False, None, 1e-3)
    return models.SSMLayer(d, norm, "pre", models.SSM(kernel, d))


def layer_seconds(d, state, l, b, norm):
    """Forward and backward of a layer and of its parts: kernel, convolution, norm, and GELU, linear and GLU together,
    beside the three matrix products of that linear map."""
    import torch

    import kernels
    torch.manual_seed(0)
    layer = make_layer(d, state, l, norm)
    x = torch.randn(b, d, l).transpose(1, 2).requires_grad_()
    u, lengths = torch.randn(b, d, l, requires_grad=True), torch.full((b,), l - 3) if norm == "batch" else None
    K = layer.mixer.kernel(l).detach().requires_grad_()
    D = layer.mixer.D
    W, y, grad = torch.randn(2 * d, d), torch.randn(b, d, l), torch.randn(b, 2 * d, l)

    def convolve():
        return kernels.fft_conv(u, K, D=D) if hasattr(kernels, "two_levels") else (
            kernels.fft_conv(u, K[0], K[1]) + D[:, None] * u)

    def products():
        W.expand(b, -1, -1) @ y, W.T.expand(b, -1, -1) @ grad, grad @ y.mT

    whole = seconds(lambda: layer(x, lengths).sum().backward())
    kernel = seconds(lambda: layer.mixer.kernel(l).sum().backward())
    norms = seconds(lambda: layer.norm(x, lengths).sum().backward())
    convolution = seconds(lambda: convolve().sum().backward())
    layer.mixer.kernel.forward = lambda l: K
    rest = seconds(lambda: layer.mixer(x).sum().backward()) - convolution
    return dict(layer=whole, kernel=kernel, convolution=convolution, norm=norms, rest=rest, products=seconds(products))


def operations(model):
    """Tensor operations of a training step of `text` that are not views, and those of them that read a value back."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    import models
    import pretrain
    new = hasattr(models, "config")
    sizes = dict(models.arch("text", model), d=32)
    sizes |= {key: value for key, value in dict(n_ssm=2, state=8, ff=32, heads=2).items() if key in sizes}
    backbone = (models.Backbone(models.config(sizes, SimpleNamespace(length=64, vocab=100, channels=None))) if new else
                models.Backbone(sizes, 64, 100, None))
    model = models.Denoiser(backbone, 100)
    optimizer = torch.optim.AdamW(models.param_groups(model, 1e-3, 0.0), fused=True)
    x, lengths = torch.randint(0, 100, (4, 64)), torch.tensor([64, 60, 50, 64])
    hidden = torch.rand(4, 64) < 0.3
    if new:
        hidden = hidden.flatten().nonzero()[:, 0]
    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not function.is_view and not any(word in str(function) for word in ("_unsafe_view", "detach", "prof")):
                found.append(str(function))
            return function(*args, **kwargs or {})

    def step():
        arguments = (model(x, lengths, hidden), x, hidden, "ce")
        loss, _ = pretrain.spt_loss(*(arguments if new else (SimpleNamespace(documents=1), *arguments)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Count():
        step()
    waits = [name for name in found if any(word in name for word in ("_local_scalar", "nonzero", "equal.default"))]
    return dict(operations=len(found), waits=len(waits) + (not new))      # the loss was read after every step


def image_seconds(task, count):
    """Seconds for an image, and what was drawn."""
    import numpy as np

    import data
    try:
        from pathfinder import make_pathfinder
    except ImportError:
        from generators import make_pathfinder
    row = data.TASKS[task]

    def draw(seed, count):
        snakes = (row.make, row.side) if make_pathfinder.__code__.co_argcount == 4 else (row,)
        return make_pathfinder(*snakes, np.random.default_rng(seed), count).images

    draw(5, 2)                                                       # makes the tables
    digest = hashlib.sha256(draw(0, count).tobytes()).hexdigest()
    return dict(seconds=seconds(lambda: draw(0, count)) / count, digest=digest)


def compiled_seconds(model):
    """A training step of text_demo, eager and compiled, and the largest differences of outputs and gradients."""
    import torch

    import models
    torch._dynamo.reset()
    torch.manual_seed(0)
    c = models.config(models.arch("text_demo", model), SimpleNamespace(length=128, vocab=95, channels=None))
    backbone = models.Backbone(c)
    x, lengths = torch.randint(0, 95, (32, 128)), torch.randint(64, 129, (32,))
    weight, kept = torch.randn(32, 128, c.d), {}

    def step(form):
        backbone.zero_grad()
        y = backbone(x, lengths)
        (y * weight).sum().backward()
        kept[form] = [y.detach(), *(p.grad for p in backbone.parameters() if p.grad is not None)]

    eager = seconds(lambda: step("eager"))
    backbone.body = torch.compile(backbone.body, fullgraph=True)
    start = time.perf_counter()
    step("compiled")
    start = time.perf_counter() - start
    compiled = seconds(lambda: step("compiled"))
    y, *gradients = (((a - b).abs().max() / b.abs().max()).item() for a, b in zip(kept["compiled"], kept["eager"]))
    return dict(eager=eager, compiled=compiled, compiling=start, y=y, gradients=max(gradients))


def serve():
    import torch
    sys.path.insert(0, os.getcwd())
    torch.set_num_threads(1)
    import pretrain
    getattr(pretrain, "keep_memory", list)()                         # as a run does
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(globals()[request["what"]](*request["of"])), flush=True)


# ---- the comparison --------------------------------------------------------------------------------------------------


def check_out(commit, folder):
    archive = subprocess.run(["git", "archive", commit], check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    command = [sys.executable, __file__, "--serve"]
    return subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=dict(os.environ, OMP_NUM_THREADS="1"))


def ask(process, what, *of):
    process.stdin.write(json.dumps(dict(what=what, of=of)) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def in_turn(pair, what, *of, rounds=3):
    """-> for each commit the least of `rounds` replies, key by key."""
    replies = [[ask(process, what, *of) for process in pair] for _ in range(rounds)]
    return [{key: min(reply[key] for reply in one) for key in one[0]} if isinstance(one[0], dict) else min(one)
            for one in zip(*replies)]


def ms(value):
    return f"{1000 * value:.1f}"


def row(*cells):
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def head(title, *cells):
    print(f"\n{title}\n")
    row(*cells)
    row(*["---"] * len(cells))


def kernels(pair):
    head("Kernels, two directions, d = 256, forward + backward, ms", "kernel", "l", "before", "after", "ratio")
    for name, n, lengths in ("s4_kernel", 64, (256, 1024, 4096, 16384)), ("diagonal_kernel", 1024, (1024, 4096)):
        for l in lengths:
            before, after = in_turn(pair, "kernel_seconds", name, 256, n, l)
            row(f"`{name}`, N = {n}", l, ms(before), ms(after), f"{before / after:.2f}")


def layers(pair):
    head("One S4 layer and its parts (measured apart: they need not add up), forward + backward, ms, before / after",
         "d, N, l, batch", "layer", "ratio", "kernel", "convolution", "norm", "GELU, linear, GLU",
         "the linear's products")
    for sizes in LAYERS:
        before, after = in_turn(pair, "layer_seconds", *sizes)
        parts = [f"{ms(before[key])} / {ms(after[key])}" for key in ("kernel", "convolution", "norm", "rest")]
        row(", ".join(map(str, sizes[:4])) + f" ({sizes[4]})", f"{ms(before['layer'])} / {ms(after['layer'])}",
            f"{before['layer'] / after['layer']:.2f}", *parts, ms(min(before["products"], after["products"])))


def operations_table(pair):
    head("Operations of a training step of `text` that are not views, 6 layers, padded batch; waits: values read back "
         "to the host", "model", "before", "after", "waits before", "waits after")
    for model in "s4", "dlr", "rotary", "transformer":
        before, after = in_turn(pair, "operations", model, rounds=1)
        row(model, before["operations"], after["operations"], before["waits"], after["waits"])


def images(pair):
    head("Pathfinder images, ms each on one core", "task", "images", "before", "after", "ratio", "same bytes")
    for task, count in ("pathfinder", 500), ("pathx", 250), ("pathx256", 60):
        before, after = in_turn(pair, "image_seconds", task, count, rounds=2)
        row(task, count, f"{1000 * before['seconds']:.2f}", f"{1000 * after['seconds']:.2f}",
            f"{before['seconds'] / after['seconds']:.2f}", before["digest"] == after["digest"])


def step_times(folder, task, model):
    """ms of each step of a run of pretrain.py, in means of 20; the first 20 warm up."""
    with tempfile.TemporaryDirectory() as out:
        command = f"pretrain.py --task {task} --model {model} --steps 100 --log-every 20 --out {out}"
        subprocess.run([sys.executable, *command.split()], cwd=folder, check=True, capture_output=True,
                       env=dict(os.environ, OMP_NUM_THREADS="1"))
        records = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    return [record["ms_per_step"] for record in records if record["kind"] == "train"][1:]


def steps(folders, raw):
    for folder in folders:
        for task in {spec.split()[0] for spec in STEPS}:
            more = ["--raw", raw] if raw and task.startswith("text") else []
            command = [sys.executable, "data.py", "--task", task, *more]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
    head("A training step of pretrain.py, ms: least, median", "task, model", "before", "after", "ratios")
    for spec in STEPS:
        runs = [[step_times(folder, *spec.split()) for folder in folders] for _ in range(4)]
        (a, b), (c, d) = ((min(times), statistics.median(times)) for times in (sum(some, []) for some in zip(*runs)))
        row(spec, f"{a:.1f}, {b:.1f}", f"{c:.1f}, {d:.1f}", f"{a / c:.2f}, {b / d:.2f}")


def compiled(after):
    head("--compile: the backbone's forward and backward pass on a batch of `text_demo`, ms; seconds of the first "
         "step; largest relative differences", "model", "eager", "compiled", "ratio", "first step, s", "output",
         "gradients")
    for model in ask(after, "names"):
        r = ask(after, "compiled_seconds", model)
        row(model, ms(r["eager"]), ms(r["compiled"]), f"{r['eager'] / r['compiled']:.2f}", f"{r['compiling']:.0f}",
            f"{r['y']:.0e}", f"{r['gradients']:.0e}")


def names():
    import models
    return [model for model in models.MODELS if models.arch("text_demo", model)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    tables = ["kernels", "layers", "operations", "images", "steps", "compiled"]
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="of " + " ".join(tables) + "; default: all")
    parser.add_argument("--before", default="5d7a411")
    parser.add_argument("--after", default="HEAD")
    parser.add_argument("--raw")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    if wrong := set(args.tables) - set(tables):
        parser.error(f"no table {' '.join(sorted(wrong))}; there are: {' '.join(tables)}")
    for commit in args.before, args.after:
        known = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
        if subprocess.run(known, capture_output=True).returncode:
            parser.error(f"no commit {commit} here; a shallow clone lacks older ones: git fetch --unshallow")
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / name for name in ("before", "after")]
        pair = [check_out(*each) for each in zip((args.before, args.after), folders)]
        for table in args.tables or tables:
            if table == "steps":
                steps(folders, args.raw and os.path.abspath(args.raw))
            elif table == "compiled":
                compiled(pair[1])
            else:
                {"kernels": kernels, "layers": layers, "operations": operations_table, "images": images}[table](pair)
        for process in pair:
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    main()
