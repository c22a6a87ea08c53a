"""Where documents and rows are read from, and in which formats."""
