"""What predict.py does with a trained run. trained.py loads it; recurrent.py is for generation."""
