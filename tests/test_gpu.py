"""What a GPU would run, as far as it can be seen without one."""

import contextlib
import importlib.util
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
from conftest import noise
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode

import finetune
import kernels
import pretrain
from engine import run as run_py
from engine.feed import Feed
from engine.graph import Recording, filled, records
from engine.run import Run
from engine.targets import KINDS
from files import UserError
from kernels import attention, near_attention
from models import MODELS, Attention, Backbone, Classifier, Denoiser, config, make_optimizer
from pretrain import spt_loss
from recipes import arch
from tasks import TASKS


def drawn(l, e=8, h=3, b=3):
    generator = torch.Generator().manual_seed(l)
    return [
        torch.randn(b, h, l, e, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(3)
    ]


def same(one, other, heads, lengths):
    """Values at real positions, and gradients of their sum of squares."""
    real = kernels.inside(lengths, heads[0].shape[2])[:, None, :, None]
    one, other = one.where(real, 0.0), other.where(real, 0.0)
    assert torch.allclose(one, other, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), heads) for y in (one, other))):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("l, block", [(32, 4), (29, 4), (25, 4), (5, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_folded_blocks_are_a_call_per_block(l, block, causal):
    """`attention` itself folds more than eight blocks."""
    heads, lengths = drawn(l), torch.tensor([l, 1, l // 2])
    ours = near_attention(*heads, block, None, causal, lengths)
    same(ours, attention(*heads, causal, block, lengths), heads, lengths)
    every = torch.full((3,), l)
    same(
        near_attention(*heads, block, None, causal), attention(*heads, causal, block), heads, every
    )


@pytest.mark.parametrize("model", ["transformer", "rotary"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_pathx_is_what_flash_needs(model, causal, monkeypatch):
    """No mask of pairs, half precision, last stride 1, head size a multiple of 8: else 16,384
    positions are dense."""
    calls, masks, attend, lower_right = [], [], kernels.attend_blocks, bias.causal_lower_right

    def noted(*arguments):
        calls.append(arguments)
        return attend(*arguments)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(kernels, "attend_blocks", noted)
    monkeypatch.setattr(
        bias, "causal_lower_right", lambda *sizes: masks.append(sizes) or lower_right(*sizes)
    )
    c = vars(config(arch("pathx", model), TASKS["pathx"], causal=causal))
    c = SimpleNamespace(**{"rotary": 0.0} | c | {"block": 96})
    with torch.autocast("cpu", torch.bfloat16):
        Attention(c)(torch.randn(1, 400, c.d)).sum().backward()
    assert len(calls) == 5  # at full length four
    for *heads, _, mask in calls:
        assert mask is None
        for x in heads:
            assert x.dtype == torch.bfloat16 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
    # The library is told which keys a block sees: no tensor is made.
    assert masks == [(96, 192)] * 3 + [(16, 112)] if causal else not masks


@contextlib.contextmanager
def without_values():
    """Tensors only have shapes. They must neither come from a cache nor stay in it."""
    kernels.rotary_turns.cache_clear()
    try:
        with FakeTensorMode():
            yield
    finally:
        kernels.rotary_turns.cache_clear()


def fake_gpu():
    """Whether tensors without values can be on a GPU that is not there: a CUDA build of a newer
    torch."""
    if not importlib.util.find_spec("torch.nn.attention.varlen"):
        return False  # an older torch asks the driver
    try:
        with without_values():
            return (
                torch.version.cuda
                and (torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")).is_cuda
            )
    except Exception:
        return False


FAKE = pytest.mark.skipif(not fake_gpu(), reason="wants a CUDA build of torch")


@pytest.mark.parametrize(
    "model, most", [("s4", 695), ("dlr", 346), ("rotary", 222), ("transformer", 199)]
)
def test_a_step_has_no_more_operations(model, most):
    """Each is a launch, which a GPU waits for: those of six layers on a padded batch that are not
    views. Their number does not depend on widths."""
    names = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if not function.is_view and not any(
                word in str(function) for word in ("_unsafe_view", "detach", "prof")
            ):
                names.append(str(function))
            return function(*args, **kwargs or {})

    sizes = dict(arch("text", model), d=32)
    sizes |= {
        key: value for key, value in dict(n_ssm=2, state=8, ff=32, heads=2).items() if key in sizes
    }
    denoiser = Denoiser(
        Backbone(config(sizes, SimpleNamespace(length=64, vocab=100, channels=None))), 100
    )
    optimizer = make_optimizer(denoiser, SimpleNamespace(lr=1e-3, wd=0.0))
    x, lengths = torch.randint(0, 100, (4, 64)), torch.tensor([64, 60, 50, 64])
    hidden = (torch.rand(4, 64) < 0.3).flatten().nonzero()[:, 0]
    for _ in range(2):  # the first makes the state of the optimiser
        names.clear()
        with Operations():
            spt_loss(SimpleNamespace(loss="ce"), denoiser(x, lengths, hidden), x, hidden)[
                0
            ].backward()
            optimizer.step()
            optimizer.zero_grad()
    # older versions split some backward passes
    most += most // 40 if torch.__version__ < (2, 13) else 0
    assert most / 2 < len(names) <= most


@FAKE
# cuDNN asks the driver
@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("lstm", "gru")])
def test_every_model_stays_on_the_gpu(model, monkeypatch):
    """The forward pass of every task and objective, once of those that differ in widths alone: a
    tensor left on the CPU raises."""
    monkeypatch.setattr(
        bias,
        "causal_lower_right",  # whose tensors cannot be without values
        lambda lq, lk: torch.ones(lq, lk, dtype=torch.bool, device="cuda").tril(lk - lq),
    )
    seen = []
    for name, task in TASKS.items():
        for causal in (False, True):
            if (
                (sizes := arch(name, model)) is None
                or name.endswith("_mini")
                or (causal and model in ("linformer", "reformer"))
            ):
                continue
            with without_values():
                c = config(sizes | {"layers": 1}, task, causal=causal)
                kind = {
                    key: value if isinstance(value, (str, bool)) else bool(value)
                    for key, value in vars(c).items()
                }
                if kind in seen:
                    continue
                seen.append(kind)
                l = c.length = min(c.length or 2000, 20_000)
                if c.channels is None:
                    c.vocab = c.vocab or 100
                denoiser = Denoiser(Backbone(c), 7)
                for part in denoiser.modules():  # `to` swaps tensors in place, which these cannot
                    part._parameters.update(
                        {
                            k: nn.Parameter(v.detach().to("cuda"))
                            for k, v in part._parameters.items()
                            if v is not None
                        }
                    )
                    part._buffers.update(
                        {k: v.to("cuda") for k, v in part._buffers.items() if v is not None}
                    )
                x = (
                    torch.zeros(3, l, dtype=torch.int64, device="cuda")
                    if c.vocab
                    else torch.zeros(3, l, c.channels, device="cuda")
                )
                lengths = torch.tensor([l, 1, l // 2], device="cuda") if c.vocab else None
                y = denoiser(x, lengths, torch.zeros(5, dtype=torch.int64, device="cuda"))
                assert y.is_cuda and y.shape == (5, 7), (name, causal)


# ---- a training step as a graph ------------------------------------------------------------------


class OnTheCpu(Recording):
    """Replays by calling again what was recorded."""

    replayed = 0

    def capture(self, function):
        def replay():
            type(self).replayed += 1
            function()

        return replay

    def eagerly(self, function):
        function()


class Unable(OnTheCpu):
    def capture(self, function):
        try:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        except RuntimeError:
            raise RuntimeError("capture must end on the stream it began on") from None


@pytest.mark.parametrize(
    "stage, words",
    [
        (pretrain, []),
        (finetune, []),
        (finetune, ["--joint", "1"]),
        (pretrain, ["--objective", "causal"]),
        (pretrain, ["--loss", "l1", "--micro-batch", "5"]),
    ],
)
def test_recorded_steps_train_as_others_do(stage, words, tmp_path, monkeypatch):
    """The same losses and weights, however many positions are hidden. A step that cannot be
    recorded is one line."""
    x = np.random.default_rng(0).integers(0, 256, (60, 24, 1)).astype(np.uint8)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 3)
    words = [
        "--task",
        f"file:{tmp_path}/own.npz",
        "--model",
        "s4",
        "--steps",
        "12",
        "--batch",
        "8",
        "--arch",
        "d=8,layers=1",
        "--log-every",
        "4",
        "--data-dir",
        str(tmp_path / "data"),
        *words,
    ]
    start, found = Run.start, []
    for kind in (None, OnTheCpu, Unable):

        def started(run, *arguments):
            forward = start(run, *arguments)
            run.records = run.feed.records = kind is not None
            return forward

        monkeypatch.setattr(Run, "start", started)
        monkeypatch.setattr(run_py, "Recording", kind)
        OnTheCpu.replayed, out = 0, tmp_path / str(kind)
        if kind is Unable:
            with pytest.raises(
                UserError,
                match="^--compile: a step is no CUDA graph: .* not permitted",
            ):
                stage.main([*words, "--out", str(out)])
            continue
        stage.main([*words, "--out", str(out)])
        last = torch.load(out / "last.pt", weights_only=True)
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        losses = [
            value for line in lines for name, value in line.items() if name.startswith("loss")
        ]
        found.append([torch.tensor(losses), *last["model"].values()])
        assert OnTheCpu.replayed == (12 - OnTheCpu.WARM if kind is OnTheCpu else 0)
        for ours, plain in zip(found[-1], found[0], strict=True):
            assert torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


class ByHand(torch.optim.Optimizer):
    """As a user writes one."""

    def __init__(self, groups):
        super().__init__(groups, {})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=float(group["lr"]))


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.AdamW,
        torch.optim.Adam,
        torch.optim.SGD,
        torch.optim.RMSprop,
        ByHand,
        *([torch.optim.Muon] if hasattr(torch.optim, "Muon") else []),
    ],
)
def test_an_optimiser_is_recorded_if_it_can_be(kind):
    """Else the compiled step runs as it is. Either way the weights are those of the step without a
    graph."""
    args, gpu = (
        SimpleNamespace(compile=True, arch={}),
        SimpleNamespace(device=torch.device("cuda"), world=1),
    )
    ends = []
    for compiled in (False, True):
        w = torch.ones(3, 3, requires_grad=True)
        optimizer = kind([dict(params=[w], lr=0.1)])

        def step(x):
            optimizer.zero_grad()
            (w @ x).square().sum().backward()
            optimizer.step()

        run = (
            OnTheCpu(step, optimizer) if compiled and records(args, gpu, optimizer, True) else step
        )
        for i in range(6):
            run(torch.full((3,), float(i)))
        ends.append(w.detach())
    assert torch.allclose(*ends) and not torch.allclose(ends[0], torch.ones(3, 3))
    optimizer = torch.optim.AdamW([w])
    assert records(args, gpu, optimizer, True) and not records(args, gpu, optimizer, False)
    for other in (
        SimpleNamespace(device=torch.device("cpu"), world=1),
        SimpleNamespace(device=gpu.device, world=2),
    ):
        assert not records(args, other, optimizer, True)


def test_a_graph_is_for_its_shapes_and_sees_new_rates():
    w, seen = torch.ones(3, requires_grad=True), []
    optimizer = torch.optim.AdamW([w], lr=1.0, fused=True)

    def step(parts):
        seen.append((parts[0].tolist(), parts[1], float(optimizer.param_groups[0]["lr"])))

    graph, OnTheCpu.replayed = OnTheCpu(step, optimizer), 0
    for i, length in enumerate(lengths := (2, 2, 3, 2, 2, 2, 2, 3, 2)):
        optimizer.param_groups[0]["lr"] = float(i)
        graph([torch.full((length,), i), None])
    # Three of a kind run as they are, then all of that kind are replayed.
    assert OnTheCpu.replayed == 2 and [values for values, _, _ in seen] == [
        [i] * n for i, n in enumerate(lengths)
    ]
    assert [float(rate) for rate in graph.rates] == [8.0]


@pytest.mark.parametrize("targets", [torch.int64, torch.float32])
def test_filled_parts_have_one_shape_and_the_same_loss(targets):
    """Equally many indices whatever is hidden; what fills up is inside, is not hidden and has no
    loss, no score and no gradient."""
    args = SimpleNamespace(loss="ce" if targets == torch.int64 else "l1")
    for shape, ratio in (((4, 5), 0.5), ((4, 8), 0.15), ((8, 1024), 0.5), ((2, 100), 1.0)):
        counts, n = set(), math.prod(shape)
        for seed in range(20):
            generator = torch.Generator().manual_seed(seed)
            hidden = torch.rand(shape, generator=generator) < ratio
            y = torch.randint(7, (*shape, 3), generator=generator).to(targets)
            y = y[..., 0] if args.loss == "ce" else y
            part = filled(pretrain.Denoising(y, None, hidden, y), ratio)
            counts.add(len(part.hidden))
            real = part.hidden >= 0
            assert torch.equal(part.hidden[real], hidden.flatten().nonzero()[:, 0])
            assert part.hidden.min() >= -n and len((part.hidden % n).unique()) == len(part.hidden)
            prediction = torch.randn(
                len(part.hidden), 7 if args.loss == "ce" else 3, generator=generator
            ).requires_grad_()
            with_filling = spt_loss(args, prediction, part.targets, part.hidden)
            without = spt_loss(args, prediction[real], y, part.hidden[real])
            for value, exact in zip(with_filling, without):
                assert value.item() == pytest.approx(exact.item(), rel=1e-5)
            (gradient,) = torch.autograd.grad(with_filling[0], prediction)
            assert not gradient[~real].any() and gradient[real].any()
        assert len(counts) == 1


def test_only_recorded_steps_are_filled():
    hidden = torch.rand(4, 50, generator=torch.Generator().manual_seed(0)) < 0.3
    part = pretrain.Denoising(hidden, None, hidden, hidden.long())
    for records_steps in (False, True):
        feed = Feed(
            SimpleNamespace(batch=4, mask=0.3, micro_batch=None),
            SimpleNamespace(world=1, rank=0, device=None),
            dict(target="", documents=1),
            4,
            None,
            False,
            records_steps,
        )
        (found,) = feed.parts(part, np.arange(4), np.arange(4))
        assert (len(found.hidden) > hidden.sum()) == records_steps


def test_a_gpu_evaluates_in_large_batches():
    """Where examples do not depend on each other; and each of them once."""

    class Some:
        def __len__(self):
            return 100

        def batch(self, rows):
            return SimpleNamespace(rows=rows)

    def sizes(device, independent, micro=None):
        args = SimpleNamespace(batch=8, micro_batch=micro)
        processes = SimpleNamespace(world=1, rank=0, device=torch.device(device))
        feed = Feed(
            args, processes, dict(length=25, documents=2, target=""), 100, None, False, False
        )
        feed.pinned, feed.shipped, feed.EVALUATED = (
            lambda make_parts, argument: make_parts(argument),
            lambda batch: batch,
            32 * 50,
        )
        found = [
            rows.tolist() for _, rows, _ in feed.batches(Some(), np.arange(100)[::-1], independent)
        ]
        assert sorted(sum(found, [])) == [*range(100)]
        return [len(rows) for rows in found]

    assert sizes("cuda", True) == [32, 32, 32, 4] and sizes("cuda", True, micro=50) == [50, 50]
    assert sizes("cuda", False) == sizes("cpu", True) == 12 * [8] + [4]


def test_scores_do_not_depend_on_the_batches_of_an_evaluation():
    task, split = noise("listops", 40, 37, seed=1)
    torch.manual_seed(0)
    sizes = dict(arch("listops_demo", "s4"), layers=1, d=8, n_ssm=8)
    model = Classifier(Backbone(config(sizes, task)), task.classes, "mean")
    found = []
    for size in (1, 8, 37):
        run = SimpleNamespace(
            device=torch.device("cpu"), autocast=contextlib.nullcontext, total=lambda value: value
        )
        run.batches = lambda split, *_, independent: (
            (i, rows, split.batch(rows))
            for i, rows in enumerate(np.array_split(np.arange(37), -(-37 // size)))
        )
        found.append(finetune.evaluate(model, KINDS["class"], split, run, "test"))
    for _, score, guesses in found[1:]:
        assert score == found[0][1] and np.array_equal(guesses, found[0][2])
    assert (
        found[0][0] == pytest.approx(found[1][0], rel=1e-6) == pytest.approx(found[2][0], rel=1e-6)
    )
