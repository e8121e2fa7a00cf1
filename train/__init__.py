"""Training of EAGLE-3 draft heads: data -> features -> loss -> loop."""
