"""Published corpora: their files, mixtures of them, the order of their sequences, and the answers sampled."""
