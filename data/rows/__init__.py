"""Rows rendered, tokenized and packed once, and published as a corpus; reward functions."""
