"""Text in, fixed-length token batches out, in stages that are each usable alone.

1. `sources`  where documents and rows come from, and their formats: files, also behind URLs (`remote`), or a hub.
2. `text`     documents are tokenized once, in parallel, and published atomically (`prepare`).
3. `rows`     the same for rows: chats, pairs, sources with targets, labelled texts.
4. `corpora`  what was published: memory-mapped, checksummed files, and which sequences make global batch number n
              (`sampler`): a pure function, nothing to save, nothing to restore.
5. `batches`  this rank's sequences as tensors, read one step ahead (`loader`).

docs/data.md has what holds, and what is missing, at a trillion tokens.
"""
