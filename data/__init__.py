"""Text in, fixed-length token batches out."""
