"""One file an optimizer, called as `optimizer.name` is: `build` makes it, `update` is the same update in FP64."""
