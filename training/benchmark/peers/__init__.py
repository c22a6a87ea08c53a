"""Training loops that Mantissa is measured against: what its users would write with other libraries, on the same work.

Each module is started by a launcher with a file of `training.benchmark.spec.Spec` and writes what came of it.
"""
