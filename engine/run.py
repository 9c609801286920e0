"""`Run`: everything that both stages do around their training loops. A first reading may skip
it."""

import contextlib
import datetime
import functools
import json
import math
import operator
import sys
import time
import warnings

import numpy as np
import torch

import tasks
import zoo
from engine.feed import Feed
from engine.flags import defining
from engine.folder import Folder, code_of, environment, peak_memory, read_checkpoint
from engine.graph import Recorded, records
from engine.processes import PREEMPTED, Processes
from files import ROOT, UserError, write_atomically
from models import count
from recipes import learning_rate
from tasks import TASKS, kept
from zoo.structured import guide


def code_of_run(args):
    """Return `code_of` the stage, model and task of a run; without the files of other models and
    tasks."""
    homes = zoo.homes.get(args.model), tasks.homes.get(args.task, ROOT / "tasks" / "own.py")
    return code_of(
        "pretrain.py" if args.start == "pretrain" else "finetune.py",
        *(f"{home.parent.name}/{home.name}" for home in homes if home),
    )


class Run:
    """A training run: its steps, clock and scores. It connects the loop to processes.py, folder.py,
    feed.py.

    A stage's main calls Run(args, task, train), start and measured; in every step evaluates and
    evaluated, begin, exchange, backward and stepped; at the end load_best and finish. `state` holds
    what a resumed run needs besides weights and optimiser."""

    SAVE_SECONDS = 600  # save last.pt between evaluations, about this often
    EARLY = {1, 2, 5, 10, 20, 50}  # steps after which a line is printed and logged, too

    def __init__(self, args, task, train):
        """Check that the run directory is empty or, with --resume, holds this run. Exit if the run
        is finished. Write nothing yet. config: what the directory records of the run."""
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
        if args.micro_batch == 1 and args.batch % self.processes.world:
            raise UserError(
                f"--micro-batch 1: give 2, or a --batch that divides by {self.processes.world} "
                "processes"
            )
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
        args, self.model, self.optimizer = self.args, model, optimizer
        self.state = dict(
            step=0,
            evaluated=0,
            best=-math.inf,
            best_step=0,
            seconds=0.0,
            loss_sum=0.0,
            loss_steps=0,
            loss_parts={},
        )
        self.folder.take(self.config)
        self.processes.barrier()
        if self.folder.resumes:
            self.state |= self.folder.restore(model, optimizer, self.state)
        self.switch("train")  # schedule-free optimisers insist on it
        self.step = self.first = self.state["step"]
        # The loss, and its parts if it has names for them: of this step, and summed since the last
        # log line.
        sums = {"loss": self.state["loss_sum"]} | self.state["loss_parts"]
        self.losses = {name: torch.zeros((), device=self.device) for name in sums}
        self.loss_sums = {
            name: torch.full((), value, dtype=torch.float64, device=self.device)
            for name, value in sums.items()
        }
        # step, loss and gradient norm of the last step, or of the first step in which either was
        # not finite
        self.latest = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.count = torch.full((), float(self.step), device=self.device)
        # Use fewer parts if each computes its convolution kernels again or, on a GPU, launches all
        # operations again.
        costly = self.device.type == "cuda" or any(
            hasattr(layer.mixer, "kernel") for layer in model.backbone.layers
        )
        self.records = records(args, self.processes, optimizer, self.equal)
        self.feed = Feed(
            args, self.processes, self.task, self.examples, self.lengths, costly, self.records
        )
        self.rows, self.parts, self.numbers = self.feed.rows, self.feed.parts, self.feed.numbers
        print_plan(self)
        self.clock = self.saved_at = time.perf_counter()
        self.times, self.seconds_before, self.evaluation, self.stepping = (
            [],
            self.state["seconds"],
            None,
            False,
        )
        Processes.current = self  # from now on `guarded` logs what ends this run
        self.folder.begin_log(
            self.state,
            total=self.steps,
            argv=sys.argv,
            **environment(self.device, self.processes.world, self.processes.dtype),
        )
        if args.compile:
            # Compile all layers as one graph. Convolution kernels stay outside: complex arithmetic
            # gains nothing.
            model.backbone.body = torch.compile(model.backbone.body)
            for known in (
                "Dynamo detected a call to a `functools.lru_cache`",
                "Torchinductor does not support code",
            ):
                warnings.filterwarnings("ignore", known)  # both are harmless here
        self.forward = self.processes.distributed(model)
        return self.forward

    # ---- one step --------------------------------------------------------------------------------

    def evaluates(self, step):
        """Return whether to evaluate before this step. A resumed run does not repeat its last
        evaluation."""
        due = step == self.steps or (step > 0 and step % self.args.eval_every == 0)
        if due:
            self.read_loss()
        self.due_at = time.perf_counter()
        return due and step > self.state["evaluated"]

    def evaluated(self, step, score, remark="", **values):
        """Log an evaluation and print it, with a remark. Write last.pt, and best.pt if no `score`
        was better. Of equal ones the last counts, as in the official code: a small validation split
        soon has many."""
        if not all(math.isfinite(value) for value in values.values()):
            raise UserError(f"validation at step {step} gave {values}; {self.folder.last_good()}")
        self.evaluation = time.perf_counter() - self.due_at
        self.folder.log(kind="eval", step=step, seconds=round(self.seconds(), 1), **values)
        self.say(f"step {step:>6}/{self.steps}  {scores(values)}{remark}")
        self.state["evaluated"] = step
        if score >= self.state["best"]:
            self.state.update(best=score, best_step=step)
            with self.averaged():
                self.save("best.pt")
        self.save_last(step)

    @contextlib.contextmanager
    def averaged(self):
        """Inside, the model has the weights that the optimiser averages over time. Such an
        optimiser has two methods, as schedule-free ones do: `eval` puts the averages into the
        model, `train` the weights that are trained. It keeps them in `state`, which is saved.
        (BatchNorm's averages stay those of the trained weights.)"""
        self.switch("eval")
        yield
        self.switch("train")

    def switch(self, mode):
        """Call the optimiser's method of this name, if it has one."""
        getattr(self.optimizer, mode, lambda: None)()

    def begin(self, step, prepare):
        """Return the result of `prepare(step)`, a list of tuples of tensors, on the device. Also
        seed dropout by seed, step and process, so that a resumed run drops the same channels."""
        args, self.begun = self.args, time.perf_counter()
        if args.arch.get("guided"):
            guide(self.model, step, self.steps)
        stream = np.random.SeedSequence([args.seed, step, self.processes.rank]).generate_state(
            1, np.uint64
        )
        self.processes.seed(int(stream[0]))
        return self.feed.take(step, self.steps, prepare)

    def measured(self, learn):
        """Wrap learn(parts), a training step, so that its loss and gradient norm are logged. With
        --compile on a GPU the step becomes a CUDA graph."""

        def step(parts):
            learn(parts)
            norm = torch.nn.utils.get_total_norm(
                [
                    p.grad
                    for g in self.optimizer.param_groups
                    for p in g["params"]
                    if p.grad is not None
                ]
            )
            for name, loss in self.losses.items():
                self.loss_sums[name] += self.total(loss)
            this = torch.stack((self.count, self.losses["loss"], norm)).double()
            self.latest.copy_(torch.where(self.latest.isfinite().all(), this, self.latest))
            self.count += 1
            for loss in self.losses.values():
                loss.zero_()

        return Recorded(step, self.optimizer) if self.records else step

    def exchange(self, parts):
        """Yield the parts of a batch, one after another. Processes exchange gradients only in the
        last one."""
        for i, part in enumerate(parts):
            last = self.processes.world == 1 or i + 1 == len(parts)
            with contextlib.nullcontext() if last else self.forward.no_sync():
                yield part

    def backward(self, parts):
        """Add the sum of `parts`, {name: loss}, to gradients and logged loss; log several parts by
        their names, too. Call it outside autocast, so that float32 kernels stay float32."""
        loss = functools.reduce(operator.add, parts.values())
        # DDP averages gradients over processes; we want their sum
        (loss * self.processes.world).backward()
        names = {f"loss_{name}": part for name, part in parts.items()} if len(parts) > 1 else {}
        for name, part in ({"loss": loss} | names).items():
            if name not in self.losses:
                self.losses[name], self.loss_sums[name] = (
                    part.new_zeros(()),
                    part.new_zeros((), dtype=torch.float64),
                )
            self.losses[name] += part.detach()

    def batches(self, split, lengths=None, independent=False):
        """Yield (i, examples, batch) for the evaluation batches of this process. lengths (n,): put
        examples of similar length together. independent: results do not depend on which examples
        share a batch, so a GPU takes larger ones, with fewer launches. (In pretraining results do
        depend on it: the hidden positions are drawn per batch.)"""
        for i, rows, batch in self.feed.batches(split, lengths, independent):
            if self.processes.stops():
                self.leave()
            if batch is not None:
                yield i, rows, batch

    def stepped(self, step):
        """Finish a step. Call the model's own `after_step()`, if it has one (to average a teacher,
        for example). Every --log-every steps write a log line and, if last.pt is ten minutes old,
        last.pt. Early steps write one, too; its loss is the mean since the last multiple of
        --log-every. Other steps read nothing from the device."""
        getattr(self.model, "after_step", lambda: None)()
        state, groups = self.state, self.optimizer.param_groups
        state["loss_steps"] += 1
        logs = (step + 1) % self.args.log_every == 0 or step + 1 == self.steps
        if logs:
            self.read_loss()
        now = time.perf_counter()
        self.times.append(now - self.begun)  # without evaluating and saving
        done = step + 1 - self.first  # steps of this process
        early = {step + 1, done} & self.EARLY  # these lines show how long the run will take
        if logs or early:
            # the first steps are slow
            later = self.times if logs else self.times[len(self.times) // 2 :]
            pace, lr = sum(later) / len(later), max(group["lr"] for group in groups)
            if not logs:
                self.read_loss()
            sums = {"loss": state["loss_sum"]} | state["loss_parts"]
            losses = {name: value / state["loss_steps"] for name, value in sums.items()}
            self.say(
                f"step {step + 1:>6}/{self.steps}  {scores(losses)}  lr {lr:.2e}  "
                f"{1000 * pace:7.1f} ms/step  "
                f"time left {self.left(step, pace)}"
            )
            if done == 2:
                warn(self, self.left(step, pace))
            if logs or step + 1 in self.EARLY:
                self.folder.log(
                    kind="train",
                    step=step + 1,
                    **losses,
                    lr=lr,
                    gradient_norm=self.latest[2].item(),
                    ms_per_step=round(1000 * pace, 2),
                    seconds=round(self.seconds(), 1),
                )
        if logs:
            self.times = []
            for total in self.loss_sums.values():
                total.zero_()
            state.update(loss_sum=0.0, loss_parts={}, loss_steps=0)
            if now - self.saved_at > self.SAVE_SECONDS:  # all processes have just read the loss
                self.save_last(step + 1)
        self.step, self.stepping = step + 1, True
        if self.processes.stops():
            self.leave()

    def left(self, step, pace):
        """Return the time that the remaining steps, validation and test will take."""
        _, val, test = self.args.data["sizes"]
        # evaluations left
        often = self.steps // self.args.eval_every - step // self.args.eval_every
        # a forward pass is a third of a step
        each = self.evaluation or pace / 3 * val / self.args.batch
        times = (
            often
            + (self.steps % self.args.eval_every > 0)
            + (test / val if self.args.start != "pretrain" else 0)
        )
        return datetime.timedelta(seconds=int(pace * (self.steps - step - 1) + each * times))

    def leave(self):
        """Save what is not saved yet and end this process."""
        if self.step > self.state["step"]:
            self.save_last(self.step)
        self.processes.close()
        raise SystemExit(PREEMPTED)

    def read_loss(self):
        """Read the sum of losses so far into `state`. If a loss or gradient was not finite, stop
        the run before anything is saved."""
        step, loss, norm = self.latest.tolist()
        if not math.isfinite(loss + norm):
            factor = learning_rate(step, self.steps, self.args)
            rates = ", ".join(
                f"{g['name']} {factor * g['initial_lr']:.3g}" for g in self.optimizer.param_groups
            )
            raise UserError(
                f"loss is {loss} at step {step + 1:.0f}: learning rates {rates}, gradient norm "
                f"{norm:.3g}; "
                f"{self.folder.last_good()}"
            )
        loss, *parts = [(name, value.item()) for name, value in self.loss_sums.items()]
        self.state.update(loss_sum=loss[1], loss_parts=dict(parts))

    # ---- clock and files -------------------------------------------------------------------------

    def seconds(self):
        return self.seconds_before + time.perf_counter() - self.clock

    def save(self, name, **more):
        """Write a checkpoint: model, config, everything the task knows of its data, and `more`."""
        self.folder.save(
            name,
            dict(model=self.model.state_dict(), config=self.config, task=self.task, **more),
        )

    def save_last(self, step):
        self.read_loss()
        self.switch("train")  # a signal may stop an evaluation
        self.state.update(step=step, seconds=self.seconds())
        self.save("last.pt", optimizer=self.optimizer.state_dict(), state=self.state)
        self.saved_at = time.perf_counter()

    def load_best(self):
        """Put the weights that validation chose into the model, on all processes."""
        self.processes.barrier()  # the first process writes best.pt
        self.model.load_state_dict(read_checkpoint(self.args.out / "best.pt")["model"])

    def keep_kernels(self, before, l):
        """Write kernels.npz for figure 4: `kernel_maxima` before the first step and with the best
        weights."""
        if before is not None:
            self.load_best()
            kernels = dict(before=before, after=kernel_maxima(self.model.backbone, l))
            if self.processes.main:
                write_atomically(
                    self.args.out / "kernels.npz", lambda file: np.savez(file, **kernels)
                )

    def finish(self, **results):
        """Write result.json, print the scores and leave the process group."""
        args, names = (
            self.args,
            (
                "task",
                "model",
                "objective",
                "train_fraction",
                "label_fraction",
                "joint",
                "init",
                "seed",
                "data",
                "recipe",
                "changed",
                "pretrained",
                "code",
            ),
        )
        record = (
            results
            | {name: self.config[name] for name in names if name in self.config}
            | dict(
                full_recipe=not self.config["changed"]
                and self.config["recipe"].split("/")[1:] == [args.model, args.objective],
                steps=self.steps,
                epochs=round(self.steps / self.per_epoch, 2),
                best_step=self.state["best_step"],
                parameters=count(self.model),
                train_examples=self.examples,
                seconds=round(self.seconds(), 1),
                peak_memory_bytes=peak_memory(self.device),
                **environment(self.device, self.processes.world, self.processes.dtype),
            )
        )
        self.folder.finish(record)
        numbers = {name: value for name, value in results.items() if isinstance(value, float)}
        self.say(
            f"done in {record['seconds']:.0f} s: best at step {record['best_step']}; "
            f"{scores(numbers)}; wrote "
            f"{args.out / 'result.json'}"
        )
        self.processes.close()


def warn(run, left):
    """If the rest of a run would take days, print which runs finish today."""
    if left.days:
        steps = int(run.steps * (datetime.timedelta(hours=12) / left))
        demo = f"{run.task['family']}_demo"
        other = (
            f", or --task {demo if demo in TASKS else 'pathfinder_demo'}"
            if run.args.start != "spt"
            else ""
        )
        run.say(
            f"  note: about {left / datetime.timedelta(days=1):.1f} days on this machine. To "
            "finish today: "
            f"--steps {steps}{other}. GPU hours: results/costs.md"
        )


def scores(values):
    return "  ".join(f"{name} {value:.4f}" for name, value in values.items())


def print_plan(run):
    """Print all settings before the first step."""
    args = run.args
    run.say(
        f"{args.task} / {args.model} / {args.objective}: {count(run.model):,} parameters; "
        f"{run.examples:,} "
        f"training examples; recipe {args.recipe}"
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
    if args.recipe.split("/")[1:] != [args.model, args.objective]:
        run.say(
            f"  note: no {args.objective} recipe for {args.model} on this task: it takes the "
            "settings above"
        )
    if args.warmup >= run.steps:
        run.say(
            f"  note: the run ends before its {args.warmup} warm-up steps do; shorten them with "
            "--warmup"
        )
    if args.micro_batch and args.micro_batch < args.batch and args.arch.get("norm") == "batch":
        run.say(
            "  note: BatchNorm takes its statistics per micro-batch, so --micro-batch changes the "
            "results"
        )


@torch.no_grad()
def kernel_maxima(backbone, l):
    """Return what figure 4 draws (paper, section 3.6): max over channels of |K|, float32 (layers,
    c, l). None if the model has no kernels."""
    maxima = [
        layer.mixer.kernel(l).abs().amax(1)
        for layer in backbone.layers
        if hasattr(layer.mixer, "kernel")
    ]
    return torch.stack(maxima).cpu().numpy() if maxima else None
