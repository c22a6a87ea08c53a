"""Silent data corruption: bits that flip in weights, masters, moments, gradients, activations or on the network."""
