"""What a GPU would run, as far as it can be seen without one: attention's calls, the number of
operations, and a training step as a graph. (test_models.py: that no tensor stays on the CPU.)"""

import math
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import STAGES, flags, load, log_of
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
import pretrain
from engine import run as run_py
from engine.feed import Feed
from engine.graph import Recording, filled, records
from engine.run import Run
from files import UserError
from models import Attention, Backbone, Denoiser, config, make_optimizer
from pretrain import spt_loss
from recipes import arch
from tasks import TASKS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("model", ["transformer", "rotary"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_pathx_is_what_flash_needs(model, causal, monkeypatch):
    """No mask of pairs, half precision, last stride 1, head size a multiple of 8; else dense."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    for module, name in ((kernels, "attend_blocks"), (bias, "causal_lower_right")):
        monkeypatch.setattr(module, name, mock.Mock(wraps=getattr(module, name)))
    c = vars(config(arch("pathx", model), TASKS["pathx"], causal=causal))
    c = SimpleNamespace(**{"rotary": 0.0} | c | {"block": 96})
    with torch.autocast("cpu", torch.bfloat16):
        Attention(c)(torch.randn(1, 400, c.d)).sum().backward()
    calls = kernels.attend_blocks.call_args_list
    assert len(calls) == 5  # at full length four
    for *heads, _, mask in (call.args for call in calls):
        assert mask is None
        for x in heads:
            assert x.dtype == torch.bfloat16 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
    # The library learns which keys a block sees: no tensor is made.
    masks = [call.args for call in bias.causal_lower_right.call_args_list]
    assert masks == ([(96, 192)] * 3 + [(16, 112)] if causal else [])


@pytest.mark.parametrize("model, most", dict(s4=695, dlr=346, rotary=222, transformer=199).items())
def test_a_step_has_no_more_operations(model, most):
    """Six layers on a padded batch, without views: a GPU waits for each launch."""
    names = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            free = "_unsafe_view", "detach", "prof"
            if not function.is_view and not any(word in str(function) for word in free):
                names.append(str(function))
            return function(*args, **kwargs or {})

    sizes = dict(arch("text", model), d=32)
    narrow = dict(n_ssm=2, state=8, ff=32, heads=2)
    sizes |= {key: value for key, value in narrow.items() if key in sizes}
    task = SimpleNamespace(length=64, vocab=100, channels=None)
    denoiser = Denoiser(Backbone(config(sizes, task)), 100)
    optimizer = make_optimizer(denoiser, SimpleNamespace(lr=1e-3, wd=0.0))
    x, lengths = torch.randint(0, 100, (4, 64)), torch.tensor([64, 60, 50, 64])
    hidden = (torch.rand(4, 64) < 0.3).flatten().nonzero()[:, 0]
    for _ in range(2):  # the first makes the state of the optimiser
        names.clear()
        with Operations():
            prediction = denoiser(x, lengths, hidden)
            spt_loss(SimpleNamespace(loss="ce"), prediction, x, hidden)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
    # versions of torch split some backward passes
    assert most / 2 < len(names) <= 1.03 * most


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
        raise RuntimeError("operation not permitted\nwhen stream is capturing")


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    "stage, task, more",
    [
        ("pretrain", "pathfinder", dict(more=",norm=layer")),
        ("pretrain", "image", dict(micro_batch=5, objective="causal")),
        ("finetune", "image", {}),
        ("joint", "pathfinder", dict(joint=1, more=",norm=layer")),
    ],
)
def test_recorded_steps_train_as_others_do(stage, task, more, tmp_path, monkeypatch):
    """Losses and weights stay, whatever is hidden. A step that cannot be recorded is one line."""
    start, trained = Run.start, {}
    for kind in (None, OnTheCpu, Unable):

        def started(run, *arguments):
            forward = start(run, *arguments)
            run.records = run.feed.records = kind is not None
            return forward

        monkeypatch.setattr(Run, "start", started)
        monkeypatch.setattr(run_py, "Recording", kind)
        OnTheCpu.replayed, out = 0, tmp_path / getattr(kind, "__name__", "plain")
        words = flags(out, task, **more)
        if kind is Unable:
            with pytest.raises(UserError, match="a step is no CUDA graph: .* not permitted"):
                STAGES[stage].main(words)
            continue
        STAGES[stage].main(words)
        assert OnTheCpu.replayed == (6 - OnTheCpu.WARM if kind is OnTheCpu else 0)
        losses = torch.tensor([line["loss"] for line in log_of(out, "train")])
        trained[kind] = load(out / "last.pt")["model"] | {"losses": losses}
    for name, plain in trained[None].items():
        assert torch.allclose(trained[OnTheCpu][name], plain, rtol=1e-5, atol=1e-6), name


def test_an_optimiser_is_recorded_if_it_can_be():
    """Else the compiled step runs as it is. Either way the weights are those of the plain step."""
    args, gpu = SimpleNamespace(compile=True, arch={}), SimpleNamespace(device=CUDA, world=1)
    names = "AdamW", "Adam", "SGD", "RMSprop", "Muon"  # older versions lack Muon
    kinds = [getattr(torch.optim, name) for name in names if hasattr(torch.optim, name)]
    for kind in kinds:
        ends = []
        for compiled in (False, True):
            w = torch.ones(3, 3, requires_grad=True)
            optimizer = kind([dict(params=[w], lr=0.1)])

            def step(x):
                optimizer.zero_grad()
                (w @ x).square().sum().backward()
                optimizer.step()

            recorded = compiled and records(args, gpu, optimizer, True)
            run = OnTheCpu(step, optimizer) if recorded else step
            for i in range(6):
                run(torch.full((3,), float(i)))
            ends.append(w.detach())
        assert torch.allclose(*ends) and not torch.allclose(ends[0], torch.ones(3, 3)), kind
    optimizer = torch.optim.AdamW([w])
    assert records(args, gpu, optimizer, True) and not records(args, gpu, optimizer, False)
    for other in (SimpleNamespace(device=CPU, world=1), SimpleNamespace(device=CUDA, world=2)):
        assert not records(args, other, optimizer, True), other


def test_a_graph_is_for_its_shapes_and_sees_new_rates():
    w, seen, lengths = torch.ones(3, requires_grad=True), [], (2, 2, 3, 2, 2, 2, 2, 3, 2)
    optimizer = torch.optim.AdamW([w], lr=1.0, fused=True)

    def step(parts):
        seen.append((parts[0].tolist(), parts[1], float(optimizer.param_groups[0]["lr"])))

    graph, OnTheCpu.replayed = OnTheCpu(step, optimizer), 0
    for i, length in enumerate(lengths):
        optimizer.param_groups[0]["lr"] = float(i)
        graph([torch.full((length,), i), None])
    # Three of a kind run as they are, then all of that kind are replayed.
    assert OnTheCpu.replayed == 2
    assert [values for values, _, _ in seen] == [[i] * n for i, n in enumerate(lengths)]
    assert [float(rate) for rate in graph.rates] == [8.0]


@pytest.mark.parametrize("loss", ["ce", "l1"])
def test_filled_parts_have_one_shape_and_the_same_loss(loss):
    """Equally many indices whatever is hidden; what fills up has no loss, score or gradient."""
    args = SimpleNamespace(loss=loss)
    for shape, ratio in (((4, 5), 0.5), ((4, 8), 0.15), ((8, 1024), 0.5), ((2, 100), 1.0)):
        counts, n = set(), math.prod(shape)
        for seed in range(10):
            generator = torch.Generator().manual_seed(seed)
            hidden = torch.rand(shape, generator=generator) < ratio
            y = torch.randint(7, (*shape, 3), generator=generator)
            y = y[..., 0] if loss == "ce" else y.float()
            part = filled(pretrain.Denoising(y, None, hidden, y), ratio)
            counts.add(len(part.hidden))
            real = part.hidden >= 0
            assert torch.equal(part.hidden[real], hidden.flatten().nonzero()[:, 0])
            assert part.hidden.min() >= -n and len((part.hidden % n).unique()) == len(part.hidden)
            sizes = len(part.hidden), 7 if loss == "ce" else 3
            prediction = torch.randn(sizes, generator=generator, requires_grad=True)
            loss_and_score = spt_loss(args, prediction, part.targets, part.hidden)
            without = spt_loss(args, prediction[real], y, part.hidden[real])
            assert all(map(partial(torch.isclose, rtol=1e-5), loss_and_score, without))
            (gradient,) = torch.autograd.grad(loss_and_score[0], prediction)
            assert not gradient[~real].any() and gradient[real].any()
        assert len(counts) == 1, shape


def test_a_gpu_evaluates_in_large_batches(monkeypatch):
    """Where examples do not depend on each other; and each of them once."""

    class Examples:
        batch = staticmethod(lambda rows: rows)
        __len__ = staticmethod(lambda: 100)

    monkeypatch.setattr(Feed, "pinned", lambda feed, make_parts, argument: make_parts(argument))
    monkeypatch.setattr(Feed, "shipped", lambda feed, batch: batch)
    monkeypatch.setattr(Feed, "EVALUATED", 32 * 50)

    def sizes(device, independent, micro_batch=None):
        args = SimpleNamespace(batch=8, micro_batch=micro_batch)
        processes = SimpleNamespace(world=1, rank=0, device=device)
        task = dict(target="", documents=2, length=25)
        feed = Feed(args, processes, task, 100, None, False, False)
        batches = [*feed.batches(Examples(), np.arange(100)[::-1], independent)]
        assert sorted(np.concatenate([rows for _, rows, _ in batches])) == [*range(100)]
        return [len(rows) for _, rows, _ in batches]

    assert sizes(CUDA, True) == [32, 32, 32, 4] and sizes(CUDA, True, 50) == [50, 50]
    assert sizes(CUDA, False) == sizes(CPU, True) == 12 * [8] + [4]
