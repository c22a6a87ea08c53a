"""One file an optimizer, called as `optimizer.name` is: `build` makes it, `update` is the same update in FP64.

What it keeps stands in config/optimizers.py; training/engine/optimizer.py has them by name.
"""
