"""The command ``bestresponse tune``: tune a problem that a function of the user makes."""

from .setup import Setup as Setup
