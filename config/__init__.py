"""The typed run config: schema, loading, command line and the DeepSpeed JSON. Standard library and PyYAML only."""
