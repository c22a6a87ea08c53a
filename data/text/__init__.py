"""Documents tokenized once, and published as a corpus."""
