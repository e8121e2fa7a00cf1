"""Errors whose message is meant for the person at the keyboard."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints the message without a traceback and exits with 2."""


class ConfigError(UserError, ValueError):
    """A config.json, or a choice made beside it, that this library cannot honour."""
