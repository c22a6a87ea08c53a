"""How the maintainers know: the precision matrix, benchmarks, the GPU check and the learning-rate envelope."""
