"""Export a finetuned run for programs without this repository: torch.export (.pt2) or ONNX."""

import copy
import io
import json
import math

import numpy as np
import torch
import torch.nn as nn

from files import UserError, reading, write_atomically
from kernels import inside
from own.task import as_stored
from tasks import EOS, PAD, UNK
from use.trained import without_targets


class ExportedModel(nn.Module):
    """A finetuned model for export. Normalisation, and kernels at the task's length, are constants.

    x: raw samples (b, l, channels) or ids (b, l), padded with anything; lengths: true ones (b,), if
    they differ. An example of two documents has two rows of x. Returns probabilities (b, classes),
    with a label per position (b, l, classes); or values in the unit of the labels (b, 1), float64
    because a unit may be fine (seconds since 1970)."""

    def __init__(self, trained):
        super().__init__()
        task, backbone = trained.task, trained.model.backbone
        self.model = trained.model
        self.kind = task.kind
        self.samples = not backbone.reads_symbols
        # float64 if float32 would lose too much
        dtype = torch.from_numpy(as_stored(task, np.zeros(1))).dtype
        self.register_buffer("mean", torch.tensor(task.mean, dtype=dtype))
        self.register_buffer("std", torch.tensor(task.std, dtype=dtype))
        self.scale = task.scale
        self.ends = task.ends or (0.0, 1.0)
        kernels = backbone.kernels(task.length)
        self.kernels = [tuple(K.detach() for K in kernel) for kernel in kernels]

    def forward(self, x, lengths=None):
        if lengths is not None:
            padding = ~inside(lengths, x.shape[1])
            x = x.masked_fill(padding[..., None] if self.samples else padding, PAD)
        if self.samples:
            x = ((x / self.scale - self.mean) / self.std).float()  # as Split.batch does
        outputs = self.model.classify(self.model.backbone.body(x, lengths, self.kernels), lengths)
        if self.kind == "labels":
            return outputs.sigmoid()
        if self.kind == "number":
            low, high = self.ends
            return low + (outputs.double() + 1) / 2 * (high - low)
        return outputs.softmax(-1)


@torch.no_grad()
def export(trained, path):
    """Export the model for batches of any size, all of the task's length. Compare the export with
    the model before writing it."""
    if path.suffix not in FORMATS:
        raise UserError(f"--export {path}: give a name that ends in .pt2 or .onnx")
    if trained.is_pretraining:
        raise UserError(f"--export needs a finetuned run, but {trained.run} is a pretraining run")
    task, exported = trained.task, ExportedModel(trained).eval()
    inputs = random_inputs(task, exported)
    # Before tracing: cached functions must not keep tensors of the trace.
    wanted = answers_in_float32(trained, *inputs)
    examples = torch.export.Dim("batch", min=1)
    program = torch.export.export(
        exported,
        tuple(tensor[: 2 * task.documents] for tensor in inputs),
        dynamic_shapes=[{0: task.documents * examples} for _ in inputs],
    )
    description = json.dumps(description_of(trained, inputs))
    raw, run = FORMATS[path.suffix](program, description)
    difference = (run(*inputs) - wanted).abs()
    if wanted.ndim == 3 and len(inputs) == 2:  # predictions past the end do not count
        difference = difference[inside(inputs[1], task.length)]
    error = difference.max().item()
    low, high = exported.ends  # of the answers; 1e-5 of their range is allowed
    largest = max(high - low, (wanted - low).abs().max().item())
    if not error < 1e-5 * largest + math.ulp(wanted.abs().max().item()):
        problem = f"the export of {trained.run} differs from the model by {error:.1g}"
        raise UserError(f"{problem}; nothing was written")
    write_atomically(path, lambda file: file.write(raw))
    rows = "b" if task.documents == 1 else "2 b"
    shapes = [f"{shape(rows, x)} {str(x.dtype).removeprefix('torch.')}" for x in inputs]
    note = ""
    if trained.dtype != "float32":
        note = f"; it computes in float32, but the run in {trained.dtype}"
    print(
        f"wrote {path}: {', '.join(shapes)} -> {shape('b', wanted)}; it differs from the model by "
        f"{error:.1g}{note}"
    )


def shape(rows, tensor):
    return f"({', '.join(map(str, (rows, *tensor.shape[1:])))})"


def random_inputs(task, exported):
    """Draw three examples of k documents: x (3 k, l[, channels]) and, if they differ, lengths (3
    k,)."""
    n, l = 3 * task.documents, task.length
    if exported.samples:
        noise = torch.randn(n, l, task.channels, dtype=exported.mean.dtype)
        x = (noise * exported.std + exported.mean) * task.scale
    else:
        x = torch.randint(0 if task.channels else EOS + 1, task.vocab, (n, l))
    if task.channels and not task.ragged:
        return (x,)
    return x, torch.cat((torch.tensor([l]), torch.randint(1, l + 1, (n - 1,))))


def answers_in_float32(trained, x, lengths=None):
    """Return what the export must return for raw inputs: probabilities, or values (n, 1)."""
    trained = copy.copy(trained)
    trained.dtype = "float32"
    arrays = x.numpy()
    if trained.task.channels:
        arrays = arrays.reshape(len(x), trained.task.length, -1)  # gray levels, too
    if lengths is not None:
        arrays = [array[:length] for array, length in zip(arrays, lengths)]
    predictions, probabilities = trained.predict(without_targets(trained.task, arrays))
    return torch.from_numpy(predictions[:, None] if probabilities is None else probabilities)


def description_of(trained, inputs):
    """Return what a program needs besides an exported model, for JSON: the names of the classes in
    the order of the probabilities; length, channels and dtype of the input, and whether it wants
    `lengths`; the id of each symbol, and those of the end, of padding and of an unknown symbol.
    between: what separates symbols in a text."""
    task = trained.task
    ids = {symbol: i for i, symbol in enumerate(task.symbols) if i > EOS}
    about = dict(target=task.kind, names=trained.names.tolist(), length=task.length)
    about |= dict(channels=task.channels, dtype=str(inputs[0].dtype).removeprefix("torch."))
    about |= dict(lengths=len(inputs) == 2, ids=ids, between=task.between)
    return about | dict(end=EOS, pad=PAD, unknown=UNK)


def as_pt2(program, description):
    """Return the bytes of an exported program, with its description inside, and a function that
    runs them."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"task.json": description})
    raw = buffer.getvalue()
    return raw, torch.export.load(io.BytesIO(raw)).module()


def as_onnx(program, description):
    """Return the same for ONNX, which lacks some operations of lru, mamba, s5 and spade."""
    with reading("--export .onnx is not possible here", "pip install onnx onnxscript onnxruntime"):
        import onnxruntime
        import onnxscript  # noqa: F401, for torch.onnx
    try:
        onnx = torch.onnx.export(program, verbose=False)
    except torch.onnx.OnnxExporterError:
        raise UserError(
            "ONNX lacks an operation of this model; give --export a name that ends in .pt2"
        ) from None
    onnx.model.metadata_props["task.json"] = description
    raw = onnx.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(raw)
    names = [entry.name for entry in session.get_inputs()]

    def run(*inputs):
        arrays = dict(zip(names, map(np.asarray, inputs)))
        return torch.from_numpy(session.run(None, arrays)[0])

    return raw, run


FORMATS = {".pt2": as_pt2, ".onnx": as_onnx}
