"""The machinery of a training run: everything that is not the method. Skip this folder at a first
reading.

setup.py: what is settled before a run. run.py: `Run`, which the training loops call. flags.py: the
parser, the recipe, names of runs. feed.py: the batch of a step. graph.py: a step as a CUDA graph.
losses.py: what a step adds to the log. folder.py: the run directory. processes.py: processes,
device, signals. targets.py: losses and scores of each kind of target."""
