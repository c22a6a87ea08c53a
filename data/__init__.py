"""Text in, fixed-length token batches out.

The stages, each in its own package and each usable alone:

1. `sources`  where documents and rows come from, and their formats: files, also behind URLs (`remote`), or a hub.
2. `text`     documents are tokenized once, in parallel (`encode` in `workers`), and published atomically (`prepare`).
              `tokenizer`: bytes, a byte-level BPE trained on the data, or any Hugging Face fast tokenizer. What is
              tokenized already is checked and copied (`token_ids`).
3. `rows`     the same for rows: chats, pairs, sources with targets, labelled texts.
4. `corpora`  what was published: memory-mapped, checksummed files (`shards`, `row_shards`), and which sequences make
              global batch number n (`sampler`): a pure function, nothing to save, nothing to restore.
5. `batches`  this rank's sequences as tensors, read one step ahead (`loader`).

At a trillion tokens
--------------------
What holds at that size:

- Sources are streams: neither a corpus nor a download has to fit in memory or on the preparing disk. One document has
  to fit in memory.
- Preparation is linear in bytes, with memory bounded by one shard for each split and a fixed number of batches in
  flight. Shards have a fixed number of tokens (`prepare.SHARD_TOKENS`): 10^12 tokens are about 15,000 files.
- Reading is a memory map: a rank touches the pages of its own windows and the page cache does the rest. Shards may
  lie on a shared file system, or be copied to every node; only their names and sizes are looked at when they open.
  No more shards are mapped at a time than a process may have mappings (`shards.SHARDS_MAPPED`).
- The sampler's memory does not depend on the corpus (`sampler` has the reason and the source), so the shuffle is over
  the whole corpus and resuming at any position costs nothing.

What is missing for it:

- More than one reader, and workers on more than one machine. One process reads the stream and writes the shards; its
  workers tokenize. A worker does 2 to 3 MB of text a second with a BPE of 4096 (standard library, 2-core virtual
  machine), so 4 TB of text is 15 to 23 core-days; with bytes it is faster than its reader. `python -m
  lab.benchmark.data` says how many workers one reader keeps busy: some eighteen where every document is a file of
  18 kB. For more the stream would be cut into ranges by source file, a reader for each.
- Disk. What is tokenized is kept twice until the corpus is published, so that a killed preparation goes on
  (`batch_results`).
- Verification by sampling. `data.verify` reads every shard on every start; at terabytes set it to false, which still
  checks every size and header, and run the full check once after copying.
- Shards per node. With shards on node-local disks a node would hold only those its ranks read. The sampler shuffles
  over the whole corpus, so today every node needs all shards within reach.
"""
