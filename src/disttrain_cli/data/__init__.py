"""From files to batches: sources → index → packing → ordering → preprocessing workers → batches.

Start at `slots.py` (what an ordering decides), then `ordering.py` and `batches.py`. No torch here.
"""
