"""Tests mirror the rooms of the repository."""
