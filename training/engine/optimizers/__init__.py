"""One file per optimizer: `build` creates it, `update` is the same update in FP64 (`Implementation` in
optimizer.py)."""
