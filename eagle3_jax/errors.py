"""Errors whose message is meant for the person at the keyboard."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input. The command line prints the message without a traceback and exits with 2.

    A `ValueError`, so that users of the Python API need not know this class. Never for a state that only a defect of
    this library can reach.
    """


class ConfigError(UserError):
    """A config.json, or a choice made beside it, that this library cannot honour."""
