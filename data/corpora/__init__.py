"""Published corpora: their files, mixtures of them, and the order of their sequences."""
