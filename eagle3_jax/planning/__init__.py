"""What a step needs on a machine that is not here: `eagle3 plan`."""
