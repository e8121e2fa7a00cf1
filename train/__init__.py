"""Training of draft heads: data, features, loss, loop."""
