"""Evidence for the maintainers: precision matrix, benchmarks, GPU check, learning-rate envelope, defect detection."""
