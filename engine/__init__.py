"""The machinery of a training run: everything that is not the method. Skip this folder at a first
reading.

setup.py: what is settled before a run. flags.py: the parser, the recipe, names of runs.
processes.py: processes, device, signals. folder.py: the run directory. feed.py: the batch of a step. graph.py: a step as a CUDA graph.
run.py: `Run`, which the training loops call."""
