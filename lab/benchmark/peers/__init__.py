"""Training loops of other libraries that Mantissa is compared with, on the same work.

Each module is started by a launcher with a file of `lab.benchmark.spec.Spec` and writes a `Result`.
"""
