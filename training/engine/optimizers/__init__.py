"""One file per optimizer, named like `optimizer.name`: `build` creates it, `update` is the same update in FP64.

config/optimizers.py lists the state it keeps; training/engine/optimizer.py maps names to these files.
"""
