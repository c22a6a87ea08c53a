"""Training loops of other libraries, to compare Mantissa with on the same work.

Each module is started by a launcher with the file of a `lab.benchmark.spec.Spec` and writes a `Result`.
"""
