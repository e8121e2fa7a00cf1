"""Measurements on real hardware; see RESULTS.md for what they found."""
