"""From people's files to batches: conversations, masks, vocabulary, shards, packing; and the `eagle3 data` commands."""
