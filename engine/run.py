"""`Run`: everything that both stages do around their training loops. A first reading may skip
it."""

import contextlib
import datetime
import json
import math
import sys
import time
import warnings

import numpy as np
import torch

from engine.feed import Feed
from engine.flags import defining
from engine.folder import Folder, code_of_run, environment, peak_memory, read_checkpoint
from engine.graph import Recording, records
from engine.losses import Losses
from engine.processes import PREEMPTED, Processes
from files import UserError, write_atomically
from models import count
from tasks import kept
from zoo.structured import guide


class Run:
    """A training run: its steps, evaluations, clock and results. processes.py, folder.py, feed.py
    and losses.py have the rest.

    A stage's main calls Run(args, task, train), start and measured; in every step evaluates and
    evaluated, begin, exchange, backward and stepped; at the end load_best and finish. `state` holds
    what a resumed run needs besides weights and optimiser."""

    SAVE_SECONDS = 600  # save last.pt between evaluations, about this often
    EARLY = {1, 2, 5, 10, 20, 50}  # steps after which a line is printed and logged, too
    kernels = None  # `kernel_maxima` before the first step of pretraining

    def __init__(self, args, task, train):
        """Check that the run directory is empty or, with --resume, holds this run. Exit if the run
        is finished. Write nothing yet."""
        self.args, self.task, self.processes = args, kept(task), Processes(args)
        self.device, self.say = self.processes.device, self.processes.say
        self.autocast, self.total = self.processes.autocast, self.processes.total
        self.folder = Folder(args.out, self.processes.main)
        self.equal = train.lengths() is None
        # With BatchNorm no batch is cut by length: statistics are those of the whole batch, or of
        # each micro-batch.
        self.lengths = None if args.arch.get("norm") == "batch" else train.lengths()
        self.examples = len(train)
        self.per_epoch = self.examples // args.batch
        self.steps = args.steps
        world = self.processes.world
        if args.micro_batch == 1 and args.batch % world:
            raise UserError(f"--micro-batch 1: give 2, or a --batch divisible by {world} processes")
        self.config = defining(args) | {"code": code_of_run(args)}
        finished = self.folder.look(self.config, args.resume)
        self.config |= self.folder.began
        # One round trip: a resumed run writes best.pt with the same bytes.
        self.config = json.loads(json.dumps(self.config))
        self.processes.barrier()  # no process writes before all have checked
        if finished:
            self.say(f"{args.out} is finished; nothing to do")
            self.processes.close()
            raise SystemExit(0)

    def start(self, model, optimizer):
        """Lock the run directory, restore a stopped run, print and log the plan. Return the model
        to call: compiled or distributed, if requested."""
        args = self.args
        self.model = model
        self.optimizer = optimizer
        self.state = dict(
            step=0,
            evaluated=0,  # the step of the last evaluation
            best=-math.inf,
            best_step=0,
            seconds=0.0,
            losses={"loss": 0.0},  # summed since the last log line, and the number of these steps
            loss_steps=0,
        )
        if args.start == "pretrain":
            self.kernels = kernel_maxima(model.backbone, self.task["length"])  # for figure 4
        self.folder.create(self.config)
        self.processes.barrier()
        if self.folder.resumes:
            self.state = self.folder.restore(model, optimizer)
        self.step = self.first = self.state["step"]
        self.losses = Losses(self.device, self.step, self.state["losses"])
        self.make_feed()
        print_plan(self)
        self.clock = self.saved_at = time.perf_counter()
        self.seconds_before = self.state["seconds"]
        self.times = []  # seconds of each step since the last log line
        self.evaluation = 0.0  # seconds of the last one
        self.stepping = False  # whether there is a step that a signal should save
        Processes.current = self  # from now on `guarded` logs what ends this run
        self.folder.begin_log(self.state, total=self.steps, argv=sys.argv, **self.environment())
        if args.compile:
            compile_layers(model.backbone)
        self.forward = self.processes.distributed(model)
        return self.forward

    def make_feed(self):
        """Decide how batches are cut into parts, and whether steps are recorded as CUDA graphs."""
        args = self.args
        # Use fewer parts if each computes its convolution kernels again or, on a GPU, launches all
        # operations again.
        kernels = any(hasattr(layer.mixer, "kernel") for layer in self.model.backbone.layers)
        costly = kernels or self.device.type == "cuda"
        self.records = records(args, self.processes, self.optimizer, self.equal)
        self.feed = Feed(
            args, self.processes, self.task, self.examples, self.lengths, costly, self.records
        )
        self.rows = self.feed.rows
        self.parts = self.feed.parts

    # ---- one step --------------------------------------------------------------------------------

    def evaluates(self, step):
        """Return whether to evaluate before this step: a resumed run does not do it again."""
        due = step == self.steps or (step > 0 and step % self.args.eval_every == 0)
        if due:
            self.read_losses()
        self.asked = time.perf_counter()
        return due and step > self.state["evaluated"]

    def evaluated(self, step, score, remark="", **values):
        """Log and print an evaluation. Write last.pt, and best.pt if no `score` was better. Of
        equal ones the last counts, as in the official code."""
        if not all(math.isfinite(value) for value in values.values()):
            raise UserError(f"validation at step {step} gave {values}; {self.folder.last_good()}")
        self.evaluation = time.perf_counter() - self.asked
        self.folder.log(kind="eval", step=step, seconds=self.seconds(), **values)
        self.say(f"step {step:>6}/{self.steps}  {scores(values)}{remark}")
        self.state["evaluated"] = step
        if score >= self.state["best"]:
            self.state.update(best=score, best_step=step)
            self.save("best.pt")
        self.save_last(step)

    def begin(self, step, make_parts):
        """Return the result of `make_parts(step)` on the device. Seed dropout by seed, step and
        process, so that a resumed run drops the same channels."""
        args = self.args
        self.begun = time.perf_counter()
        if args.arch.get("guided"):
            guide(self.model, step, self.steps)
        key = np.random.SeedSequence([args.seed, step, self.processes.rank])
        self.processes.seed(int(key.generate_state(1, np.uint64)[0]))
        return self.feed.next_parts(step, self.steps, make_parts)

    def measured(self, learn):
        """Wrap learn(parts), a training step: its loss and gradient norm are logged, and with
        --compile on a GPU it becomes a CUDA graph."""

        def step(parts):
            learn(parts)
            self.losses.end_step(self.total, self.optimizer)

        return Recording(step, self.optimizer) if self.records else step

    def positions(self, parts):
        """Return how many positions the whole batch predicts, over all processes; at least 1.
        Negative indices stand for none (`filled` in graph.py)."""
        return self.total(sum((part.hidden >= 0).sum() for part in parts)).clamp(min=1)

    def exchange(self, parts):
        """Yield the parts of a batch. Processes exchange gradients only in the last one."""
        for i, part in enumerate(parts):
            last = self.processes.world == 1 or i + 1 == len(parts)
            with contextlib.nullcontext() if last else self.forward.no_sync():
                yield part

    def backward(self, parts):
        """Add the sum of `parts`, {name: loss}, to gradients and logged loss; log several parts by
        their names, too. Call it outside autocast, so that float32 kernels stay float32."""
        loss = sum(parts.values())
        # DDP averages gradients over processes; we want their sum
        (loss * self.processes.world).backward()
        self.losses.add("loss", loss)
        if len(parts) > 1:
            for name, part in parts.items():
                self.losses.add(f"loss_{name}", part)

    def batches(self, split, lengths=None, independent=False):
        """Yield (i, examples, batch) for the evaluation batches of this process. lengths (n,): put
        examples of similar length together. independent: results do not depend on which examples
        share a batch, so a GPU takes larger ones. (Pretraining draws hidden positions per batch.)
        """
        for i, rows, batch in self.feed.batches(split, lengths, independent):
            if self.processes.stops():
                self.leave()
            if batch is not None:
                yield i, rows, batch

    def stepped(self, step):
        """Finish a step. Call the model's own `after_step()`, if it has one (e.g. to average a
        teacher). Every --log-every steps write a log line and, if last.pt is ten minutes old,
        last.pt. Early steps write a line, too. Other steps read nothing from the device."""
        getattr(self.model, "after_step", lambda: None)()
        done = step + 1
        self.state["loss_steps"] += 1
        logs = done % self.args.log_every == 0 or done == self.steps
        early = not self.EARLY.isdisjoint({done, done - self.first})  # of the run or this process
        if logs or early:
            self.read_losses()
        self.times.append(time.perf_counter() - self.begun)  # without evaluating and saving
        if logs or early:
            self.report(done, logs)
        if logs:
            self.times = []
            self.losses.clear()
            self.state.update(losses={"loss": 0.0}, loss_steps=0)
            # all processes have just read the loss
            if time.perf_counter() - self.saved_at > self.SAVE_SECONDS:
                self.save_last(done)
        self.step = done
        self.stepping = True
        if self.processes.stops():
            self.leave()

    def report(self, step, logs):
        """Print and log losses, learning rate and pace. logs: at a multiple of --log-every."""
        # the first steps are slow
        times = self.times if logs else self.times[len(self.times) // 2 :]
        pace = sum(times) / len(times)
        rate = max(group["lr"] for group in self.optimizer.param_groups)
        steps = self.state["loss_steps"]
        losses = {name: total / steps for name, total in self.state["losses"].items()}
        evaluations = (self.steps - step) // self.args.eval_every + 1
        seconds = pace * (self.steps - step) + self.evaluation * evaluations
        left = datetime.timedelta(seconds=int(seconds))
        self.say(
            f"step {step:>6}/{self.steps}  {scores(losses)}  lr {rate:.2e}  "
            f"{1000 * pace:7.1f} ms/step  time left {left}"
        )
        if logs or step in self.EARLY:
            record = dict(lr=rate, gradient_norm=self.losses.latest[2].item())
            record |= dict(ms_per_step=round(1000 * pace, 2), seconds=self.seconds())
            self.folder.log(kind="train", step=step, **losses, **record)

    def leave(self):
        """Save what is not saved yet and end this process."""
        if self.step > self.state["step"]:
            self.save_last(self.step)
        self.processes.close()
        raise SystemExit(PREEMPTED)

    def read_losses(self):
        """Read the sums of losses into `state`. Stop a run if a loss or gradient is not finite."""
        step, loss, norm = self.losses.latest.tolist()
        if not math.isfinite(loss + norm):
            raise UserError(
                f"loss is {loss} at step {step + 1:.0f}: --lr {self.args.lr:g}, gradient norm "
                f"{norm:.3g}; {self.folder.last_good()}"
            )
        self.state["losses"] = self.losses.read()

    # ---- clock and files -------------------------------------------------------------------------

    def seconds(self):
        """Return how long the run has taken, with the time before it was resumed."""
        return round(self.seconds_before + time.perf_counter() - self.clock, 1)

    def save(self, name, **more):
        """Write a checkpoint: model, config, everything the task knows of its data, and `more`."""
        record = dict(model=self.model.state_dict(), config=self.config, task=self.task)
        self.folder.save(name, record | more)

    def save_last(self, step):
        self.read_losses()
        self.state.update(step=step, seconds=self.seconds())
        self.save("last.pt", optimizer=self.optimizer.state_dict(), state=self.state)
        self.saved_at = time.perf_counter()

    def load_best(self):
        """Put the weights that validation chose into the model, on all processes."""
        self.processes.barrier()  # the first process writes best.pt
        self.model.load_state_dict(read_checkpoint(self.args.out / "best.pt")["model"])

    def keep_kernels(self):
        """Write kernels.npz for figure 4: `kernel_maxima` before the first step and at best."""
        self.load_best()
        after = kernel_maxima(self.model.backbone, self.task["length"])
        path = self.args.out / "kernels.npz"
        if self.processes.main:
            write_atomically(path, lambda file: np.savez(file, before=self.kernels, after=after))

    # what result.json repeats of config.json
    REPEATED = """task model objective train_fraction label_fraction labels_per_class joint init
        seed data recipe changed pretrained code"""

    def finish(self, **results):
        """Write result.json, print the scores and leave the process group."""
        if self.kernels is not None:
            self.keep_kernels()
        names = [name for name in self.REPEATED.split() if name in self.config]
        record = results | {name: self.config[name] for name in names}
        record |= dict(
            full_recipe=has_recipe(self.args) and not self.config["changed"],
            steps=self.steps,
            epochs=round(self.steps / self.per_epoch, 2),
            best_step=self.state["best_step"],
            parameters=count(self.model),
            train_examples=self.examples,
            seconds=self.seconds(),
            peak_memory_bytes=peak_memory(self.device),
            **self.environment(),
        )
        self.folder.finish(record)
        numbers = {name: value for name, value in results.items() if isinstance(value, float)}
        self.say(
            f"done in {record['seconds']:.0f} s: best at step {record['best_step']}; "
            f"{scores(numbers)}; wrote {self.folder.path / 'result.json'}"
        )
        self.processes.close()

    def environment(self):
        return environment(self.device, self.processes.world, self.processes.dtype)


def scores(values):
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


def has_recipe(args):
    """Return whether the recipe is that of this model and objective, not of similar ones."""
    return args.recipe.split("/")[1:] == [args.model, args.objective]


def print_plan(run):
    """Print all settings before the first step."""
    args = run.args
    run.say(
        f"{args.task} / {args.model} / {args.objective}: {count(run.model):,} parameters; "
        f"{run.examples:,} training examples; recipe {args.recipe}"
    )
    for group in run.optimizer.param_groups:
        run.say(
            f"  {group['name']:5} {sum(p.numel() for p in group['params']):11,} parameters, "
            f"lr {group['initial_lr']:g}, weight decay {group['weight_decay']:g}"
        )
    run.say(
        f"  {run.steps:,} steps of {args.batch} examples = {run.steps / run.per_epoch:.1f} epochs; "
        f"{args.schedule} schedule after {args.warmup:,} warm-up steps; evaluation every "
        f"{args.eval_every:,}"
    )
    if args.fitted:
        run.say(f"  your data: {args.fitted}")
    run.say(f"  run directory {args.out}; changes to the recipe: {run.config['changed'] or 'none'}")
    if not has_recipe(args):
        run.say(f"  note: no {args.objective} recipe for {args.model} on this task")
    if args.warmup >= run.steps:
        run.say(f"  note: the run ends before its {args.warmup} warm-up steps do; see --warmup")
    if args.arch.get("norm") == "batch" and (args.micro_batch or args.batch) < args.batch:
        run.say("  note: BatchNorm takes statistics per micro-batch, so results change")


def compile_layers(backbone):
    """Compile all layers as one graph, without kernels: complex arithmetic gains nothing."""
    backbone.body = torch.compile(backbone.body)
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
    warnings.filterwarnings("ignore", "Torchinductor does not support code")


@torch.no_grad()
def kernel_maxima(backbone, l):
    """Return what figure 4 draws (section 3.6): max over channels of |K|, (layers, c, l)."""
    mixers = [layer.mixer for layer in backbone.layers if hasattr(layer.mixer, "kernel")]
    maxima = [mixer.kernel(l).abs().amax(1) for mixer in mixers]
    return torch.stack(maxima).cpu().numpy() if maxima else None
