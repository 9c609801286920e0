"""What a GPU would run, as far as it can be seen without one."""
import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import costs
import first_hour
import kernels
from conftest import ROOT, same_line
from costs import without_values
from data import TASKS
from kernels import attention
from models import MODELS, Attention, Backbone, Denoiser, config
from recipes import arch
from zoo import gpu_attention
from zoo.gpu_attention import LIBRARIES, agrees, boundaries, each_alone, library, near_attention, packed_attention
from zoo.longformer import longformer_attention


def drawn(l, e=8, h=3, b=3):
    generator = torch.Generator().manual_seed(l)
    return [torch.randn(b, h, l, e, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]


def same(one, other, heads, lengths):
    """Values at real positions, and gradients of their sum of squares."""
    real = kernels.inside(lengths, heads[0].shape[2])[:, None, :, None]
    one, other = one.where(real, 0.0), other.where(real, 0.0)
    assert torch.allclose(one, other, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), heads) for y in (one, other))):
        assert torch.allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("window, causal", [(None, False), (6, False), (6, True)])
def test_sequences_end_to_end_are_the_mask(window, causal):
    """What is packed: no sequence sees another, or any padding; one of them has none, one a single position."""
    heads, lengths = drawn(23), torch.tensor([23, 1, 9])
    sides = (-1, -1) if window is None else (window // 2, 0 if causal else window // 2)
    ours = packed_attention(each_alone, *heads, lengths, *sides)
    exact = (attention(*heads, lengths=lengths) if window is None else
             longformer_attention(*heads, window, causal, lengths))
    same(ours, exact, heads, lengths)
    assert boundaries(lengths, 3, 23, lengths.device).tolist() == [0, 23, 23, 24, 46, 55, 69]


@pytest.mark.parametrize("l, block", [(40, 4), (37, 4), (33, 4), (5, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_folded_blocks_are_a_call_per_block(l, block, causal):
    heads, lengths = drawn(l), torch.tensor([l, 1, l // 2])
    ours = near_attention(*heads, block, None, causal, lengths)
    same(ours, attention(*heads, causal, block, lengths), heads, lengths)
    every = torch.full((3,), l)
    same(near_attention(*heads, block, None, causal), attention(*heads, causal, block), heads, every)


class Scaled(torch.autograd.Function):
    """A gradient that is off by a tenth."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        return 1.1 * grad


@pytest.mark.parametrize("wrong", [
    lambda q, k, v, bounds, longest, left, right: each_alone(q, k, v, bounds, longest, -1, -1),
    lambda q, k, v, bounds, longest, left, right: each_alone(q, k, v, bounds[[0, -1]], longest, left, right),
    lambda q, k, v, *more: each_alone(q, Scaled.apply(k), v, *more),
    lambda q, k, v, *more: each_alone(q, k, v, *more) * float("nan"),
    lambda *arguments: 1 / 0])
def test_only_what_agrees_on_this_device_is_used(wrong, monkeypatch):
    with torch.inference_mode():                           # whoever asks first
        assert agrees(each_alone, "cpu", torch.float32) and agrees(each_alone, "cpu", torch.bfloat16)
    monkeypatch.setattr(gpu_attention, "agrees", lambda function, *_: agrees(function, "cpu", torch.float32))
    for found, known in ((wrong, (None, None)), (each_alone, ("torch", each_alone))):
        monkeypatch.setattr(gpu_attention, "library", lambda module, name: found)
        gpu_attention.variable_length.cache_clear()
        assert gpu_attention.variable_length() == known
    gpu_attention.variable_length.cache_clear()


@pytest.mark.parametrize("model", ["transformer", "rotary"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_pathx_is_what_flash_needs(model, causal, monkeypatch):
    """No mask of pairs, half precision, last stride 1, head size a multiple of 8: else 16,384 positions are dense."""
    calls, masks, attend, lower_right = [], [], kernels._attend, kernels.causal_lower_right

    def noted(*arguments):
        calls.append(arguments)
        return attend(*arguments)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(kernels, "_attend", noted)
    monkeypatch.setattr(kernels, "causal_lower_right", lambda *sizes: masks.append(sizes) or lower_right(*sizes))
    c = vars(config(arch("pathx", model), TASKS["pathx"], causal=causal))
    c = SimpleNamespace(**{"rotary": 0.0} | c | {"block": 96})
    with torch.autocast("cpu", torch.bfloat16):
        Attention(c)(torch.randn(1, 400, c.d)).sum().backward()
    assert len(calls) == 5                                 # at full length four
    for *heads, _, mask in calls:
        assert mask is None
        for x in heads:
            assert x.dtype == torch.bfloat16 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
    # The library is told which keys a block sees: no tensor is made.
    assert masks == [(96, 192)] * 3 + [(16, 112)] if causal else not masks


def fake_gpu():
    """Whether tensors without values can be on a GPU that is not there: a CUDA build of a newer torch."""
    if not importlib.util.find_spec("torch.nn.attention.varlen"):
        return False                                       # an older torch asks the driver
    try:
        with without_values():
            return torch.version.cuda and (torch.zeros(2, 2, device="cuda") @ torch.zeros(2, 2, device="cuda")).is_cuda
    except Exception:
        return False


FAKE = pytest.mark.skipif(not fake_gpu(), reason="wants a CUDA build of torch")


@FAKE
@pytest.mark.parametrize("model", MODELS)
def test_every_model_stays_on_the_gpu(model, monkeypatch):
    """The forward pass of every task and objective: a tensor left on the CPU raises."""
    monkeypatch.setattr(kernels, "causal_lower_right",                 # whose tensors cannot be without values
                        lambda lq, lk: torch.ones(lq, lk, dtype=torch.bool, device="cuda").tril(lk - lq))
    for name, task in TASKS.items():
        for causal in (False, True):
            if (sizes := arch(name, model)) is None or name.endswith("_mini") or (
                    causal and model in ("linformer", "reformer")):
                continue
            with without_values():
                c = config(sizes | {"layers": 1}, task, causal=causal)
                l = c.length = min(c.length or 2000, 20_000)
                if c.channels is None:
                    c.vocab = c.vocab or 100
                denoiser = Denoiser(Backbone(c), 7)
                for part in denoiser.modules():            # `to` swaps tensors in place, which these cannot
                    part._parameters.update({k: nn.Parameter(v.detach().to("cuda")) for k, v in part._parameters.items()
                                             if v is not None})
                    part._buffers.update({k: v.to("cuda") for k, v in part._buffers.items() if v is not None})
                x = (torch.zeros(3, l, dtype=torch.int64, device="cuda") if c.vocab else
                     torch.zeros(3, l, c.channels, device="cuda"))
                lengths = torch.tensor([l, 1, l // 2], device="cuda") if c.vocab else None
                y = denoiser(x, lengths, torch.zeros(5, dtype=torch.int64, device="cuda"))
                assert y.is_cuda and y.shape == (5, 7), (name, causal)


@FAKE
@pytest.mark.parametrize("name", LIBRARIES)
def test_the_gpu_call_has_these_shapes(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    if name == "flash-attn":
        pytest.importorskip("flash_attn")
    with without_values():
        q, k, v = (torch.zeros(3, 64, 2, 16, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
        for sides in ((-1, -1), (16, 16), (16, 0)):
            y = packed_attention(library(*LIBRARIES[name]), q, k, v, torch.tensor([64, 1, 9], device="cuda"), *sides)
            assert y.is_cuda and y.shape == q.shape and y.dtype == q.dtype


@pytest.mark.parametrize("block, first, task, model, stage", [
    ("cost", 1, "pathx", "longformer", "pretrain"), ("hours", 3, "pathx", "s4", "scratch"),
    ("hours", 3, "text", "rotary", "spt"), ("hours", 3, "retrieval", "s4", "pretrain")])
def test_the_page_of_costs_shows_what_is_computed(block, first, task, model, stage, capsys):
    batch, steps = costs.stages(task, model)[stage]
    costs.row(*([model] if first == 1 else [task, model, stage]), task=task, model=model, batch=batch, steps=steps)
    page = (ROOT / "results" / "costs.md").read_text()
    shown = page.split(f"<!-- {block}:begin -->")[1].split(f"<!-- {block}:end -->")[0].splitlines()
    found = capsys.readouterr().out.strip()
    assert any(same_line(found, line) for line in shown)


def test_parts_of_like_length_cost_their_mean_and_memory_of_one():
    """A batch of ListOps in parts of 15 expressions; S4 takes it whole, because of its BatchNorm."""
    one, four = (costs.cost_on("listops", "rotary", n) for n in (15, 60))
    assert four.operations == 4 * one.operations and four.flops == pytest.approx(4 * one.flops)
    assert four.kept == one.kept
    one, two = (costs.cost_on("listops", "s4", n) for n in (4, 8))
    assert one.operations == two.operations and two.kept > 1.5 * one.kept


def test_the_first_hour_runs_without_a_gpu(tmp_path, capsys, monkeypatch):
    """Its sections but the suite and the kernels' minutes. What is off or fails says so; the others stay."""
    page, sections = tmp_path / "gpu.md", ("parity", "attention", "steps", "torchrun")
    words = ["--device", "cpu", "--out", str(page), "--only"]
    assert first_hour.main([*words, ",".join(sections)]) == 0
    before = page.read_text()
    assert all(f"<!-- {name}:begin -->" in before for name in sections)
    assert "**" not in before and "failed" not in before
    assert all(f"| {model} | 0e+00 | 0e+00 |" in before for model in MODELS if model != "pythia")
    assert "| s4, causal | 0e+00 |" in before and "| rotary, causal, blocks of 48 | 0e+00 |" in before
    assert "| 2, stopped by SIGTERM, resumed |" in before and "up to step 50" in capsys.readouterr().out

    monkeypatch.setitem(first_hour.TOLERANCE, "bfloat16", (1e-9, 1.0))
    monkeypatch.setattr(first_hour, "MODELS", {"s4": MODELS["s4"]})
    monkeypatch.setitem(first_hour.SECTIONS, "steps", lambda device: torch.zeros(2) @ torch.zeros(3))
    assert first_hour.main([*words, "parity,steps"]) == 1
    after = page.read_text()
    assert "**Not as it should be.** Against the CPU" in after and after.count("| **off** |") == 4
    assert "**Not as it should be.** **failed**: RuntimeError:" in after
    assert before.split("<!-- torchrun")[1] == after.split("<!-- torchrun")[1]
    assert not first_hour.alike([1, 2], [1, 2], [1, 2.1]) and first_hour.alike([1, 2], [1, 2.001])
