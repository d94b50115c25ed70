"""What runs at a client: local training and evaluation. `handler.py` is the only trainer."""
