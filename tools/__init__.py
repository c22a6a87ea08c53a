"""Tools that a user runs around a run: parity, analyze, replay, export_hf and generate."""
