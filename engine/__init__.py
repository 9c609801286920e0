"""Everything of a training run that is not the method. A first reading skips this room.

flags.py: the parser, the recipe, names of runs. processes.py: processes, device, signals. folder.py: the run directory.
feed.py: which examples a step sees. graph.py: a step as a CUDA graph. run.py: `Run`, which the training loops call.
"""
