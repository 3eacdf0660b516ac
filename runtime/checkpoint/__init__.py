"""Reading and writing model and training state. Today: one consolidated file of weights (``weights.py``)."""
