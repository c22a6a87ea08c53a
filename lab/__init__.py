"""How the maintainers know: the precision matrix, benchmarks, the GPU check, the learning-rate envelope, detection."""
