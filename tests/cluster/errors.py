"""What can go wrong around the cluster, for callers that treat the cases apart."""

from __future__ import annotations


class ClusterUnavailableError(Exception):
    """This machine cannot run, or does not have, what the cluster needs. The message says what, and the remedy."""


class ClusterFailedError(Exception):
    """The cluster started and then failed. The message holds the end of the logs."""


class CommandFailedError(Exception):
    """A command-line tool ended with an error. The message holds the command and its output."""
