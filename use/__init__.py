"""What predict.py does with a trained run, one file for each: label sequences, export the model,
show what it fills in, generate. trained.py is where it loads the run."""
