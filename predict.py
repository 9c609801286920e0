"""Use a trained run: predict labels, extract features, export the model, fill in or continue
sequences. The folder use/ has a file for each.

    python predict.py RUN --input new.csv      finetuned run: a label for each sequence of a file
    python predict.py RUN                      the same for the test split
    python predict.py RUN --features out.npy   (n, d): the input of the head; pretrained run: means
    python predict.py RUN --export model.pt2   for programs without this repository; or model.onnx
    python predict.py RUN --show sheet.png     pretrained run: what it fills in
    python predict.py RUN --prompt "[MAX 3"    causally pretrained run: continue symbols, or images

Labels are written to predictions.csv, images to RUN/sample.png. A file is a table, .npz, .ts or
.txt, as for `--task file:` (results/own.md); labels may be missing. In Python:

    from predict import load
    model = load("runs/text_demo-s4-masked-scratch-s0")
    names, probabilities = model(["a film to remember", "what a waste"])

Only the run directory is needed: best.pt also holds the normalisation of its data, its symbols and
its classes."""

from pathlib import Path

from data import open_task
from engine.flags import between
from engine.processes import guarded
from files import Parser
from own.columns import add_layout, given
from tasks import folder_name
from tasks.picture import picture
from use.export import export
from use.label import examples_beside, label, new_examples
from use.pretrained import generate, show
from use.trained import TrainedModel as load


def parse_args(argv):
    parser = Parser(examples=True, description="Predictions of a trained run.", allow_abbrev=False)
    add = parser.add_argument
    file = dict(type=Path, metavar="FILE")
    add("run", type=Path, metavar="RUN", help="directory of a run")
    new = "new sequences: a table, .npz, .ts, or .txt with one text per line (default: test split)"
    add("--input", **file, help=new)
    out = Path("predictions.csv")
    add("--out", **file, default=out, help="where to write predictions (default: %(default)s)")
    add("--features", **file, help="write features (n, d), not predictions")
    add("--export", **file, help="write the model for other programs (.pt2, .onnx)")
    add("--show", **file, help="draw what a pretrained run fills in (.png, .pdf)")
    add("--prompt", help="beginning of the sequence (default: taken from the validation split)")
    skip = "leave out rows of --input that cannot be read; else they are an error"
    add("--skip-bad", action="store_true", help=skip)
    add("--seed", type=between(int, 0, 2**63 - 1), default=0, help="seed of the drawn symbols")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="for predictions and features")
    add("--data-dir", default="data", help="where prepared data sets live")
    add_layout(parser, "--input")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    trained = load(args.run, args.data_dir)
    task = trained.saved["task"]
    prepared = Path(args.data_dir, folder_name(task), "meta.json").exists()
    if not (prepared or args.input or args.export) and (path := examples_beside(trained)):
        print(f"the run's data are not here; using {path} instead")
        args.input = path
    if args.show:
        picture("--show", args.show)
    if args.export:
        export(trained, args.export)
    elif args.show:
        if args.input:
            split, *_ = new_examples(trained, args.input, given(args))
        else:
            _, _, split, _ = open_task(task, args.data_dir)
        show(trained, split, args.show)
    elif args.prompt is not None or trained.is_pretraining and not (args.features or args.input):
        generate(trained, args)
    else:
        label(trained, args)


if __name__ == "__main__":
    guarded(main)
